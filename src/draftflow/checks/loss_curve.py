"""Does the loss curve of a run look like learning? From metrics.jsonl alone; standard library only."""

import json
import math
from pathlib import Path
from typing import Any

from draftflow.checks.result import Check
from draftflow.errors import DraftflowError

FALL = 0.02  # least fall of the training loss, as a share of its start


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl.

    Raises:
        DraftflowError: the file is missing, or a line is no JSON; names the line.
    """
    if not path.exists():
        raise DraftflowError("There is no metrics file.", "Run training again.", str(path))
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except ValueError:
            raise DraftflowError(
                "A line of the metrics cannot be read.", "Run training again.", f"{path}:{number}"
            ) from None
    return lines


def series(metrics: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of `key`, in order of steps; lines without it are passed over."""
    points = sorted((entry["step"], float(entry[key])) for entry in metrics if entry.get(key) is not None)
    return [step for step, _ in points], [value for _, value in points]


def loss_checks(metrics: list[dict[str, Any]], vocab_size: int) -> list[Check]:
    """Three findings: losses are finite, the training loss falls, and it does not start too low.

    Args:
        metrics: lines of metrics.jsonl: `step` and either `loss` (weighted mean in nats of the steps since the line
            before) or `held_out_loss`, the first of them before any step.
        vocab_size: rows of the target's head.

    Raises:
        DraftflowError: there are no losses of one of the two kinds.
    """
    _, losses = series(metrics, "loss")
    held_out_steps, held_out = series(metrics, "held_out_loss")
    if not losses or not held_out:
        raise DraftflowError("The metrics lack training or held-out losses.", "Run training again.", "metrics.jsonl")
    everything = [*losses, *held_out]
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
            held_out_steps[0] == 0 and held_out[0] >= floor,
            held_out[0],
            f">= {floor:.2f} nats at step 0",
            f"Held-out loss at step {held_out_steps[0]}, against half of ln(vocabulary size): an untrained drafter is "
            "near the whole of it or above, so a lower one means that it is shown the tokens that it has to predict.",
            "the check mask_leak, and labels and block embeddings of the training step",
        ),
    ]
