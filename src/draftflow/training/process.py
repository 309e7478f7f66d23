"""What the process of one device is made of, for warm-up and training alike."""

import contextlib
import importlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftflow.compile_cache.inductor import prepare_inductor
from draftflow.drafter.shape import DrafterShape
from draftflow.target.features import FeatureExtractor
from draftflow.target.load import Target, load_target
from draftflow.target.replayed import Replayed, worth_replaying
from draftflow.training.data import Batches, Rows
from draftflow.training.features import Colocated, Extractor, Source, rows_at_once
from draftflow.training.optimizer import Hyperparameters
from draftflow.training.plan import Plan, check_precision
from draftflow.training.step import Step


@dataclass(frozen=True)
class Process:
    """One device at work.

    Attributes:
        device: `cpu` or `cuda:0`, the only GPU that the process sees.
        batches: of this rank.
        source: where features come from; counts its hits.
        step: what is run.
    """

    device: torch.device
    batches: Batches
    source: Source
    step: Step


def make_process(
    shape: DrafterShape,
    plan: Plan,
    hyper: Hyperparameters,
    rows: tuple[Rows, Rows],
    target: Path,
    feature_cache_gb: float,
    rank: int = 0,
    world_size: int = 1,
    source: Source | None = None,
) -> Process:
    """Load the target and build the step; everything that is random is seeded by `hyper.seed`.

    Args:
        source: of features, where it is not this process that computes them. Its target then has no layers.

    Raises:
        DraftflowError: the device does not have the float8 products of the plan.
    """
    require_products(plan)
    compiler = threading.Thread(target=_import_compiler)
    compiler.start()  # while weights are read
    device = use_device(plan)
    prepare_inductor(device.type)
    torch.manual_seed(hyper.seed)
    if source is None:
        loaded, source = load_source(plan, rows, target, feature_cache_gb, device)
    else:
        loaded = load_target(target, device, getattr(torch, plan.precision), layers=False)
    batches = make_batches(plan, hyper, rows, rank, world_size)
    step = Step(plan, shape, loaded, source, hyper, device)
    compiler.join()
    return Process(device, batches, source, step)


def require_products(plan: Plan) -> None:
    """See that the device of this process has the products that the drafter of a plan is computed with.

    Raises:
        DraftflowError: float8 on a GPU that has none.
    """
    if plan.float8:
        check_precision("fp8", "cuda", [(torch.cuda.get_device_name(), torch.cuda.get_device_capability())])


def use_device(plan: Plan) -> torch.device:
    """The device of this process; on the CPU, its share of the cores."""
    if plan.device_kind == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    return torch.device("cuda:0" if plan.device_kind == "cuda" else "cpu")


def make_batches(plan: Plan, hyper: Hyperparameters, rows: tuple[Rows, Rows], rank: int, world_size: int) -> Batches:
    """The batches of one of the ranks that train."""
    gamma, most = hyper.objective.gamma, hyper.anchors_per_document
    return Batches(plan, *rows, gamma, hyper.seed, rank, world_size, most)


def load_source(
    plan: Plan, rows: tuple[Rows, Rows], target: Path, feature_cache_gb: float, device: torch.device
) -> tuple[Target, Colocated]:
    """The target on `device`, and the features that it computes there; on a GPU its layers are compiled."""
    prepare_inductor(device.type)
    loaded = load_target(target, device, getattr(torch, plan.precision))
    extract = extractor_of(loaded, plan, device)
    counts = {split.split: len(split) for split in rows}
    return loaded, Colocated(extract, plan, counts, feature_cache_gb, device)


def extractor_of(target: Target, plan: Plan, device: torch.device, compiled: bool = True) -> Extractor:
    """What computes the features of a plan's rows: on a GPU compiled, and replayed where that is faster."""
    extractor = FeatureExtractor(target, plan.feature_layers)
    if device.type == "cuda" and compiled:
        extractor.compile_layers()
        if worth_replaying(extractor, rows_at_once(plan) * plan.row_length):
            return Replayed(extractor)
    return extractor


def _import_compiler() -> None:
    """What torch imports at the first call of compiled code; some of it is absent in some builds."""
    for name in ("torch._inductor.compile_fx", "torch._inductor.select_algorithm", "torch._dynamo.repro.after_dynamo"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def peak_memory_bytes(device: torch.device) -> dict[str, Any]:
    """The most memory that this process used: of the GPU as torch allocated it, and of the host."""
    status = Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"gpu": gpu, "host": resident}
