"""Anchors: where draft blocks start. Sampled on the host, into a static number of slots: no shape ever changes."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Anchors(NamedTuple):
    """Block starts of a batch of packed rows.

    Args:
        positions: [B, N] int64, index into the row; the valid ones come first, ascending; 0 in an invalid slot.
        valid: [B, N] bool; an invalid slot's block is computed and ignored.
    """

    positions: Tensor
    valid: Tensor

    def to(self, device: torch.device | str) -> "Anchors":
        return Anchors(self.positions.to(device, non_blocking=True), self.valid.to(device, non_blocking=True))


def sample_anchors(
    loss_mask: Tensor | np.ndarray, document_ids: Tensor | np.ndarray, count: int, generator: torch.Generator
) -> Anchors:
    """Sample up to `count` anchors per row, uniformly and without replacement.

    A token can be an anchor if it and its successor are supervised and belong to one document: generation starts a
    block at a token that the target wrote, and a block without a first proposal to learn from is wasted.

    Args:
        loss_mask: [B, S], nonzero at supervised tokens (written by the target), on the CPU.
        document_ids: [B, S] integer, -1 at padding, on the CPU.
        count: N, slots per row.
        generator: of the CPU.
    """
    mask, documents = torch.as_tensor(loss_mask).bool(), torch.as_tensor(document_ids)
    length = mask.shape[1]
    candidate = torch.zeros_like(mask)
    candidate[:, :-1] = mask[:, :-1] & mask[:, 1:] & (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] >= 0)
    scores = torch.rand(mask.shape, generator=generator).masked_fill(~candidate, -1.0)
    scores, picked = scores.topk(min(count, length), dim=1)  # the `count` highest of independent uniforms
    picked = picked.masked_fill(scores < 0, length).sort(dim=1).values  # `length` marks an empty slot and sorts last
    picked = torch.nn.functional.pad(picked, (0, count - picked.shape[1]), value=length)
    valid = picked < length
    return Anchors(picked.masked_fill(~valid, 0), valid)


def block_inputs(
    input_ids: Tensor, position_ids: Tensor, anchors: Anchors, block_size: int, mask_token_id: int
) -> tuple[Tensor, Tensor]:
    """Tokens and positions of the draft blocks: the anchor, then mask tokens, at the positions that follow it.

    Args:
        input_ids, position_ids: [B, S] integer.

    Returns:
        tokens [B, N * block_size] int64 and positions [B, N * block_size] int64.
    """
    batch, count = anchors.positions.shape
    tokens = input_ids.new_full((batch, count, block_size), mask_token_id, dtype=torch.int64)
    tokens[:, :, 0] = input_ids.gather(1, anchors.positions)
    offsets = torch.arange(block_size, device=input_ids.device)
    positions = position_ids.gather(1, anchors.positions)[:, :, None] + offsets
    return tokens.flatten(1), positions.flatten(1)
