"""Stage: is the exported drafter whole, is it what training left, and does it see what it may see?

Four things that need torch and a loaded drafter, in one process: weights, reload, mask and taps. The mask is looked at
in the compiled code of training, in its shapes and precision, from the warm cache.
"""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from draftflow.checks.compiled import stage_check
from draftflow.checks.mask import mask_checks
from draftflow.checks.result import Check, add_checks, not_run, read_json
from draftflow.checks.taps import features_check, layers_check, tap_error
from draftflow.compile_cache.guard import Guard
from draftflow.compile_cache.inductor import prepare_inductor
from draftflow.drafter import checkpoint
from draftflow.drafter.attention import forbid_dense
from draftflow.drafter.model import Drafter
from draftflow.drafter.shape import DrafterShape
from draftflow.stage import Record, run_stage, say, stage_parser
from draftflow.target.features import FeatureExtractor
from draftflow.target.load import Target, load_target
from draftflow.training.data import read_rows
from draftflow.training.devices import from_settings
from draftflow.training.export import final_checkpoint
from draftflow.training.plan import Plan, make_plan
from draftflow.training.process import require_products

MOVED = 1e-4  # least relative movement; rounding over 1,000,000 steps of fp32 explains less


def names_check(tensors: dict[str, Tensor], shape: DrafterShape) -> Check:
    """The exported file holds exactly the tensors of the format: servers are silent about other names and gaps."""
    expected = checkpoint.expected_tensors(shape)
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    detail = f": {', '.join(wrong[:3])}" if wrong else ""
    return Check(
        "weights_names",
        not wrong,
        len(wrong),
        "0 tensors",
        f"Of {len(expected)} expected tensors and those in the file, missing, unexpected or of another shape{detail}.",
        "drafter/checkpoint.py and drafter/model.safetensors",
    )


def finite_check(tensors: dict[str, Tensor]) -> Check:
    """No weight is infinite or not a number."""
    wrong = [name for name, value in tensors.items() if not value.isfinite().all()]
    detail = f": {', '.join(wrong[:3])}" if wrong else ""
    return Check(
        "weights_finite",
        not wrong,
        len(wrong),
        "0 tensors",
        f"Exported tensors with infinite values or values that are no numbers{detail}.",
        "gradient norms in metrics.jsonl and training.learning_rate",
    )


def movement(start: Tensor, end: Tensor) -> float:
    """How far a tensor went from its start, over its length, apart from growing or shrinking as a whole.

    Weight decay shrinks a matrix that gets no gradient at all; what is left after the best multiple of the start is
    taken away is the part that only a gradient can make.
    """
    start, end = start.double().flatten(), end.double().flatten()
    rest = end - start * (start @ end) / (start @ start)
    return (rest.norm() / end.norm()).nan_to_num(nan=0.0).item()


def moved_check(start: dict[str, Tensor], end: dict[str, Tensor]) -> Check:
    """Every tensor was reached by a gradient: a parameter that is cut off from the loss stays where it began."""
    moved = {name: movement(start[name], end[name]) for name in start if name in end}
    still = sorted(name for name, value in moved.items() if value < MOVED)
    detail = f": {', '.join(still[:3])}" if still else ""
    least = min(moved, key=lambda name: moved[name])
    return Check(
        "weights_moved",
        not still,
        moved[least],
        f">= {MOVED:g} of its length",
        f"Least movement of a tensor from its start, {least}; {len(still)} of {len(moved)} did not move{detail}.",
        "the drafter's forward and the optimizer's parameters",
    )


def reload_check(exported: dict[str, Tensor], trained: dict[str, Tensor]) -> Check:
    """The exported weights are the checkpoint's, rounded to bf16, bit for bit."""
    wrong = sorted(
        name
        for name in exported.keys() | trained.keys()
        if name not in exported or name not in trained or not torch.equal(exported[name], trained[name].bfloat16())
    )
    detail = f": {', '.join(wrong[:3])}" if wrong else ""
    return Check(
        "reload_weights",
        not wrong,
        len(wrong),
        "0 tensors",
        f"Exported tensors that are not those of the last checkpoint rounded to bf16{detail}.",
        "training/export.py and the step of the checkpoint in export.json",
    )


def config_check(config: dict[str, Any], shape: DrafterShape) -> Check:
    """config.json says what the drafter was trained as."""
    expected = json.loads(json.dumps(checkpoint.native_config(shape)))
    wrong = sorted(key for key, value in expected.items() if config.get(key) != value)
    return Check(
        "reload_config",
        not wrong,
        ", ".join(wrong) or 0,
        "0 keys",
        "Keys of the exported config.json that are not what the drafter was trained as.",
        "drafter/config.json and drafter/checkpoint.py",
    )


SAME_HIDDEN = 1e-3  # relative; fp32 rounding of two orders of summation gives 1e-5
REFERENCE = (
    "reload_reference",
    f"<= {SAME_HIDDEN:g}, 0 proposals",
    "drafter/config.json, drafter/model.py and the version of dflash",
)


@torch.no_grad()
def reference_check(folder: Path, drafter: Drafter, target: Target, features: Tensor, row: dict[str, Tensor]) -> Check:
    """PyPI's `dflash`, where it is installed, reads the folder and proposes the same tokens from the same features.

    Hidden states are compared as well: a drafter that has learned little proposes much the same whatever it is given.

    Args:
        folder: the exported drafter.
        drafter: the same, loaded by us in fp32.
        features: [S, taps * H] of a held-out row.
        row: `input_ids` and `document_ids` of that row, [S] each; the first document is used.
    """
    name, limit, look_at = REFERENCE
    if importlib.util.find_spec("dflash") is None:
        return not_run(name, "PyPI's dflash is not installed in this environment.", limit, look_at)
    try:
        from dflash.model import DFlashDraftModel
    except ImportError as error:
        return not_run(name, f"PyPI's dflash cannot be imported ({error}).", limit, look_at)
    device, size = features.device, drafter.shape.block_size
    reference = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    length = int((row["document_ids"] == row["document_ids"][0]).sum())
    anchors = sorted({max(1, length * part // 8) for part in range(1, 8)})
    different, largest = 0, 0.0
    for anchor in anchors:
        block = torch.full((1, size), drafter.shape.mask_token_id, device=device)
        block[0, 0] = row["input_ids"][anchor]
        embeddings = F.embedding(block, target.embed_weight)
        context = features[None, :anchor]
        positions = torch.arange(anchor + size, device=device)[None]
        ours = drafter.draft(context, embeddings, positions, drafter.new_cache())
        theirs = reference(target_hidden=context, noise_embedding=embeddings, position_ids=positions)
        proposals = [F.linear(hidden[0, 1:], target.head_weight).argmax(dim=-1) for hidden in (ours, theirs)]
        different += int((proposals[0] != proposals[1]).sum())
        largest = max(largest, ((ours - theirs).norm() / ours.norm()).nan_to_num(nan=torch.inf).item())
    return Check(
        name,
        different == 0 and largest <= SAME_HIDDEN,
        largest,
        limit,
        f"Largest relative difference of hidden states from those of PyPI's dflash; {different} of "
        f"{len(anchors) * (size - 1)} proposals on a held-out row differ.",
        look_at,
    )


def initial_weights(shape: DrafterShape, seed: int) -> dict[str, Tensor]:
    """The weights that training of `shape` starts from with `training.seed`, as `training.step.Step` makes them."""
    return Drafter(shape, torch.Generator().manual_seed(seed)).state_dict()


def drafter_checks(folder: Path, target_folder: Path, row: dict[str, Tensor], plan: Plan) -> list[Check]:
    """Findings on the loaded drafter: reference implementation, mask, taps.

    Args:
        folder: the exported drafter.
        target_folder: the prepared target.
        row: a held-out row, `input_ids`, `document_ids`, `position_ids` and `loss_mask`, [S] each.
        plan: of the training run.

    Raises:
        DraftflowError: the run was in float8, and the device here has none.
    """
    require_products(plan)
    device = plan.device_kind
    target = load_target(target_folder, device, torch.float32)
    drafter = checkpoint.load(folder, device, torch.float32)
    taps = list(drafter.shape.target_layer_ids)
    extractor = FeatureExtractor(target, taps)
    row = {name: value.to(device) for name, value in row.items()}
    features = extractor(*(row[name][None] for name in ("input_ids", "document_ids", "position_ids")))[0]
    found = [reference_check(folder, drafter, target, features, row)]
    prepare_inductor(device)
    drafter.compile_layers()
    drafter.use_float8(plan.float8)
    precision = getattr(torch, plan.precision)
    drafter.to(precision)  # as in training, or its compiled code is not that of training
    embed_weight, batch = target.embed_weight.to(precision), (plan.rows, plan.anchors)
    found += mask_checks(drafter, embed_weight, features.to(precision), row, batch=batch)
    return [*found, features_check(tap_error(target, extractor, taps, row))]


def main() -> None:
    """Check weights, reload, mask and taps, and write the findings."""
    parser = stage_parser(__doc__ or "", settings=False)
    parser.add_argument("--drafter", type=Path, required=True, help="exported drafter")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--train", type=Path, required=True, help="train.json")
    parser.add_argument("--rows", type=Path, required=True, help="rows.safetensors")
    parser.add_argument("--target", type=Path, required=True, help="folder of the prepared target")
    parser.add_argument("--record", type=Path, required=True, help="record to write")
    arguments = parser.parse_args()
    record = Record("check_weights")
    trained = read_json(arguments.train)
    settings = trained["settings"]
    description = read_json(arguments.target / "target.json")
    shape = DrafterShape.from_target(description, settings["drafter"])
    devices = from_settings(settings)
    plan = make_plan(asdict(shape), settings, devices.kind, devices.count)
    record["device"] = devices.kind
    config = read_json(arguments.drafter / checkpoint.CONFIG)
    with record.part("weights"):
        exported = load_file(arguments.drafter / checkpoint.WEIGHTS)
        final = final_checkpoint(arguments.checkpoints, trained).weights()
        checks = [
            names_check(exported, shape),
            finite_check(exported),
            moved_check(initial_weights(shape, settings["training"]["seed"]), final),
            reload_check(exported, final),
            config_check(config, shape),
            layers_check(config["dflash_config"]["target_layer_ids"], list(shape.target_layer_ids)),
        ]
    if all(check.passed for check in checks):
        with record.part("drafter"), forbid_dense():
            _, held_out = read_rows(arguments.rows, settings["row_length"])
            names = ("input_ids", "document_ids", "position_ids", "loss_mask")
            row = {name: getattr(held_out, name)[0] for name in names}
            guard = Guard("warn")
            checks += drafter_checks(arguments.drafter, arguments.target, row, plan)
            guard.check(files=True)
            record["guard"] = guard.counts()
            checks.append(stage_check("weights", record["guard"], settings["checks"]["compile"]))
    else:
        say("the weights are not sound, so that the drafter is not loaded")
    add_checks(record, checks)
    record.write(arguments.record)


if __name__ == "__main__":
    run_stage(main)
