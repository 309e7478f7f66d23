"""Complete checkpoints: weights, optimizer, RNG, position, metrics. Whole or not there; for any number of devices.

    checkpoints/<settings digest>/step-000120/
        drafter.safetensors    fp32 weights
        trainer.safetensors    moments of the optimizer, RNG states, statistics that no line of metrics holds yet
        metrics.jsonl          lines up to this step
        state.json             the step, what the run is, and SHA-256 of the files above; written last

The data position is the step: batches are a function of its number (data.py). Finding a checkpoint needs no torch.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftflow.stage import say, sha256

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, TRAINER, METRICS, STATE = "drafter.safetensors", "trainer.safetensors", "metrics.jsonl", "state.json"
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, verified.

    Attributes:
        folder: where it lies.
        state: `state.json`: `step` and what `write` was given as facts.
    """

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return self.state["step"]

    def weights(self) -> "dict[str, Tensor]":
        """The drafter's fp32 weights, on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.folder / WEIGHTS)

    def trainer(self) -> "dict[str, Tensor]":
        """The other tensors that `write` was given, on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.folder / TRAINER)

    def metrics(self) -> str:
        """The lines of metrics.jsonl up to this step."""
        return (self.folder / METRICS).read_text(encoding="utf-8")


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint in `folder` that is whole, or None; says which newer ones are not."""
    for path in reversed(_all(folder)):
        problem, state = _verify(path)
        if problem is None:
            return Checkpoint(path, state)
        say(f"checkpoint {path} is damaged ({problem}); looking for the one before")
    return None


def write(
    folder: Path,
    step: int,
    weights: "dict[str, Tensor]",
    trainer: "dict[str, Tensor]",
    metrics: str,
    facts: dict[str, Any],
) -> Path:
    """Write `folder/step-<step>` and remove all but the newest two checkpoints.

    Args:
        weights, trainer: tensors of the two files, on any device.
        metrics: lines of metrics.jsonl up to this step.
        facts: JSON values that go into state.json.

    Raises:
        OSError: as from the disk; nothing that looks whole is left behind then.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for remains in folder.glob(".step-*"):
        shutil.rmtree(remains)
    path, temporary = folder / f"step-{step:06d}", folder / f".step-{step:06d}"
    temporary.mkdir()
    try:
        for name, tensors in ((WEIGHTS, weights), (TRAINER, trainer)):
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary / name)
        (temporary / METRICS).write_text(metrics, encoding="utf-8")
        files = {name: sha256(temporary / name) for name in (WEIGHTS, TRAINER, METRICS)}
        (temporary / STATE).write_text(json.dumps({"step": step, **facts, "files": files}, indent=2) + "\n")
        for name in (WEIGHTS, TRAINER, METRICS, STATE):
            _sync(temporary / name)
        _sync(temporary)
        shutil.rmtree(path, ignore_errors=True)  # a damaged one of the same step
        temporary.rename(path)
        _sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in _all(folder)[:-KEPT]:
        shutil.rmtree(old)
    return path


def _all(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _verify(path: Path) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with a checkpoint (None if nothing is), and its state."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        for name, digest in state["files"].items():
            if sha256(path / name) != digest:
                return f"{name} is not what was written", {}
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}", {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{STATE} cannot be read", {}
    return None, state


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
