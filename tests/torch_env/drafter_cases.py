"""Small drafters and packed rows for the drafter's tests."""

from typing import Any

import torch
from torch import Tensor

from draftflow.drafter.anchors import Anchors
from draftflow.drafter.shape import DrafterShape

MASK_TOKEN = 95


def tiny_shape(**changes: Any) -> DrafterShape:
    """A drafter of three layers, 64 wide, with grouped queries, for a target of eight layers and 96 tokens."""
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers": 3,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "vocab_size": 96,
        "block_size": 8,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": (1, 3, 5),
        "num_target_layers": 8,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    return DrafterShape(**{**fields, **changes})


def document_ids(lengths: list[list[int]], row_length: int) -> Tensor:
    """[B, row_length] document ids from document lengths per row; the rest is padding."""
    rows = torch.full((len(lengths), row_length), -1)
    for row, documents in zip(rows, lengths, strict=True):
        start = 0
        for number, length in enumerate(documents):
            row[start : start + length] = number
            start += length
    return rows


def position_ids(documents: Tensor) -> Tensor:
    """[B, S] positions that restart in every document."""
    positions = torch.zeros_like(documents)
    for row, ids in zip(positions, documents.tolist(), strict=True):
        for t in range(1, len(ids)):
            row[t] = row[t - 1] + 1 if ids[t] == ids[t - 1] else 0
    return positions


def anchors_at(rows: list[list[int | None]]) -> Anchors:
    """Anchors at the given positions; None is an invalid slot."""
    return Anchors(
        torch.tensor([[0 if t is None else t for t in row] for row in rows]),
        torch.tensor([[t is not None for t in row] for row in rows]),
    )


# Shapes of tiny drafters with sliding layers, by name: what `tiny_shape` is given
SLIDING: dict[str, dict[str, Any]] = {
    "mixed": {"sliding_window": 12, "sliding_layers": (0, 1)},
    "mixed, both directions": {"sliding_window": 12, "sliding_layers": (0, 2), "sliding_causal": False},
    "all": {"sliding_window": 9, "sliding_layers": (0, 1, 2)},
    "all, both directions": {"sliding_window": 8, "sliding_layers": (0, 1, 2), "sliding_causal": False},
}
