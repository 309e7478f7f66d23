"""The processes of devices.py that need torch: a target of random weights, sums over ranks, and weights compared.

    python devices_trials.py target SHAPE FOLDER
    python -m torch.distributed.run --standalone --nproc-per-node N devices_trials.py sums SHAPE
    python devices_trials.py compare ONE.safetensors OTHER.safetensors

Each prints its result as a line of JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scaling import drafter_shape
from target_shapes import SHAPES
from targets import LAYERS, random_target

from draftflow.drafter.model import Drafter
from draftflow.training.plan import SUMMED_BYTES
from draftflow.training.sums import Sums

ROOT = Path(__file__).parents[1]
ROUNDS = 10


def write_target(name: str, folder: Path) -> dict[str, Any]:
    """A target of a shape of `SHAPES` as users bring one: config, random bf16 weights, and a small tokenizer."""
    sys.path.append(str(ROOT / "tests" / "torch_env"))
    from tiny import make_target, make_tokenizer

    if name == "tiny":
        make_target(folder)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        random_target(name, LAYERS, device, torch.bfloat16).model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return {"folder": str(folder)}


def sums(name: str) -> dict[str, Any]:
    """Milliseconds that the sums of a drafter's gradients take with nothing beside them: each by itself; in pieces, as
    they are begun in a backward pass; and all as one tensor, as of a step that is replayed."""
    place = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(place)
    device = torch.device("cuda", place) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    shape = drafter_shape(name, SHAPES[name]["step"]["block_size"], SHAPES[name]["layers"])
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in Drafter(shape).parameters()]
    dtype = torch.bfloat16 if cuda else torch.float32
    gradients = [torch.ones(shape, dtype=dtype, device=device) for shape in reversed(shapes)]
    flat = torch.cat([gradient.flatten() for gradient in gradients])

    def each(at_least: int = 0) -> None:
        found = Sums(at_least)
        for gradient in gradients:
            found.add(gradient)
        found.flush()
        found.end()

    def together() -> None:
        found = Sums()
        found.together(gradients)
        found.end()

    ways = {"each": each, "pieces": partial(each, SUMMED_BYTES), "together": together}
    times = {f"{way}_ms": round(_milliseconds(do, cuda), 3) for way, do in ways.items()}
    alone = _milliseconds(lambda: dist.all_reduce(flat), cuda)
    ranks = dist.get_world_size()
    dist.destroy_process_group()
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": ranks,
        "bytes": flat.nbytes,
        **times,
        "bus_gb_per_s": round(2 * (ranks - 1) / ranks * flat.nbytes / alone / 1e6, 2),
    }


def _milliseconds(way: Callable[[], None], cuda: bool) -> float:
    """Median of several rounds, each from when all ranks are there to when the device is done."""
    times = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        way()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e3


def compare(one: Path, other: Path) -> dict[str, Any]:
    """How far two files of weights are from one another: the largest |a - b| / |a| of a tensor, in the 2-norm."""
    from safetensors.torch import load_file

    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    distances = {
        name: float((value.double() - second[name].double()).norm() / value.double().norm())
        for name, value in first.items()
    }
    farthest = max(distances, key=lambda name: distances[name])
    return {"tensor": farthest, "distance": distances[farthest]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=["target", "sums", "compare"])
    parser.add_argument("arguments", nargs="+")
    arguments = parser.parse_args()
    given = arguments.arguments
    if arguments.trial == "target":
        found = write_target(given[0], Path(given[1]))
    elif arguments.trial == "sums":
        found = sums(given[0])
    else:
        found = compare(Path(given[0]), Path(given[1]))
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
