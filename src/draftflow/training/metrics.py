"""What a run says about itself while it trains: metrics.jsonl, TensorBoard files, lines of progress, times of parts."""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch

from draftflow.stage import say

PROGRESS_SECONDS = 10


class Clock:
    """Times of the parts of steps. On a GPU parts are timed there, by events, and nothing waits before `read`.

    Args:
        device: the device whose time counts.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._marks: list[tuple[str, Any]] = []
        self.mark("start")

    def mark(self, part: str) -> None:
        """The time since the mark before belongs to `part`."""
        stamp: Any = time.perf_counter()
        if self.device.type == "cuda":
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        self._marks.append((part, stamp))

    def read(self) -> list[tuple[str, float]]:
        """Parts with their milliseconds, in order, since the last read; waits for the device."""
        marks, self._marks = self._marks, self._marks[-1:]
        if self.device.type == "cuda":
            marks[-1][1].synchronize()
            return [(part, before.elapsed_time(stamp)) for (_, before), (part, stamp) in pairwise(marks)]
        return [(part, 1e3 * (stamp - before)) for (_, before), (part, stamp) in pairwise(marks)]


def split_steps(parts: Sequence[tuple[str, float]], last: str = "optimizer") -> tuple[dict[str, float], list[float]]:
    """Mean milliseconds of each part per step, and the milliseconds of each step; a step ends with the part `last`.

    What lies between steps (evaluation, checkpoints) counts as no step's.
    """
    totals: dict[str, float] = defaultdict(float)
    steps, current = [], 0.0
    for part, milliseconds in parts:
        if part in BETWEEN_STEPS:
            continue
        totals[part] += milliseconds
        current += milliseconds
        if part == last:
            steps.append(current)
            current = 0.0
    return {part: round(total / max(len(steps), 1), 2) for part, total in totals.items()}, steps


BETWEEN_STEPS = {"start", "evaluation", "checkpoint", "report"}


def expected_acceptance_length(accuracy: Sequence[float]) -> float:
    """1 + sum over k of the product of accuracies at positions up to k: tokens per target forward, if hits at
    different positions were independent and the target's own continuation were the row's."""
    length, product = 1.0, 1.0
    for hit in accuracy:
        product *= hit
        length += product
    return length


class Metrics:
    """Writer of metrics.jsonl, TensorBoard files and progress lines; only rank 0 has one.

    Args:
        path: metrics.jsonl; one JSON object a line. It starts with `before`, what an earlier process wrote up to the
            step that training resumes from.
        tensorboard: folder of event files.
        first, steps: the first step of this process (from 0) and the number of steps of the run.
    """

    def __init__(self, path: Path, tensorboard: Path, before: str, first: int, steps: int):
        from torch.utils.tensorboard import SummaryWriter

        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w+", encoding="utf-8")
        self._file.write(before)
        self._file.flush()
        self._board = SummaryWriter(str(tensorboard), purge_step=first + 1)
        self._steps, self._said = steps, time.monotonic()
        self.step_ms: list[float] = []

    def training(self, step: int, facts: dict[str, Any], step_ms: list[float]) -> None:
        """Write the facts of the steps up to `step` (counted from 1): loss, accuracy, times."""
        self.step_ms += step_ms
        self._write({"step": step, **facts})
        for name in ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "step_ms"):
            self._board.add_scalar(f"train/{name}", facts[name], step)
        self._board.add_scalar("train/accuracy_1", facts["accuracy"][0], step)
        now = time.monotonic()
        if now - self._said >= PROGRESS_SECONDS or step == self._steps:
            self._said = now
            left = facts["step_ms"] * (self._steps - step) / 1e3
            say(
                f"step {step}/{self._steps}: loss {facts['loss']:.3f}, proposal 1 {facts['accuracy'][0]:.1%} right, "
                f"{facts['step_ms']:.0f} ms a step, {_duration(left)} left"
            )

    def evaluation(self, step: int, loss: float, accuracy: list[float]) -> None:
        """Write the figures on held-out rows after `step` steps."""
        length = expected_acceptance_length(accuracy)
        self._write(
            {
                "step": step,
                "held_out_loss": loss,
                "held_out_accuracy": accuracy,
                "expected_acceptance_length": length,
            }
        )
        self._board.add_scalar("held_out/loss", loss, step)
        self._board.add_scalar("held_out/expected_acceptance_length", length, step)
        for k, hit in enumerate(accuracy, start=1):
            self._board.add_scalar(f"held_out/accuracy_{k}", hit, step)
        say(f"step {step}/{self._steps}: held-out loss {loss:.3f}, expected acceptance length {length:.3f}")

    def text(self) -> str:
        """Everything written so far, for the checkpoint; whoever ends the job may have removed the file by now."""
        self._file.seek(0)
        return self._file.read()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._board.close()

    def median_step_ms(self) -> float | None:
        """Median milliseconds of the steps of this process; the first ones, which load compiled code, count little."""
        return round(statistics.median(self.step_ms), 2) if self.step_ms else None

    def _write(self, facts: dict[str, Any]) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"
