"""Attention of a batch that is continued token by token: SDPA, where no head of keys is copied for those that share it.

At each token transformers copies keys and values of all tokens so far for each head of a group. It finds
`decoding_attention` under the name `NAME`; it is used only where a model's config says so.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "draftflow_decoding"


def decoding_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for a layer's attention while it generates.

    A single query head of a token is one row of a product, and so are all heads that share a head of keys: they become
    queries of that head. Several tokens at a time are left to transformers.

    Args:
        query: [B, Hq, S, D]; key, value: [B, Hkv, T, D], Hkv divides Hq.
        attention_mask: [B, 1, S, T] bool, or None where a single token sees all.
        scaling: of the scores; D ** -0.5 by default.

    Returns:
        [B, S, Hq, D], and no weights.
    """
    heads, tokens = query.shape[1:3]
    one_mask = attention_mask is None or attention_mask.shape[1] == 1
    if tokens > 1 or heads == key.shape[1] or not one_mask or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(len(query), 1, heads, -1), None


AttentionInterface.register(NAME, decoding_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
