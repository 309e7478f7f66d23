"""Attention of draft blocks on a GPU: flex_attention under our BlockMask, and kernels of our own.

    PYTHONPATH=src python benchmarks/attention.py --shape qwen3-8b --output attention.json

Both are given the same queries, keys and values of a row of several documents. Both are compared with dense attention
in fp64 on the first blocks of the row, then timed in turn: forward, and forward and backward. flex_attention is tried
with several sizes of its kernels, each of which is compiled. Figures are medians and ranges in milliseconds; beside
them, as floors, what the products that the mask asks for take at the rate of a large bf16 product.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step_time_trials import burst, release_memory
from targets import SHAPES
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from draftflow.drafter.anchors import Anchors, sample_anchors
from draftflow.drafter.block_attention import backward, document_starts, forward, intervals
from draftflow.drafter.mask import allowed, block_mask
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage, say, write_json

ROUNDS, BURST = 9, 5
CHECKED_BLOCKS = 16  # of which dense attention is computed

# Sizes of flex_attention's kernels to be tried; {}: its own choice.
OPTIONS: tuple[dict[str, int], ...] = (
    {},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_warps": 4},
    {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64, "bwd_num_warps": 8},
)


def make_row(length: int, documents: int, count: int, device: torch.device) -> tuple[Anchors, Tensor]:
    """Anchors and document ids of a row of equal documents, all of it supervised."""
    ids = (torch.arange(length) * documents // length)[None]
    anchors = sample_anchors(torch.ones_like(ids), ids, count, torch.Generator().manual_seed(0))
    return anchors.to(device), ids.to(device)


def work_of(anchors: Anchors, ids: Tensor, block: int, heads: int, dim: int) -> float:
    """Floating-point operations of the forward products that the mask asks for; backward has 2.5 times as many."""
    starts = document_starts(anchors, ids, torch.arange(ids.shape[1], device=ids.device))
    context = ((anchors.positions - starts) * anchors.valid).sum().item()
    return 4.0 * heads * dim * block * (context + block * anchors.positions.shape[1])


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative, by norm."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def time_of(work: Callable[[], Any], device: torch.device) -> list[float]:
    """Milliseconds of one call, several times."""
    return [burst(work, BURST, device) for _ in range(ROUNDS)]


def words(times: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(times):.3f} ({min(times):.3f}-{max(times):.3f})"


def matrix_rate(device: torch.device) -> float:
    """Operations per second of a large product in bf16."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (statistics.median(time_of(lambda: a @ b, device)) * 1e-3)


class Trial:
    """Queries, keys, values and the gradient of the result of one row, in memory as the projections leave them."""

    def __init__(self, shape: str, documents: int, block: int | None, device: torch.device):
        config, step = SHAPES[shape]["config"], {**SHAPES[shape]["step"], **SHAPES[shape].get("one_row", {})}
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.device, self.block = device, block or step["block_size"]
        self.anchors, self.ids = make_row(step["row_length"], documents, step["anchors_per_row"], device)
        queries = self.anchors.positions.shape[1] * self.block
        columns = step["row_length"] + queries

        def draw(rows: int, count: int) -> Tensor:
            values = torch.randn(1, rows, count, dim, device=device, dtype=torch.bfloat16)
            return values.transpose(1, 2).requires_grad_()  # [1, heads, rows, D]

        self.q, self.k, self.v = draw(queries, heads), draw(columns, kv_heads), draw(columns, kv_heads)
        self.do = draw(queries, heads).detach()
        self.work = work_of(self.anchors, self.ids, self.block, heads, dim)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Result and gradient of the queries of the first blocks, in fp64."""
        rows = CHECKED_BLOCKS * self.block
        mask = allowed(self.anchors, self.ids, self.block)[:, :, :rows]
        q = self.q[:, :, :rows].detach().double().requires_grad_()
        k, v = self.k.detach().double(), self.v.detach().double()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        (dq,) = torch.autograd.grad(out, q, self.do[:, :, :rows].double())
        return out.detach(), dq

    def compare(self, out: Tensor, dq: Tensor, expected: tuple[Tensor, Tensor]) -> list[float]:
        rows = CHECKED_BLOCKS * self.block
        return [
            difference(found[:, :, :rows], right) for found, right in zip((out.detach(), dq), expected, strict=True)
        ]

    def flex(self, options: dict[str, int]) -> dict[str, Any]:
        """flex_attention, compiled with these sizes of its kernels."""
        torch.compiler.reset()
        mask = block_mask(self.anchors, self.ids, self.block)
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        inputs = (self.q, self.k, self.v)

        def run() -> Tensor:
            return compiled(*inputs, block_mask=mask, enable_gqa=True, kernel_options=options or None)

        def both() -> tuple[Tensor, tuple[Tensor, ...]]:
            out = run()
            return out, torch.autograd.grad(out, inputs, self.do)

        return self._measured(run, both)

    def own(self) -> dict[str, Any]:
        """The kernels of block_attention_kernels.py."""
        found = intervals(self.anchors, self.ids)
        inputs = tuple(x.detach() for x in (self.q, self.k, self.v))

        def run() -> Tensor:
            return forward(*inputs, *found)[0]

        def both() -> tuple[Tensor, tuple[Tensor, ...]]:
            out, lse = forward(*inputs, *found)
            return out, backward(self.do, *inputs, out, lse, *found)

        return self._measured(run, both)

    def _measured(self, run: Callable[[], Tensor], both: Callable[[], Any]) -> dict[str, Any]:
        out, gradients = both()
        differences = self.compare(out, gradients[0], self.dense())
        del out, gradients
        return {
            "relative_difference": dict(zip(("out", "dq"), differences, strict=True)),
            "forward_ms": time_of(run, self.device),
            "forward_backward_ms": time_of(both, self.device),
        }


def main() -> None:
    """Measure, print a table, and write all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], default="qwen3-8b")
    parser.add_argument("--block", type=int, help="size of the draft blocks; the shape's own by default")
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 8], help="documents of the row")
    parser.add_argument("--output", type=Path, default=Path("attention.json"), help="figures of all tries")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise DraftflowError("There is no GPU to time on.", "Run this where torch sees one.", "benchmarks/attention.py")
    device = torch.device("cuda:0")
    rate = matrix_rate(device)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rate": rate}
    for documents in arguments.documents:
        trial = Trial(arguments.shape, documents, arguments.block, device)
        tries: list[tuple[str, Callable[[], dict[str, Any]]]] = [("block_attention", trial.own)]
        tries += [(f"flex_attention {options}", partial(trial.flex, options)) for options in OPTIONS]
        for name, attempt in tries:
            key = f"{arguments.shape}, block {trial.block}, {documents} documents: {name}"
            try:
                figures = attempt()
            except Exception as error:  # a size that a kernel cannot have; the others are tried
                found[key] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                say(f"{key}: {found[key]['error'][:120]}")
                release_memory()
                continue
            floor = trial.work / rate * 1e3
            found[key] = {**figures, "floor_ms": {"forward": floor, "forward_backward": 3.5 * floor}}
            say(
                f"{key}: forward {words(figures['forward_ms'])} ms, with backward "
                f"{words(figures['forward_backward_ms'])} ms (floors {floor:.2f} and {3.5 * floor:.2f}), "
                f"differences {figures['relative_difference']}"
            )
        write_json(arguments.output, found)


if __name__ == "__main__":
    run_stage(main)
