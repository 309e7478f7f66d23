"""The plan: every static shape of a run, known before anything is compiled. Standard library only."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from draftflow.drafter.shape import DrafterShape
from draftflow.errors import DraftflowError

# flex_attention's tiles; its kernels refuse other sizes
CUDA_TILE = 128

# Bytes of the logits of one chunk of the loss, and what its rows are a multiple of: enough to keep the matrix product
# busy, on a CPU little enough for its memory.
CHUNK_BYTES = {"cpu": 96 * 2**20, "cuda": 640 * 2**20}
CHUNK_ROWS = {"cpu": 32, "cuda": 256}

# Operations of the drafter's matrix products in a step, forward and backward, from which on a GPU is no longer faster
# than its host: some 20 to 30 ms of an H200.
MOST_OPERATIONS = 2e13

# Bytes of gradients that are summed over ranks at a time, at least: a sum of fewer takes mostly its latency, some tens
# of microseconds between GPUs of a node.
SUMMED_BYTES = 8 * 2**20

# The least compute capability of a GPU that multiplies float8
FLOAT8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Plan:
    """Static shapes of the step on one device. Two runs of equal plans run the same compiled code.

    Attributes:
        device_kind: `cpu` or `cuda`.
        precision: `float32` or `bfloat16`, the dtype of features and of the computation; weights are float32.
        rows: packed rows per device and step (B).
        row_length: tokens of a row (S).
        anchors: draft blocks per row (N).
        block_size: tokens of a draft block (Bk), its anchor included.
        loss_chunk: rows of the draft blocks whose logits are held at a time.
        drafter: the fields of the drafter's shape.
        loss, optimizer: as in the configuration; they have kernels of their own.
        float8: whether the drafter's linear layers multiply in float8; all else is as `precision` says.
        target: of a target whose layers are compiled, on GPUs, what its graph depends on.
    """

    device_kind: Literal["cpu", "cuda"]
    precision: Literal["float32", "bfloat16"]
    rows: int
    row_length: int
    anchors: int
    block_size: int
    loss_chunk: int
    drafter: dict[str, Any]
    loss: Literal["decay", "dpace", "kl"] = "decay"
    optimizer: Literal["adamw", "muon"] = "adamw"
    float8: bool = False
    target: dict[str, Any] = field(default_factory=dict)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose output a step needs: the tapped ones, and for `kl` the last, which the head reads."""
        last = (self.drafter["num_target_layers"] - 1,) if self.loss == "kl" else ()
        return (*self.drafter["target_layer_ids"], *last)


def drafter_parameters(shape: dict[str, Any]) -> int:
    """Number of trainable weights of a drafter, from the fields of its shape."""
    hidden, head = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["heads"] * head, shape["kv_heads"] * head
    attention = hidden * (2 * queries + 2 * keys) + 2 * head
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    return len(shape["target_layer_ids"]) * hidden * hidden + shape["layers"] * layer + 2 * hidden


def worth_capturing(plan: Plan) -> bool:
    """Whether the step of a plan may be launched more slowly than computed, and is recorded and replayed instead."""
    rows = plan.rows * plan.anchors * plan.block_size
    return plan.device_kind == "cuda" and 6.0 * rows * drafter_parameters(plan.drafter) < MOST_OPERATIONS


def check_rows(settings: Mapping[str, Any], device_kind: str, world_size: int) -> None:
    """Refuse rows that the devices cannot share; known before anything is built. Arguments as of `make_plan`.

    Raises:
        DraftflowError: the rows do not divide among the devices, or the row is not a multiple of a GPU's tile.
    """
    rows, row_length = settings["rows_per_step"], settings["row_length"]
    if rows % world_size:
        raise DraftflowError(
            f"{rows} rows per step do not divide among {world_size} devices.",
            f"Use a multiple of {world_size}, such as {-(-rows // world_size) * world_size}.",
            "config key training.rows_per_step",
        )
    if device_kind == "cuda" and row_length % CUDA_TILE:
        raise DraftflowError(
            f"Rows of {row_length} tokens do not fit the tiles of {CUDA_TILE} tokens of attention on a GPU.",
            f"Use a multiple of {CUDA_TILE}, such as {-(-row_length // CUDA_TILE) * CUDA_TILE}.",
            "config key dataset.row_length",
        )


def check_precision(precision: str, device_kind: str, gpus: Iterable[tuple[str, tuple[int, ...]]] = ()) -> None:
    """Refuse float8 products on devices that have none.

    Args:
        precision: `training.precision`.
        device_kind: `cpu` or `cuda`.
        gpus: name and compute capability of the GPUs that are known.

    Raises:
        DraftflowError: `fp8` is asked for on a CPU or an older GPU.
    """
    if precision != "fp8":
        return
    without = ["the CPU"] if device_kind == "cpu" else []
    for name, capability in gpus:
        if capability and capability < FLOAT8_CAPABILITY:
            without.append(f"{name} (compute capability {'.'.join(map(str, capability))})")
    if without:
        raise DraftflowError(
            f"There are no fast float8 products on {without[0]}.",
            "Use bf16 or auto, or GPUs of compute capability 8.9 or more.",
            "config key training.precision",
        )


def make_plan(
    shape: Mapping[str, Any], settings: Mapping[str, Any], device_kind: Literal["cpu", "cuda"], world_size: int
) -> Plan:
    """The plan of a run.

    Args:
        shape: the fields of a `DrafterShape`.
        settings: with the keys `row_length`, `rows_per_step`, `anchors_per_row` and `precision` of the configuration,
            and `loss` and `optimizer` where they are not the default.
        device_kind: `cpu` or `cuda`.
        world_size: number of devices.

    Raises:
        DraftflowError: the rows do not divide among the devices, the row is not a multiple of a GPU's tile, or the
            devices do not have the precision.
    """
    check_rows(settings, device_kind, world_size)
    check_precision(settings["precision"], device_kind)
    bf16 = settings["precision"] in ("bf16", "fp8") or (settings["precision"] == "auto" and device_kind == "cuda")
    rows_of_logits = CHUNK_BYTES[device_kind] // ((2 if bf16 else 4) * shape["vocab_size"])
    multiple = CHUNK_ROWS[device_kind]
    return Plan(
        device_kind=device_kind,
        precision="bfloat16" if bf16 else "float32",
        rows=settings["rows_per_step"] // world_size,
        row_length=settings["row_length"],
        anchors=settings["anchors_per_row"],
        block_size=shape["block_size"],
        loss_chunk=max(multiple, shape["block_size"], rows_of_logits // multiple * multiple),
        drafter=json.loads(json.dumps(shape)),
        loss=settings.get("loss", "decay"),
        optimizer=settings.get("optimizer", "adamw"),
        float8=settings["precision"] == "fp8",
    )


def plan_of_run(
    settings: Mapping[str, Any], target: Path, device_kind: Literal["cpu", "cuda"], world_size: int
) -> tuple[DrafterShape, Plan]:
    """The drafter's shape and the plan, from a stage's settings and the folder of the prepared target."""
    description = json.loads((target / "target.json").read_text(encoding="utf-8"))
    shape = DrafterShape.from_target(description, settings["drafter"])
    plan = make_plan(asdict(shape), settings, device_kind, world_size)
    return shape, replace(plan, target=compiled_target(description)) if device_kind == "cuda" else plan


def compiled_target(description: Mapping[str, Any]) -> dict[str, Any]:
    """What the graph of a target's layer depends on beside rows and precision, from `target.json`."""
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    code = {"transformers": metadata.version("transformers")}
    return {name: description[name] for name in ("architecture", "hidden_size", *sizes)} | code


def plan_id(plan: Plan) -> str:
    """12 hexadecimal digits over every field of the plan."""
    return hashlib.sha256(json.dumps(asdict(plan), sort_keys=True).encode()).hexdigest()[:12]


def plan_differences(recorded: Mapping[str, Any], current: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Fields of two plans, as dictionaries, that differ: `row_length 256 -> 512`."""
    found = []
    for name in sorted({*recorded, *current}):
        before, after = recorded.get(name), current.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += plan_differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name} {before} -> {after}")
    return found
