"""Causal attention within the documents of packed rows: no mask is made, and no score of two documents.

One operator, `draftflow::packed_attention`, which graphs may hold: what differs from batch to batch reaches it in
tensors. On GPUs in half precision it is the variable-length FlashAttention kernel that torch carries: memory grows with
the tokens, work with the squares of the documents' lengths. Elsewhere (CPUs, and fp32, which that kernel does not take)
each document is a causal SDPA of its own. A layer's attention at SmolLM2's shape (9/3 heads of 64, fp32) on one thread
of a CPU takes 11 ms for 4 rows of 256 tokens in 14 documents and 29 for a row of 2048 in 8; SDPA with a mask [S, S] 24
and 196.

transformers finds `packed_attention` under the name `NAME`; it is used only where a model's config says so.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from draftflow.errors import DraftflowError

NAME = "draftflow_packed"


class Documents(NamedTuple):
    """Where the D documents of packed rows lie, the rows laid end to end.

    Args:
        bounds: [D + 1] int32, on the device: document d is tokens bounds[d] to bounds[d + 1] - 1.
        host_bounds: the same on the host.
        longest: int32 scalar on the host, tokens of the longest document.
    """

    bounds: Tensor
    host_bounds: Tensor
    longest: Tensor


def documents_of(document_ids: Tensor, device: torch.device) -> Documents:
    """The documents of rows, padding included: a run of -1 is a document too, so that no token attends to nothing.

    Args:
        document_ids: [B, S] integer. On the host; from a GPU they are waited for.
        device: where attention runs; the copy to a GPU is not waited for.
    """
    ids = document_ids.cpu()
    begins = torch.ones(ids.shape, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    bounds = F.pad(begins.flatten().nonzero().squeeze(1), (0, 1), value=ids.numel()).int()
    pinned = bounds.pin_memory() if device.type == "cuda" else bounds
    return Documents(pinned.to(device, non_blocking=True), bounds, bounds.diff().max())


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for the attention of a layer.

    Args:
        query: [B, Hq, S, D]; key, value: [B, Hkv, S, D], Hkv divides Hq.
        attention_mask: None; the documents take its place.
        documents: of the rows.
        scaling: of the scores; D ** -0.5 by default.
        sliding_window: a token sees itself and the `sliding_window - 1` before it.
        softcap, s_aux: a bound of the scores, attention sinks.

    Returns:
        [B, S, Hq, D], and no weights.

    Raises:
        DraftflowError: the layer wants a mask, a bound of the scores or sinks.
    """
    if attention_mask is not None or softcap is not None or s_aux is not None:
        wish = "a mask of its own" if attention_mask is not None else "sinks" if s_aux is not None else "capped scores"
        raise DraftflowError(
            f"The attention of the target's {type(module).__name__} wants {wish}, which packed rows cannot give it.",
            "Take another target.",
            "target.source",
        )
    tokens = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]  # [B * S, heads, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.ops.draftflow.packed_attention(*tokens, *documents, scale, sliding_window or 0)
    return output.unflatten(0, (query.shape[0], -1)), None


def _like_query(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    host_bounds: Tensor,
    longest: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    if not flash_serves(query.dtype, query.shape[-1], query.device.index):
        groups = query.shape[1] // key.shape[1]  # of the fp32 kernels none takes groups of heads; SDPA would run dense
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        return _by_document(query, key, value, bounds, host_bounds, longest, scale, window)
    most = int(longest)
    # its own argument list is the same in every torch that has a lock; that of torch.nn.attention.varlen is not
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        bounds,
        bounds,
        most,
        most,
        0.0,  # dropout
        True,  # causal
        False,  # no debug mask
        scale=scale,
        window_size_left=window - 1,
        window_size_right=0,
    )[0].contiguous()


@lru_cache(maxsize=8)
def flash_serves(dtype: torch.dtype, head_dim: int, device: int) -> bool:
    """Whether the variable-length FlashAttention kernel takes this; `device` is the number of a GPU."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    host_bounds: Tensor,
    longest: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    grouped = query.shape[1] != key.shape[1]
    heads_first = [states.transpose(0, 1)[None] for states in (query, key, value)]  # [1, heads, tokens, D]
    for start, end in pairwise(host_bounds.tolist()):
        band = None
        if 0 < window < end - start:
            ones = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device)
            band = ones.tril().triu(1 - window)
        parts = (states[:, :, start:end] for states in heads_first)
        attended = F.scaled_dot_product_attention(
            *parts, attn_mask=band, is_causal=band is None, scale=scale, enable_gqa=grouped
        )
        output[start:end] = attended[0].transpose(0, 1)
    return output


AttentionInterface.register(NAME, packed_attention)

torch.library.define(
    "draftflow::packed_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor bounds, Tensor host_bounds, Tensor longest, float scale, "
    "int window) -> Tensor",
)
torch.library.register_fake("draftflow::packed_attention", _like_query)
torch.library.impl("draftflow::packed_attention", "cpu", _by_document)
torch.library.impl("draftflow::packed_attention", "cuda", _on_gpu)
