"""Attention of the drafter: our own kernels under intervals, flex_attention under a BlockMask, SDPA under a dense mask
on CPUs; never dense on a GPU. Drafting, which attends from the few rows of one block, has its own way.

flex_attention is block-sparse only when compiled. There are many ways in which a compiled call falls back to the dense
one, most of them without an error; they all end in `math_attention`, which is why the guard
stands there. At training length dense means hundreds of gigabytes.
"""

import contextlib
import importlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftflow.drafter.block_attention import Intervals, block_attention
from draftflow.errors import DraftflowError

MOST_DRAFT_ROWS = 128  # no draft block is longer


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Intervals | BlockMask | Tensor) -> Tensor:
    """Grouped-query attention, scaled by head_dim ** -0.5.

    Args:
        q: [B, Hq, Q, D].
        k, v: [B, Hkv, KV, D], Hkv divides Hq.
        mask: intervals (GPU), a BlockMask (call this from compiled code), or a dense mask [B, 1, Q, KV] bool (CPU).

    Returns:
        [B, Hq, Q, D].

    Raises:
        DraftflowError: a dense mask on a GPU, or a BlockMask in code that is not compiled, or no longer.
    """
    if isinstance(mask, Intervals):
        return block_attention(q, k, v, mask)
    if isinstance(mask, BlockMask):
        if q.is_cuda and not torch.compiler.is_compiling():
            raise _dense(q, k, "outside compiled code")
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    if q.is_cuda:
        raise _dense(q, k, "with a dense mask")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def attend_from_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The same for drafting, on any device: one block of L rows, whose scores are L rows of a sequence and no more.

    Args:
        q: [B, Hq, L, D], L up to 128.
        k, v: [B, Hkv, KV, D], of the context and the block.
        mask: [1, 1, L, KV] bool, or None: all is seen.

    Raises:
        DraftflowError: more rows than a draft block has, on a GPU.
    """
    if q.is_cuda and q.shape[2] > MOST_DRAFT_ROWS:
        raise _dense(q, k, "as if for drafting")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


# by name: as an attribute of its package, the module is hidden by the operator of the same name
_flex_operator: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
_math_attention = _flex_operator.math_attention
_lock = threading.Lock()
_guards: list[str] = []  # device types of the guards in force, of all threads


@contextlib.contextmanager
def forbid_dense(device_type: str = "cuda") -> Iterator[None]:
    """While this holds, in every thread: flex_attention on real tensors of a device may not take its dense path.

    Guards nest, and threads may hold them at the same time. Tracing, which runs the dense path on fake tensors, passes.

    Args:
        device_type: on which devices; the tests guard the CPU.

    Raises:
        DraftflowError: from the dense call, with the bytes of its scores.
    """
    with _lock:
        _guards.append(device_type)
        _flex_operator.math_attention = _guarded_math_attention
    try:
        yield
    finally:
        with _lock:
            _guards.remove(device_type)
            if not _guards:
                _flex_operator.math_attention = _math_attention


def _guarded_math_attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    if type(query) in (Tensor, torch.nn.Parameter) and query.device.type in _guards:
        raise _dense(query, key, "outside its fused kernel")
    return _math_attention(query, key, *args, **kwargs)


def _dense(q: Tensor, k: Tensor, how: str) -> DraftflowError:
    """The refusal; scores are counted in fp32, which is what they are computed in."""
    scores = [*q.shape[:3], k.shape[2]]
    size = 4 * torch.Size(scores).numel()
    return DraftflowError(
        f"attention on {q.device} would run dense, {how}: its scores {scores} take {size:,} bytes "
        f"({size / 2**30:.2f} GiB).",
        "Pass a BlockMask to compiled layers (Drafter.compile_layers), and look in the log for why the compiled code "
        "was not used.",
        "drafter/attention.py",
    )
