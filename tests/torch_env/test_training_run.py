"""The stages as the workflow calls them: warm-up, then training in worker processes, with compiled layers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from training_cases import make_case, make_settings, read_metrics

pytestmark = pytest.mark.slow

SETTINGS = make_settings(steps=500, evaluate_every=100, checkpoint_every=100)


def environment() -> dict[str, str]:
    """This process's variables without those that torch sets once it has been imported."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR_", "TRITON_"))}


class Case:
    """A folder with a prepared target and rows, and the stages run on it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.paths = make_case(folder)
        self.warm_record, self.run = folder / "step/warm.json", folder / "run"

    def command(self, module: str, settings: dict, inputs: tuple[str, ...], **paths: Path) -> list[str]:
        command = [sys.executable, "-m", f"draftflow.{module}", "--settings", json.dumps(settings)]
        for name, path in {**{name: self.paths[name] for name in inputs}, **paths}.items():
            command += [f"--{name}", str(path)]
        return command

    def warming(self, **paths: Path) -> list[str]:
        outputs = {"cache": self.folder / "cache", "record": self.warm_record}
        return self.command("compile_cache.warm", SETTINGS, ("target", "fingerprint"), **{**outputs, **paths})

    def warm(self, **paths: Path) -> subprocess.CompletedProcess:
        return subprocess.run(self.warming(**paths), capture_output=True, text=True, env=environment())

    @property
    def cache(self) -> Path:
        """The folder of the one cache key."""
        (manifest,) = self.folder.glob("cache/*/manifest.json")
        return manifest.parent

    def training(self, settings: dict = SETTINGS, **paths: Path) -> list[str]:
        outputs = {
            "warm": self.warm_record,
            "checkpoints": self.run / "checkpoints",
            "metrics": self.run / "metrics.jsonl",
            "tensorboard": self.run / "tensorboard",
            "record": self.run / "train.json",
        }
        return self.command("training.train", settings, ("target", "fingerprint", "rows"), **{**outputs, **paths})

    def train(self, settings: dict = SETTINGS, variables: dict | None = None, **paths: Path):
        command = self.training(settings, **paths)
        return subprocess.run(command, capture_output=True, text=True, env={**environment(), **(variables or {})})


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    case = Case(tmp_path_factory.mktemp("case"))
    done = case.warm()
    assert done.returncode == 0, done.stderr
    return case


def test_warm_up_compiles_once_and_a_fresh_process_hits(case):
    record = json.loads(case.warm_record.read_text())
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
    assert (case.warm_record.parent / record["folder"] / "inductor").is_dir()


def test_a_signal_stops_with_a_checkpoint_and_the_same_command_finishes(case):
    metrics = case.run / "metrics.jsonl"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(case.training(), **pipes, text=True, env=environment()) as process:
        deadline = time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 4):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert "resume by running the same command" in output
    assert "Traceback" not in output
    assert not (case.run / "train.json").exists()
    metrics.unlink()  # as Snakemake removes the outputs of a job that failed

    done = case.train()
    assert done.returncode == 0, done.stderr
    record = json.loads((case.run / "train.json").read_text())
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
    assert list((case.run / "tensorboard").glob("events*"))

    lines = metrics.read_text()
    metrics.unlink(), (case.run / "train.json").unlink()
    start = time.monotonic()
    done = case.train()
    assert "training is finished" in done.stdout
    assert time.monotonic() - start < 5  # no torch was started
    assert metrics.read_text() == lines
    again = json.loads((case.run / "train.json").read_text())
    assert {**again, "seconds": None} == {**{k: v for k, v in record.items() if k in again}, "seconds": None}


def test_a_worker_s_refusal_is_one_line(case, tmp_path):
    description = json.loads((case.paths["target"] / "target.json").read_text())
    description["weights"]["path"] = str(tmp_path / "gone")
    (tmp_path / "target.json").write_text(json.dumps(description))
    done = case.train(target=tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith("draftflow: error: ")
    assert "The weights of the target are gone." in line


def test_a_worker_s_crash_shows_its_traceback_once(case, tmp_path):
    (tmp_path / "rows.safetensors").write_bytes(b"not a safetensors file")
    done = case.train(rows=tmp_path / "rows.safetensors")
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
def test_another_plan_than_was_warmed_is_refused(case, change, words):
    done = case.train({**SETTINGS, **change})
    assert done.returncode == 1
    assert words in done.stderr
    assert "snakemake --forcerun warm_cache" in done.stderr


def damage_nothing(cache):
    return {}


def truncate_a_library(cache):
    path = next(cache.rglob("*.so"))
    path.write_bytes(path.read_bytes()[:100])
    return {str(path.relative_to(cache)): "truncated, 100 of"}


def exchange_a_graph(cache):
    path = next(path for path in (cache / "inductor/fxgraph").rglob("*") if path.is_file())
    path.write_bytes(path.read_bytes()[::-1])
    return {str(path.relative_to(cache)): "changed"}


def lose_the_manifest(cache):
    (cache / "manifest.json").unlink()
    return {"manifest.json": "missing"}


@pytest.mark.parametrize("damage", [damage_nothing, truncate_a_library, exchange_a_graph, lose_the_manifest])
def test_what_is_damaged_in_the_cache_is_compiled_anew_before_training_and_recorded(case, damage, tmp_path):
    words = damage(case.cache)
    outputs = {name: tmp_path / name for name in ("checkpoints", "metrics", "tensorboard", "record")}
    done = case.train(make_settings(steps=4), **outputs)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record").read_text())
    assert {path: found.startswith(words[path]) for path, found in record["cache"]["damaged"].items()} == dict.fromkeys(
        words, True
    )
    assert ("recompiled_seconds" in record["cache"]) == bool(words)
    assert ("warning: the compile cache is damaged" in done.stdout) == bool(words)
    (guard,) = record["guard"]
    assert (guard["fx_graph_hits"], guard["fx_graph_misses"]) == (3, 0)


def test_a_foreign_file_in_the_cache_is_removed_and_recorded(case, tmp_path):
    foreign = next((case.cache / "inductor/fxgraph").glob("*/*")) / "foreign"
    foreign.write_bytes(b"not ours")
    outputs = {name: tmp_path / name for name in ("checkpoints", "metrics", "tensorboard", "record")}
    done = case.train(make_settings(steps=4), **outputs)
    assert done.returncode == 0, done.stderr
    assert f"removed {foreign.relative_to(case.cache)}" in done.stdout
    assert not foreign.exists()
    assert json.loads((tmp_path / "record").read_text())["cache"]["foreign"] == [str(foreign.relative_to(case.cache))]


def test_warming_again_finds_everything_and_a_damaged_cache_is_begun_anew(case, tmp_path):
    assert case.warm(record=tmp_path / "warm.json").returncode == 0
    again = json.loads((tmp_path / "warm.json").read_text())
    assert again["found"]["state"] == "whole"
    assert not again["devices"][0]["cold"]
    assert again["devices"][0]["caches"]["cpp"]["misses"] == 0

    truncate_a_library(case.cache)
    done = case.warm(record=tmp_path / "warm.json")
    anew = json.loads((tmp_path / "warm.json").read_text())
    assert "is not whole" in done.stdout
    assert anew["found"]["state"] == "damaged"
    assert anew["devices"][0]["cold"]


def test_a_warm_cache_from_a_bundle_compiles_nothing(case, tmp_path):
    packed = [sys.executable, "-m", "draftflow.compile_cache.bundle", "pack", "--record", str(case.warm_record)]
    subprocess.run([*packed, "--output", str(tmp_path / "bundle.tar.xz")], check=True, env=environment())
    outputs = {"cache": tmp_path / "cache", "record": tmp_path / "step/warm.json", "bundle": tmp_path / "bundle.tar.xz"}
    done = case.warm(**outputs)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "step/warm.json").read_text())
    assert not record["devices"][0]["cold"]
    assert record["devices"][0]["caches"]["cpp"]["misses"] == 0
    assert record["bundle"]["path"] == str(tmp_path / "bundle.tar.xz")
    assert "from the bundle" in done.stdout


def test_a_warm_up_that_is_killed_takes_its_compiler_along_and_the_next_begins_anew(case, tmp_path):
    paths = {"cache": tmp_path / "cache", "record": tmp_path / "warm.json"}
    with subprocess.Popen(case.warming(**paths), stdout=subprocess.DEVNULL, env=environment()) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("cache/*/inductor/**/*.so")):  # in the middle of compiling
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
    done = case.warm(**paths)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "warm.json").read_text())
    assert "an earlier warm-up was not finished" in done.stdout
    assert record["devices"][0]["caches"]["fx_graph"] == {"hits": 0, "misses": 3}


def test_two_warm_ups_of_one_key_wait_for_one_another(case, tmp_path):
    outputs = [{"cache": tmp_path / "cache", "record": tmp_path / f"{number}/warm.json"} for number in (1, 2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment()}
    both = [subprocess.Popen(case.warming(**paths), **pipes) for paths in outputs]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    cold = [json.loads(paths["record"].read_text())["devices"][0]["cold"] for paths in outputs]
    assert sorted(cold) == [False, True]
    waited = said[cold.index(False)]
    assert "waiting for the compile cache" in waited
    assert f"process {both[cold.index(True)].pid} on" in waited


def test_a_missing_warm_up_is_refused(case, tmp_path):
    done = case.train(make_settings(steps=7), warm=tmp_path / "warm.json")
    assert "The compile cache was not warmed. Run `snakemake --forcerun warm_cache`." in done.stderr


def test_a_switched_off_compiler_is_refused(case):
    done = case.train(make_settings(steps=8), {"TORCH_COMPILE_DISABLE": "1"})
    assert "TORCH_COMPILE_DISABLE=1 switches compilation off" in done.stderr
