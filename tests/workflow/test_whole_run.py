"""The whole pipeline on a tiny target with real torch builds, and a swap of the build and back.

The tests of this file run in order in one folder: a torch environment takes gigabytes and half a minute.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--configfile", str(ROOT / "tests/tiny.yaml")]
NEWER = ["--config", "torch={version: 2.11.0}"]

FIRST_BUILD = "torch-2.10.0-cu128"
SECOND_BUILD = "torch-2.11.0-cu130"

PER_BUILD = {
    "fingerprint",
    "warm_cache",
    "train_drafter",
    "export_drafter",
    "check_weights",
    "check_generation",
    "check_records",
    "collect_checks",
    "plot_run",
    "require_checks",
    "train",
}
DATASET = {"prepare_target", "read_conversations", "regenerate_responses", "pack_rows"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(shared_project):
    """The shared folder with both environments' first half: the newer build, the tiny target and its prompts."""
    project = shared_project
    lines = (ROOT / "data/starter/prompts.jsonl").read_text().splitlines()
    short = [line for line in lines if len(line) < 160][:48]
    (project.folder / "prompts.jsonl").write_text("\n".join(short) + "\n")
    project.run("environment", *TINY, *NEWER)
    made = project.python(SECOND_BUILD, ROOT / "tests/torch_env/tiny.py", project.folder / "tiny-target")
    assert made.returncode == 0
    return project


def test_a_whole_run_trains_a_drafter_that_passes_its_checks(tiny):
    result = tiny.run("train", *TINY)
    assert "Provided cores" in result.output  # from the default profile
    assert set(result.jobs) == {"install", *PER_BUILD, *DATASET}
    run = tiny.only(f"results/runs/tiny/{FIRST_BUILD}-*")
    checks = json.loads((run / "checks.json").read_text())
    assert checks["passed"]
    assert {path.name for path in run.iterdir()} >= {
        "drafter",
        "metrics.jsonl",
        "acceptance.tsv",
        "train.json",
        "plots",
    }
    assert {"config.json", "model.safetensors"} <= {path.name for path in (run / "drafter").iterdir()}
    install = json.loads(tiny.only(f"results/environments/{FIRST_BUILD}-*/install.json").read_text())
    assert install["torch"]["cuda"] == "12.8"


def test_the_fingerprint_says_which_build_is_installed(tiny):
    fingerprint = json.loads(tiny.only(f"results/environments/{FIRST_BUILD}-*/fingerprint.json").read_text())
    assert fingerprint["compile"]["fields"]["torch"].startswith("2.10.0")
    assert fingerprint["compile"]["fields"]["torch CUDA"] == "12.8"


def test_a_second_process_hits_the_warmed_cache(tiny):
    warm = json.loads(tiny.only(f"results/compile-cache/{FIRST_BUILD}-*/cpu/*/warm.json").read_text())
    (device,) = warm["devices"]
    assert device["cold"]
    assert device["counts"]["fx_graph_misses"] > 0
    assert warm["proof"]["counts"]["fx_graph_misses"] == 0
    assert warm["proof"]["counts"]["fx_graph_hits"] == device["counts"]["fx_graph_misses"]


def test_nothing_is_left_to_do_and_it_takes_seconds(tiny):
    seconds, starts = [], []
    for _ in range(3):
        start = time.perf_counter()
        tiny.run("--version")
        starts.append(time.perf_counter() - start)
        result = tiny.run("train", *TINY)
        seconds.append(time.perf_counter() - start - starts[-1])
        assert result.jobs == {}
    # Snakemake alone takes one to five seconds to start, as fast as the machine is at the moment
    assert min(seconds) < max(5, 3 * min(starts))


def test_another_torch_build_rebuilds_what_depends_on_it_and_no_dataset(tiny):
    result = tiny.run("train", *TINY, *NEWER)
    # its environment is there already: it wrote the responses
    assert set(result.jobs) == PER_BUILD - {"fingerprint"}
    assert json.loads(tiny.only(f"results/runs/tiny/{SECOND_BUILD}-*/checks.json").read_text())["passed"]


THREE = ["--config", "run=three", "torch={version: 2.11.0}", "training={devices: 'cpu:3', rows_per_step: 6}"]


def cache_of(warm_record):
    return (warm_record.parent / json.loads(warm_record.read_text())["folder"]).resolve()


def test_three_drafters_started_together_after_a_swap_find_everything_compiled(tiny):
    """What this project began with: another torch, an empty cache, three drafters at once."""
    shutil.rmtree(tiny.only(f"results/compile-cache/{SECOND_BUILD}-*"))
    result = tiny.run("train_drafter", *TINY, *THREE)
    assert set(result.jobs) == {"warm_cache", "train_drafter"}
    warm = json.loads(tiny.only(f"results/compile-cache/{SECOND_BUILD}-*/cpu/*/warm.json").read_text())
    assert warm["devices"][0]["cold"]
    train = json.loads(tiny.only(f"results/runs/three/{SECOND_BUILD}-*/train.json").read_text())
    assert [guard["fx_graph_hits"] for guard in train["guard"]] == [3, 3, 3]
    assert [guard["fx_graph_misses"] + guard["compiles_after_warmup"] for guard in train["guard"]] == [0, 0, 0]


def test_the_same_with_the_warm_up_skipped_is_refused_with_the_command_to_run(tiny):
    record = tiny.only(f"results/compile-cache/{SECOND_BUILD}-*/cpu/*/warm.json")
    shutil.rmtree(cache_of(record))
    result = tiny.snakemake("--forcerun", "train_drafter", "--until", "train_drafter", *TINY, *THREE)
    assert result.code != 0
    assert set(result.jobs) == {"train_drafter"}
    (line,) = result.errors
    assert "The warmed compile cache" in line
    assert "is gone. Run `snakemake --forcerun warm_cache`." in line


def test_the_former_build_is_there_at_once(tiny):
    assert tiny.run("train", *TINY).jobs == {}


def test_forcing_the_warm_up_compiles_again_and_trains_again(tiny):
    jobs = tiny.run("--dry-run", "--forcerun", "warm_cache", *TINY).jobs
    assert set(jobs) == PER_BUILD - {"fingerprint"}


def test_an_edit_of_one_setting_reruns_its_rule_and_what_follows(tiny):
    table = {
        "checks={max_new_tokens: 17}": {"check_generation", "collect_checks", "plot_run", "require_checks", "train"},
        "checks={compile: warn}": PER_BUILD - {"fingerprint", "warm_cache"},
        "training={learning_rate: 0.001}": PER_BUILD - {"fingerprint", "warm_cache"},
        "drafter={layers: 2}": PER_BUILD - {"fingerprint"},
        "torch={index: pypi}": set(),
    }
    for change, expected in table.items():
        assert set(tiny.run("--dry-run", *TINY, "--config", change).jobs) == expected, change


def test_a_failed_check_fails_the_run_and_keeps_its_files(tiny):
    result = tiny.snakemake("train", *TINY, "--config", "checks={acceptance_floor: 99}")
    assert result.code != 0
    assert any("acceptance" in line and "99" in line for line in result.errors), result.output[-3000:]
    run = tiny.only(f"results/runs/tiny/{FIRST_BUILD}-*")
    assert not json.loads((run / "checks.json").read_text())["passed"]
    assert (run / "drafter/model.safetensors").is_file()
    assert not (run / "checks.passed").exists()


def test_a_bundle_warms_another_cache_without_compiling(tiny):
    tiny.run("bundle_cache", *TINY)
    (bundle,) = tiny.folder.glob(f"results/compile-cache/{FIRST_BUILD}-*/cpu/*/bundle.tar.xz")
    record = tiny.only(f"results/compile-cache/{FIRST_BUILD}-*/cpu/*/warm.json")
    kept = tiny.folder / "kept.tar.xz"
    bundle.rename(kept)
    shutil.rmtree(cache_of(record))
    record.unlink()
    tiny.run("warm_cache", *TINY, "--config", f"compile_cache={{bundle: {kept}}}")
    warm = json.loads(record.read_text())
    assert warm["bundle"]["path"] == str(kept)
    assert [cache["misses"] for cache in warm["devices"][0]["caches"].values()] == [0] * 5


def test_target_and_drafter_in_processes_of_their_own_train_as_together(tiny):
    apart = ["--config", "run=apart", "training={devices: {target: cpu, drafter: 'cpu:2'}}"]
    assert set(tiny.run("train_drafter", *TINY, *apart).jobs) == {"warm_cache", "train_drafter"}
    one, other = (
        json.loads(tiny.only(f"results/runs/{run}/{FIRST_BUILD}-*/train.json").read_text()) for run in ("tiny", "apart")
    )
    assert [rank["role"] for rank in other["topology"]["ranks"]] == ["drafter", "drafter", "target"]
    assert {role: len(seconds) for role, seconds in other["waited_seconds"].items()} == {"drafter": 2, "target": 1}
    assert [guard["fx_graph_misses"] for guard in other["guard"]] == [0, 0]
    # bit for bit where each process has as many threads (tests/torch_env/test_training_stream.py)
    assert other["first_loss"] == pytest.approx(one["first_loss"], rel=1e-5)
    assert other["last_held_out_loss"] == pytest.approx(one["last_held_out_loss"], rel=0.02)


def test_one_device_and_several_are_measured_by_the_workflow_itself(tiny):
    """benchmarks/devices.py, on processes of the CPU."""
    page = tiny.folder / "devices.md"
    page.write_text("<!-- tables of benchmarks/devices.py -->\n<!-- end of the tables -->\n")
    asked = ["--shape", "tiny", "--devices", "1", "--devices", "2", "--split", "1+1", "--cpu", "--torch", "2.11.0"]
    command = [sys.executable, ROOT / "benchmarks/devices.py", *asked, "--steps", "30", "--output", tiny.folder]
    done = subprocess.run([*command, "--write", page], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    parts = json.loads((tiny.folder / "devices.json").read_text())["shapes"]["tiny"]
    found = {name: list(done.values()) for name, done in parts.items()}

    one, two, apart = found["training"]
    assert [len(run["devices"]) for run in (one, two, apart)] == [1, 2, 2]
    assert [(device["cold"], device["misses"] > 0) for device in one["warm_up"]] == [(True, True)]
    # two processes of the CPU are one device of one kind
    assert [(device["hits"] > 0, device["misses"]) for device in two["warm_up"]] == [(True, 0)]
    assert [run["misses"] for run in (one, two, apart)] == [0, 0, 0]
    assert min(run["step_ms"] for run in (one, two, apart)) > 0
    assert two["parts_ms"]["all_reduce"] > 0
    assert {role: len(seconds) for role, seconds in apart["waited_seconds"].items()} == {"drafter": 1, "target": 1}
    (sums,) = found["sums"]
    assert (sums["ranks"], sums["device"]) == (2, "cpu")
    assert min(sums[way] for way in ("each_ms", "pieces_ms", "together_ms")) > 0
    (equal,) = found["equal"]
    assert equal["distance"] < 1e-4
    assert equal["loss"] < 1e-4
    (killed,) = found["killed"]
    assert (killed["code"], killed["left"]) == (1, 0)
    assert "killed by signal 9" in killed["said"][0]
    assert f"resuming from step {killed['checkpoint']}" in killed["resumed"]
    assert killed["next_checkpoint"] > killed["checkpoint"]

    table = page.read_text()
    assert "| tiny | 1 + 1 | 1 |" in table
    assert "### A killed process" in table
    # what is there is not done again
    began = time.monotonic()
    again = subprocess.run([*command, "--write", page], capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert time.monotonic() - began < 30
    assert page.read_text() == table
