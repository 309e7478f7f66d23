"""The stages as the workflow calls them: warm-up, then training in worker processes, with compiled layers."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from training_cases import Stage, as_started, make_case, make_settings, read_metrics

from draftflow.compile_cache import bundle, manifest

pytestmark = pytest.mark.slow

SETTINGS = make_settings(steps=500, evaluate_every=100, checkpoint_every=100)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    return Stage(folder, make_case(folder), SETTINGS)


def test_warm_up_compiles_once_and_a_fresh_process_hits(stage):
    record = json.loads(stage.warm.read_text())
    (device,), proof = record["devices"], record["proof"]
    assert device["device"] == "cpu"
    assert device["cold"]
    assert device["counts"]["fx_graph_hits"] == 0
    assert device["counts"]["fx_graph_misses"] == proof["counts"]["fx_graph_hits"] == 3  # forward twice, backward
    assert proof["counts"]["fx_graph_misses"] == proof["counts"]["autograd_misses"] == 0
    assert device["counts"]["compiles_after_warmup"] == proof["counts"]["compiles_after_warmup"] == 0
    assert record["warm_seconds"] < record["cold_seconds"] / 2
    libraries = device["caches"]["cpp"]["misses"]
    assert libraries > 0
    assert proof["caches"] == {
        "fx_graph": {"hits": 3, "misses": 0},
        "aot_autograd": {"hits": 2, "misses": 0},
        "triton": {"hits": 0, "misses": 0},
        "cpp": {"hits": libraries, "misses": 0},
        "autotune": {"hits": 0, "misses": 0},
    }
    assert device["graphs"] == proof["graphs"] == 3
    assert device["phases"]["build"] > proof["phases"]["build"]
    assert device["phases"]["lower"] > 0 == proof["phases"]["lower"]
    assert sum(proof["phases"].values()) == pytest.approx(proof["first_pass_seconds"], abs=0.1)
    assert record["artefacts"]["bytes"] > 10_000
    assert record["artefacts"]["files"] > libraries
    assert record["found"] == {"state": "empty"}
    assert record["holds"]["settings"]["TORCHINDUCTOR_FX_GRAPH_CACHE"] == "1"
    assert record["holds"]["fingerprint"]["fields"]["torch git"]
    assert (stage.warm.parent / record["folder"] / "inductor").is_dir()


def test_a_signal_stops_with_a_checkpoint_and_the_same_command_finishes(stage, tmp_path):
    run, metrics = tmp_path / "run", tmp_path / "run/metrics.jsonl"
    with stage.training(SETTINGS, run) as process:
        deadline = time.monotonic() + 600
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 4):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert "resume by running the same command" in output
    assert "Traceback" not in output
    assert not (run / "train.json").exists()
    metrics.unlink()  # as Snakemake removes the outputs of a job that failed

    done = stage.train(SETTINGS, run)
    assert done.returncode == 0, done.stderr
    record = json.loads((run / "train.json").read_text())
    assert record["resumed_from"] >= 10
    assert f"resuming from step {record['resumed_from']}" in done.stdout
    steps = [line["step"] for line in read_metrics(metrics) if "loss" in line]
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    assert steps[-1] == record["steps"] == 500
    assert record["last_loss"] < record["first_loss"] - 2
    assert record["last_held_out_loss"] < record["first_held_out_loss"]
    assert len(record["guard"]) == 2  # before and after the stop
    for guard in record["guard"]:
        assert guard["fx_graph_misses"] == guard["compiles_after_warmup"] == guard["kernels_built"] == 0
        assert guard["reasons"] == []
        assert guard["fx_graph_hits"] == 3
    assert record["cache"]["files"] > 10
    assert record["cache"]["damaged"] == {}
    assert record["feature_cache"]["hits"] > 0
    assert record["seconds_to_first_step"] > 0
    assert list((run / "tensorboard").glob("events*"))

    lines = metrics.read_text()
    metrics.unlink(), (run / "train.json").unlink()
    done = stage.train(SETTINGS, run)
    assert "training is finished" in done.stdout
    assert "training on" not in done.stdout  # as is said before workers start
    assert metrics.read_text() == lines
    again = json.loads((run / "train.json").read_text())
    assert {**again, "seconds": None} == {**{k: v for k, v in record.items() if k in again}, "seconds": None}


def test_a_worker_s_refusal_is_one_line(stage, tmp_path):
    description = json.loads((stage.paths["target"] / "target.json").read_text())
    description["weights"]["path"] = str(tmp_path / "gone")
    (tmp_path / "target.json").write_text(json.dumps(description))
    done = stage.train(SETTINGS, tmp_path / "run", target=tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith("draftflow: error: ")
    assert "The weights of the target are gone." in line


def test_a_worker_s_crash_shows_its_traceback_once(stage, tmp_path):
    (tmp_path / "rows.safetensors").write_bytes(b"not a safetensors file")
    done = stage.train(SETTINGS, tmp_path / "run", rows=tmp_path / "rows.safetensors")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "torch/distributed" not in done.stderr
    assert "A training process failed: " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"row_length": 32}, "row_length 64 -> 32"),
        ({"anchors_per_row": 16}, "anchors 8 -> 16"),
    ],
)
def test_another_plan_than_was_warmed_is_refused(stage, tmp_path, change, words):
    done = stage.train({**SETTINGS, **change}, tmp_path)
    assert done.returncode == 1
    assert words in done.stderr
    assert "snakemake --forcerun warm_cache" in done.stderr


def test_a_warm_cache_from_a_bundle_compiles_nothing(stage, tmp_path):
    packed = [sys.executable, "-m", "draftflow.compile_cache.bundle", "pack", "--record", str(stage.warm)]
    subprocess.run([*packed, "--output", str(tmp_path / "bundle.tar.xz")], check=True, env=as_started())
    outputs = {"cache": tmp_path / "cache", "record": tmp_path / "step/warm.json", "bundle": tmp_path / "bundle.tar.xz"}
    done = stage.warm_up(**outputs)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "step/warm.json").read_text())
    assert not record["devices"][0]["cold"]
    assert record["devices"][0]["caches"]["cpp"]["misses"] == 0
    assert record["bundle"]["path"] == str(tmp_path / "bundle.tar.xz")
    assert "from the bundle" in done.stdout


def test_a_missing_warm_up_is_refused(stage, tmp_path):
    done = stage.train(SETTINGS, tmp_path, warm=tmp_path / "warm.json")
    assert "The compile cache was not warmed. Run `snakemake --forcerun warm_cache`." in done.stderr


def test_a_switched_off_compiler_is_refused(stage, tmp_path):
    done = stage.train(SETTINGS, tmp_path, {"TORCH_COMPILE_DISABLE": "1"})
    assert "TORCH_COMPILE_DISABLE=1 switches compilation off" in done.stderr


def test_a_node_trains_from_its_own_copy_of_the_cache_and_leaves_the_shared_one_alone(stage, tmp_path):
    bundle.pack(stage.warm, tmp_path / "bundle.tar.xz")
    before = {path: path.stat().st_mtime_ns for path in stage.cache.rglob("*")}
    local = {"bundle": tmp_path / "bundle.tar.xz", "node-local": Path("$NODE_DISK/it")}
    done = stage.train(make_settings(steps=4), tmp_path / "run", {"NODE_DISK": str(tmp_path)}, **local)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run/train.json").read_text())
    folder = Path(record["cache"]["folder"])
    assert folder.parent == tmp_path / "it/compile-cache"
    assert record["cache"]["files"] == len(manifest.read(stage.cache))
    (guard,) = record["guard"]
    assert (guard["fx_graph_hits"], guard["fx_graph_misses"], guard["kernels_built"]) == (3, 0, 0)
    assert manifest.examine(folder).sound
    assert {path: path.stat().st_mtime_ns for path in stage.cache.rglob("*")} == before
