"""What the process of one device is made of, for warm-up and training alike."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftflow.compile_cache.vector_isa import load_probes_in_process
from draftflow.drafter.shape import DrafterShape
from draftflow.target.features import FeatureExtractor
from draftflow.target.load import load_target
from draftflow.training.data import HELD_OUT, TRAIN, Batches, Rows
from draftflow.training.features import Colocated
from draftflow.training.optimizer import Hyperparameters
from draftflow.training.plan import Plan
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
    source: Colocated
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
) -> Process:
    """Load the target and build the step; everything that is random is seeded by `hyper.seed`."""
    device = torch.device("cuda:0" if plan.device_kind == "cuda" else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        load_probes_in_process()
        # a CUDA build says at each start that there is no GPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch.manual_seed(hyper.seed)
    train, held_out = rows
    loaded = load_target(target, device, getattr(torch, plan.precision))
    extractor = FeatureExtractor(loaded, shape.target_layer_ids)
    counts = {TRAIN: len(train), HELD_OUT: len(held_out)}
    source = Colocated(extractor, plan, counts, feature_cache_gb, device)
    batches = Batches(plan, train, held_out, hyper.gamma, hyper.seed, rank, world_size)
    return Process(device, batches, source, Step(plan, shape, loaded, source, hyper, device))


def peak_memory_bytes(device: torch.device) -> dict[str, Any]:
    """The most memory that this process used: of the GPU as torch allocated it, and of the host."""
    status = Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"gpu": gpu, "host": resident}
