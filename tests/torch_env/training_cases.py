"""A prepared tiny target, packed rows and settings, for the tests of training and of the compile cache."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny import make_target

from draftflow.environment.fingerprint import take
from draftflow.stage import Record, write_json
from draftflow.target.prepare import prepare
from draftflow.training.devices import Devices

ROW = 64
# Of a target's config: heads that fit the GPU's attention
FOR_GPU = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
CPU = Devices("cpu", (0,), "cpu")


def make_rows(path: Path, train: int = 10, held_out: int = 3, seed: int = 0, length: int = ROW) -> None:
    """Rows of two or three documents each, with padding; the second half of each document is supervised. Token t + 1
    follows from token t, so that there is something to learn."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for split, count in (("train", train), ("held_out", held_out)):
        ids, documents = np.zeros((count, length), np.int32), np.full((count, length), -1, np.int32)
        positions, mask = np.zeros((count, length), np.int32), np.zeros((count, length), np.uint8)
        for row in range(count):
            start, number = 0, 0
            while start < length - 20:
                tokens = min(int(generator.integers(16, 34)), length - start)
                part = slice(start, start + tokens)
                ids[row, part] = 3 + (int(generator.integers(0, 40)) + 7 * np.arange(tokens)) % 40
                documents[row, part], positions[row, part] = number, np.arange(tokens)
                mask[row, start + tokens // 2 : start + tokens] = 1
                start, number = start + tokens, number + 1
        for name, values in (
            ("input_ids", ids),
            ("document_ids", documents),
            ("position_ids", positions),
            ("loss_mask", mask),
        ):
            tensors[f"{split}.{name}"] = values
    save_file(tensors, path)


def make_case(folder: Path, rows: Mapping[str, int] | None = None, **config: Any) -> dict[str, Path]:
    """Everything that the stages are given by path: `target`, `rows`, `fingerprint`.

    Args:
        rows: as of `make_rows`.
        config: what is other than usual of the target's.
    """
    source = make_target(folder / "model", **config)
    prepare({"source": str(source)}, None, folder / "target", Record("prepare_target"))
    make_rows(folder / "rows.safetensors", **(rows or {}))
    write_json(folder / "install.json", {"packages": {}})
    write_json(folder / "fingerprint.json", take({"packages": {}}))
    return {
        "target": folder / "target",
        "rows": folder / "rows.safetensors",
        "fingerprint": folder / "fingerprint.json",
    }


def make_settings(devices: Devices = CPU, **training: Any) -> dict[str, Any]:
    """Settings of the training stage; those of warm-up are among them."""
    shared = {"rows_per_step": 4, "anchors_per_row": 8, "precision": "auto", "loss": "decay", "optimizer": "adamw"}
    shared |= {name: value for name, value in training.items() if name in shared}
    return {
        "drafter": {"layers": 2, "block_size": 4, "taps": 3, "target_layers": None, "mask_token": "auto"},
        "row_length": ROW,
        **shared,
        "devices": json.loads(json.dumps(asdict(devices))),
        "training": {
            "steps": 12,
            **shared,
            "learning_rate": 3e-3,
            "warmup": 0.1,
            "min_learning_rate": 0.1,
            "weight_decay": 0.01,
            "betas": [0.9, 0.95],
            "clip_norm": 1.0,
            "dpace_alpha": 0.5,
            "anchors_per_document": 512,
            "loss_decay": "auto",
            "evaluate_every": 6,
            "checkpoint_every": 5,
            "feature_cache_gb": 0.5,
            "stream_depth": 2,
            "seed": 0,
            **training,
        },
        "checks": {"compile": "error"},
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the times, which differ between runs."""
    times = ("ms", "step_ms", "tokens_per_second")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


def make_loop(
    case: dict[str, Path],
    folder: Path,
    compiled: bool = False,
    rank: int = 0,
    world_size: int = 1,
    source: Any = None,
    stop: Any = None,
    **training: Any,
):
    """The training loop of one process as the worker makes it; eager, unless asked otherwise."""
    from draftflow.compile_cache.guard import Guard
    from draftflow.drafter.model import EAGER
    from draftflow.training.checkpoint import latest
    from draftflow.training.data import read_rows
    from draftflow.training.loop import Loop, Stop
    from draftflow.training.metrics import Metrics
    from draftflow.training.plan import plan_of_run
    from draftflow.training.process import make_process
    from draftflow.training.worker import hyperparameters

    settings = make_settings(**training)
    shape, plan = plan_of_run(settings, case["target"], "cpu", world_size)
    hyper = hyperparameters(settings)
    rows, cache_gb = read_rows(case["rows"], plan.row_length), settings["training"]["feature_cache_gb"]
    process = make_process(shape, plan, hyper, rows, case["target"], cache_gb, rank, world_size, source)
    stop = stop or Stop()
    process.step.group = stop.group
    if not compiled:
        process.step.drafter._run = EAGER
    found = latest(folder / "checkpoints")
    metrics = None
    if rank == 0:
        before, first = ("", 0) if found is None else (found.metrics(), found.step)
        metrics = Metrics(folder / "metrics.jsonl", folder / "tensorboard", before, first, hyper.steps)
    loop = Loop(
        process,
        hyper,
        Guard("error"),
        stop,
        evaluate_every=settings["training"]["evaluate_every"],
        checkpoint_every=settings["training"]["checkpoint_every"],
        checkpoints=folder / "checkpoints",
        facts={"resumed_from": None if found is None else found.step},
        metrics=metrics,
    )
    if found is not None:
        loop.resume(found)
    return loop


def train_as_rank(rank: int, world_size: int, case: dict[str, Path], folder: Path, training: dict[str, Any]) -> None:
    """Train in one of several processes that find one another through a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    assert make_loop(case, folder, rank=rank, world_size=world_size, **training).run()
    dist.destroy_process_group()


def as_started() -> dict[str, str]:
    """This process's variables without those that torch sets once it has been imported."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR_", "TRITON_"))}


class Stage:
    """The stages of warm-up and training as the workflow calls them.

    Args:
        folder: for what warm-up makes; it is done at once.
        paths: of `make_case`.
        settings: of warm-up.
    """

    def __init__(self, folder: Path, paths: dict[str, Path], settings: dict[str, Any]):
        self.folder, self.paths, self.settings = folder, paths, settings
        self.warm = folder / "step/warm.json"
        done = self.warm_up()
        assert done.returncode == 0, done.stderr

    def warming(self, **paths: Path) -> list[str]:
        """The command that warms, into other `paths` than the stage's own where they are given."""
        given = {name: self.paths[name] for name in ("target", "fingerprint")}
        outputs = {"cache": self.folder / "cache", "record": self.warm}
        return self._command("compile_cache.warm", self.settings, **{**given, **outputs, **paths})

    def warm_up(self, **paths: Path) -> "subprocess.CompletedProcess[str]":
        """Run it."""
        return subprocess.run(self.warming(**paths), capture_output=True, text=True, env=as_started())

    @property
    def cache(self) -> Path:
        """The folder of the one cache key."""
        (manifest,) = self.folder.glob("cache/*/manifest.json")
        return manifest.parent

    def train(
        self, settings: dict[str, Any], run: Path, variables: dict[str, str] | None = None, **paths: Path
    ) -> "subprocess.CompletedProcess[str]":
        """Train into the folder `run`."""
        command = self._training(settings, run, **paths)
        return subprocess.run(command, capture_output=True, text=True, env={**as_started(), **(variables or {})})

    def training(self, settings: dict[str, Any], run: Path, **paths: Path) -> "subprocess.Popen[str]":
        """Start training into the folder `run`, which has the temporary files as well."""
        command, variables = self._training(settings, run, **paths), {**as_started(), "TMPDIR": str(run)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)

    def _training(self, settings: dict[str, Any], run: Path, **paths: Path) -> list[str]:
        run.mkdir(exist_ok=True)
        outputs = {name: run / name for name in ("checkpoints", "tensorboard")}
        outputs |= {"metrics": run / "metrics.jsonl", "record": run / "train.json"}
        return self._command("training.train", settings, **{**self.paths, "warm": self.warm, **outputs, **paths})

    def _command(self, module: str, settings: dict[str, Any], **paths: Path) -> list[str]:
        command = [sys.executable, "-m", f"draftflow.{module}", "--settings", json.dumps(settings)]
        return command + [word for name, path in paths.items() for word in (f"--{name}", str(path))]
