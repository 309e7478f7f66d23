"""Stage: the last checkpoint of a finished run as a drafter in the native format, in bf16, with where it comes from."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from draftflow import sources
from draftflow.drafter import checkpoint as native
from draftflow.drafter.model import Drafter
from draftflow.drafter.shape import DrafterShape
from draftflow.errors import DraftflowError
from draftflow.stage import Record, run_stage, say, stage_parser, write_json
from draftflow.training import checkpoint

PROVENANCE = "draftflow.json"


def final_checkpoint(checkpoints: Path, trained: dict[str, Any]) -> checkpoint.Checkpoint:
    """The checkpoint of the last step.

    Args:
        checkpoints: folder of all checkpoints.
        trained: `train.json`.

    Raises:
        DraftflowError: it is gone or damaged.
    """
    folder = (checkpoints / trained["checkpoint"]).parent
    found = checkpoint.latest(folder)
    if found is None or found.step != trained["steps"]:
        raise DraftflowError(
            "The checkpoint of the last step is gone or damaged.",
            "Run `snakemake --forcerun train_drafter`, which goes on from the newest whole checkpoint.",
            str(folder),
        )
    return found


def provenance(identities: dict[str, str], trained: dict[str, Any]) -> dict[str, Any]:
    """Where a drafter comes from: everything that decided its weights.

    Args:
        identities: `env_id`, `dataset_id` and `target_id`.
        trained: `train.json`.
    """
    return {
        **identities,
        "fingerprint": trained["environment"],
        "settings": trained["settings"],
        "run_digest": trained["run_digest"],
        "steps": trained["steps"],
        "sources": {stage: sources.digest(f"draftflow.{stage}") for stage in ("training.worker", "training.export")},
    }


def export(found: checkpoint.Checkpoint, shape: DrafterShape, facts: dict[str, Any], output: Path) -> Drafter:
    """Write the folder `output` whole or not at all: config.json, model.safetensors and draftflow.json."""
    drafter = Drafter(shape)
    drafter.load_state_dict(found.weights())
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        native.export(drafter, temporary, torch.bfloat16)
        write_json(temporary / PROVENANCE, facts)
        shutil.rmtree(output, ignore_errors=True)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return drafter


def main() -> None:
    """Export the drafter."""
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--train", type=Path, required=True, help="train.json")
    parser.add_argument("--target", type=Path, required=True, help="folder of the prepared target")
    parser.add_argument("--output", type=Path, required=True, help="folder of the drafter, to write")
    parser.add_argument("--record", type=Path, required=True, help="export.json, to write")
    arguments = parser.parse_args()
    record = Record("export")
    trained = json.loads(arguments.train.read_text(encoding="utf-8"))
    description = json.loads((arguments.target / "target.json").read_text(encoding="utf-8"))
    found = final_checkpoint(arguments.checkpoints, trained)
    shape = DrafterShape.from_target(description, trained["settings"]["drafter"])
    drafter = export(found, shape, provenance(arguments.settings, trained), arguments.output)
    record["step"] = found.step
    record["checkpoint"] = trained["checkpoint"]
    record["parameters"] = sum(parameter.numel() for parameter in drafter.parameters())
    record.write(arguments.record)
    say(f"{record['parameters']:,} parameters of step {found.step} written to {arguments.output}")


if __name__ == "__main__":
    run_stage(main)
