"""Attention of draft blocks in full layers on GPUs: what a block sees as intervals, and kernels for that.

A block sees the context of its document before its anchor, and itself in both directions (see `mask.py`). So a mask is
two numbers a block, where flex_attention takes lists of tiles and a predicate; and what comes from the anchors being
in order serves the kernels (`block_attention_kernels.py`). In one run on an H200 (`benchmarks/attention.py`, rows of
3,072 tokens with 512 blocks of 16, 32 query and 8 key heads of 128) they took 0.63 of flex_attention's time, forward
and backward, for a row of one document (2.04 of 3.23 ms), and 0.54 for one of eight (0.62 of 1.14 ms).

Compiled code calls it as one operator, that no compiler looks into. Sliding layers, whose rows see windows of their
own, and what the kernels are not made for (`fits`) keep flex_attention.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftflow.drafter.anchors import Anchors

KEYS = 64  # of context in a tile of the backward pass
WIDTHS = (16, 32, 64, 128)  # of a head
PRECISIONS = (torch.bfloat16, torch.float16)
ARCHITECTURES = (8, 9)  # Ampere, Ada and Hopper; on Blackwell tiles of the widest head take more than there is
SHARED_MEMORY = 160 * 2**10  # bytes of a multiprocessor; those of these architectures that have less have 100 KiB


class Intervals(NamedTuple):
    """What every block sees, and which blocks see what.

    Args:
        start, end: [B, N] int32, the context of each block; not falling; empty for an invalid slot.
        seen_by: [B, 4, T] int32 for tiles of `KEYS` columns of context: blocks `first <= j < last` see some of the
            tile, those with `first_full <= j < last_full` all of it; in the order first, first_full, last_full, last.
    """

    start: Tensor
    end: Tensor
    seen_by: Tensor


def document_starts(anchors: Anchors, document_ids: Tensor, index: Tensor) -> Tensor:
    """Where in the row the document of each anchor begins.

    Args:
        document_ids: [B, S] integer, in runs.
        index: [S], 0, 1, ..

    Returns:
        [B, N] in the dtype of `index`.
    """
    begins = document_ids != document_ids.roll(1, dims=1)  # the first token begins at 0 either way
    return (begins * index).cummax(dim=1).values.gather(1, anchors.positions)


def intervals(anchors: Anchors, document_ids: Tensor) -> Intervals:
    """The intervals of packed rows, without waiting for the device.

    Args:
        anchors: of N slots, the valid ones first and ascending.
        document_ids: [B, S] integer, in runs.
    """
    index = torch.arange(document_ids.shape[1], device=document_ids.device, dtype=torch.int32)
    # invalid slots come last, and see nothing from where the last valid one ends
    most = torch.where(anchors.valid, anchors.positions, 0).amax(1, keepdim=True)
    end = torch.where(anchors.valid, anchors.positions, most).int()
    start = torch.where(anchors.valid, document_starts(anchors, document_ids, index), most).int()
    tile = index[::KEYS].expand(len(end), -1).contiguous()
    following = tile + KEYS
    seen_by = [
        torch.searchsorted(end, tile, right=True, out_int32=True),
        torch.searchsorted(end, following, out_int32=True),
        torch.searchsorted(start, tile, right=True, out_int32=True),
        torch.searchsorted(start, following, out_int32=True),
    ]
    return Intervals(start, end, torch.stack(seen_by, dim=1))


def fits(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernels are made for heads of this width and precision on this device."""
    if device.type != "cuda" or torch.version.hip or dtype not in PRECISIONS or width not in WIDTHS:
        return False
    found = torch.cuda.get_device_properties(device)
    return found.major in ARCHITECTURES and found.shared_memory_per_block_optin > SHARED_MEMORY


def block_attention(q: Tensor, k: Tensor, v: Tensor, found: Intervals) -> Tensor:
    """Grouped-query attention of draft blocks, scaled by head_dim ** -0.5.

    Args:
        q: [B, Hq, N * block_size, D], the last dimension contiguous, as of k and v.
        k, v: [B, Hkv, S + N * block_size, D]; Hkv divides Hq.
        found: of N slots and S columns of context.

    Returns:
        [B, Hq, N * block_size, D], in memory [B, N * block_size, Hq, D].
    """
    return forward(q, k, v, *found)[0]


@torch.library.custom_op("draftflow::block_attention", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, seen_by: Tensor) -> tuple[Tensor, Tensor]:
    """Attention as of `block_attention`, and log2 of the sums of exponentials, [B, Hq, N * block_size] fp32."""
    from draftflow.drafter import block_attention_kernels  # needs Triton

    return block_attention_kernels.forward(q, k, v, Intervals(start, end, seen_by))


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, seen_by: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, total, dim = q.shape
    return q.new_empty(batch, total, heads, dim).transpose(1, 2), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("draftflow::block_attention_backward", mutates_args=())
def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, start: Tensor, end: Tensor, seen_by: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous, from that of `out`."""
    from draftflow.drafter import block_attention_kernels

    do = do if do.stride(-1) == 1 else do.contiguous()
    return block_attention_kernels.backward(do, q, k, v, out, lse, Intervals(start, end, seen_by))


@backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*backward(do, *ctx.saved_tensors), None, None, None)


forward.register_autograd(_differentiate, setup_context=_keep)
