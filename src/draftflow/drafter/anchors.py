"""Anchors: where draft blocks start. Sampled on the host, into a static number of slots: no shape ever changes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SCORE_BITS = 24  # of torch.rand in float32


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
    loss_mask: Tensor | np.ndarray,
    document_ids: Tensor | np.ndarray,
    count: int,
    generator: torch.Generator | Sequence[torch.Generator | None],
    per_document: int | None = None,
) -> Anchors:
    """Sample anchors of every document, uniformly and without replacement, in up to `count` slots per row.

    A token can be an anchor if it and its successor are supervised and belong to one document: generation starts a
    block at a token that the target wrote, and a block without a first proposal to learn from is wasted.

    A document of c such tokens wants w = min(c, per_document) anchors and gets them if the row has the slots. Otherwise
    the N slots are shared in proportion, N w / sum(w) each, rounded down or up at random so that the proportion is the
    mean over draws. So documents count in the loss as if each were drawn from by itself, however rows are packed.

    Args:
        loss_mask: [B, S], nonzero at supervised tokens (written by the target), on the CPU.
        document_ids: [B, S] integer, in runs, -1 at padding, on the CPU.
        count: N, slots per row.
        generator: of the CPU; or one for each row, which then depends on no other row. A row of None gets no anchors.
        per_document: most anchors of one document; None: as many as it has room for.
    """
    mask, documents = np.asarray(loss_mask).astype(bool), np.asarray(document_ids)
    rows, length = mask.shape
    scores = _scores(generator, rows, length)
    candidate = np.zeros_like(mask)
    candidate[:, :-1] = mask[:, :-1] & mask[:, 1:] & (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] >= 0)
    if not isinstance(generator, torch.Generator):
        candidate[[own is None for own in generator]] = False
    at = np.flatnonzero(candidate)  # [C], ascending
    row, document = at // length, documents.ravel()[at]
    first = np.ones(len(at), bool)
    first[1:] = (row[1:] != row[:-1]) | (document[1:] != document[:-1])
    begins = np.flatnonzero(first)  # [D], of the documents that have candidates
    sizes = np.diff(begins, append=len(at))
    wanted = sizes if per_document is None else np.minimum(sizes, per_document)
    shares = _shares(wanted, row[begins], count, scores[:, -1])  # the last token is no candidate, its score is free

    # By document, the highest scores first: one sort of integers [document, score, index] is several times as fast as
    # sorting indices.
    index_bits = len(at).bit_length()
    keys = np.cumsum(first)
    keys <<= SCORE_BITS
    keys -= (scores.ravel()[at] * 2**SCORE_BITS).astype(np.int64) + 1
    keys <<= index_bits
    keys |= np.arange(len(at))
    keys.sort()
    chosen = keys[ragged_ranges(begins, shares)] & ((1 << index_bits) - 1)
    chosen.sort()

    row, position = np.divmod(at[chosen], length)
    per_row = np.bincount(row, minlength=rows)
    slot = ragged_ranges(np.zeros(rows, np.int64), per_row)
    positions, valid = np.zeros((rows, count), np.int64), np.zeros((rows, count), bool)
    positions[row, slot], valid[row, slot] = position, True
    return Anchors(torch.from_numpy(positions), torch.from_numpy(valid))


def _scores(generator: torch.Generator | Sequence[torch.Generator | None], rows: int, length: int) -> np.ndarray:
    """[rows, length] float32, uniform below 1."""
    if isinstance(generator, torch.Generator):
        return torch.rand(rows, length, generator=generator).numpy()
    scores = torch.zeros(rows, length)
    for own, row in zip(generator, scores, strict=True):
        if own is not None:
            torch.rand(length, generator=own, out=row)
    return scores.numpy()


def _shares(wanted: np.ndarray, row: np.ndarray, count: int, shifts: np.ndarray) -> np.ndarray:
    """How many slots each document gets: all that it wants, or its part of the row's.

    Systematic sampling: the w of the row's documents lie end to end, N points at equal distances fall on them, all
    shifted by one random number, and a document gets the points that it covers. In integers this is exact: the shares
    add up to N, and the mean of each is its proportion.

    Args:
        wanted: [D] int64, at least 1; the documents in the order in which they lie.
        row: [D], the row of each.
        count: slots of a row.
        shifts: [B], uniform in [0, 1).
    """
    total = np.bincount(row, wanted, minlength=len(shifts)).astype(np.int64)  # [B]
    shift = (shifts.astype(np.float64) * total).astype(np.int64)[row]
    ends = np.cumsum(wanted) - (np.cumsum(total) - total)[row]  # along the row
    total = total[row]
    shares = (ends * count + shift) // total - ((ends - wanted) * count + shift) // total
    return np.where(total <= count, wanted, shares)


def ragged_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[i], starts[i] + 1, .. of `counts[i]` numbers, for one i after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def block_inputs(input_ids: Tensor, position_ids: Tensor, anchors: Anchors, block_size: int) -> tuple[Tensor, Tensor]:
    """The anchors' tokens, and the positions of the draft blocks: the anchor's, and those that follow it.

    Args:
        input_ids, position_ids: [B, S] integer.

    Returns:
        tokens [B, N] int64 and positions [B, N * block_size] int64.
    """
    offsets = torch.arange(block_size, device=input_ids.device)
    positions = position_ids.gather(1, anchors.positions)[:, :, None] + offsets
    return input_ids.gather(1, anchors.positions).long(), positions.flatten(1)
