"""Does the loss curve of a run look like learning? From metrics.jsonl alone; standard library only."""

import json
import math
from pathlib import Path
from typing import Any

from draftflow.checks.result import Check
from draftflow.errors import DraftflowError

FALL = 0.02  # least fall of the training loss, as a share of its start


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a step that appears twice (written again after a resume) counts as last written.

    Raises:
        DraftflowError: the file is missing, or a line is no JSON object; names the line.
    """
    if not path.exists():
        raise DraftflowError("There is no metrics file.", "Run training again.", str(path))
    lines: dict[tuple[int, bool], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            lines[entry["step"], "held_out_loss" in entry] = entry
        except (ValueError, TypeError, KeyError):
            raise DraftflowError(
                "A line of the metrics cannot be read.", "Run training again.", f"{path}:{number}"
            ) from None
    return list(lines.values())


def series(metrics: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of `key`, in order of steps; lines without it are passed over."""
    points = sorted((entry["step"], float(entry[key])) for entry in metrics if entry.get(key) is not None)
    return [step for step, _ in points], [value for _, value in points]


def loss_checks(metrics: list[dict[str, Any]], vocab_size: int) -> list[Check]:
    """Three findings: losses are finite, the training loss falls, and it does not start too low.

    Args:
        metrics: lines of metrics.jsonl with `step` and `loss` (nats per supervised token), some with `held_out_loss`.
        vocab_size: rows of the target's head.

    Raises:
        DraftflowError: there is no training loss at all.
    """
    steps, losses = series(metrics, "loss")
    if not losses:
        raise DraftflowError("The metrics hold no training loss.", "Run training again.", "metrics.jsonl")
    everything = [*losses, *series(metrics, "held_out_loss")[1]]
    broken = sum(not math.isfinite(value) for value in everything)
    tenth = math.ceil(len(losses) / 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    floor = 0.5 * math.log(vocab_size)
    return [
        Check(
            "loss_finite",
            broken == 0,
            broken,
            "0 losses",
            f"Training and held-out losses that are infinite or not numbers, of {len(everything)}.",
            "the first such step in metrics.jsonl, its gradient norm and learning rate",
        ),
        Check(
            "loss_falls",
            (first - last) / first >= FALL,
            (first - last) / first,
            f">= {FALL} of its start",
            f"Mean training loss of the first tenth of the steps, {first:.4f}, against the last, {last:.4f}; a smaller "
            "fall is what noise between batches can do.",
            "the loss plot, training.learning_rate and training.steps",
        ),
        Check(
            "loss_start",
            losses[0] >= floor,
            losses[0],
            f">= {floor:.2f} nats",
            f"Training loss at step {steps[0]}, against half of ln(vocabulary size): an untrained drafter "
            "is near the whole of it, so a lower start means that it sees the tokens that it has to predict.",
            "the check mask_leak, and labels and block embeddings of the training step",
        ),
    ]
