"""Packed rows into batches: which rows a step takes, where its draft blocks start, what they shall predict.

All of it happens on the host, where the loss mask is known: the numbers of supervised positions are host integers, and
nothing waits for the device. What a step sees depends on the seed and the number of the step alone, never on the number
of devices or on what happened before, so a run that resumes, on any number of devices, continues as if never stopped.
"""

import bisect
import hashlib
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from draftflow.drafter.anchors import Anchors, block_inputs, sample_anchors
from draftflow.drafter.loss import block_targets, loss_weights
from draftflow.errors import DraftflowError
from draftflow.training.plan import Plan

TRAIN, HELD_OUT = "train", "held_out"


@dataclass(frozen=True)
class Rows:
    """The packed rows of one split, [R, S] each, on the host.

    Attributes:
        split: `train` or `held_out`.
        input_ids, document_ids, position_ids: int64; document -1 is padding, positions restart at 0 per document.
        loss_mask: bool, the tokens that the target wrote.
    """

    split: str
    input_ids: Tensor
    document_ids: Tensor
    position_ids: Tensor
    loss_mask: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)


def read_rows(path: Path, row_length: int) -> tuple[Rows, Rows]:
    """The training and the held-out rows of `rows.safetensors`.

    Raises:
        DraftflowError: a split is empty, or rows are not of `row_length` tokens.
    """
    splits = []
    with safe_open(path, "pt") as file:
        for split in (TRAIN, HELD_OUT):
            tensors = {name: file.get_tensor(f"{split}.{name}") for name in _TENSORS}
            mask = tensors.pop("loss_mask").bool()
            splits.append(Rows(split, **{name: tensor.long() for name, tensor in tensors.items()}, loss_mask=mask))
    for rows in splits:
        if not len(rows):
            raise DraftflowError(f"There are no {rows.split} rows.", "Add prompts to dataset.sources.", str(path))
        if rows.input_ids.shape[1] != row_length:
            raise DraftflowError(
                f"Rows have {rows.input_ids.shape[1]} tokens and the plan says {row_length}.",
                "Run `snakemake dataset` with the present configuration.",
                str(path),
            )
    return splits[0], splits[1]


def rows_of_one_token(plan: Plan, count: int) -> Rows:
    """Rows of the plan's shape that hold one supervised document each: for warm-up, which needs no dataset."""
    shape = (count, plan.row_length)
    return Rows(
        TRAIN,
        input_ids=torch.zeros(shape, dtype=torch.int64),
        document_ids=torch.zeros(shape, dtype=torch.int64),
        position_ids=torch.arange(plan.row_length).expand(shape).contiguous(),
        loss_mask=torch.ones(shape, dtype=torch.bool),
    )


_TENSORS = ("input_ids", "document_ids", "position_ids", "loss_mask")


@dataclass(frozen=True)
class Batch:
    """What one device works on in one step: B rows of S tokens, N blocks a row, M supervised block positions.

    Attributes:
        split, indices: which rows these are; their features are remembered under it.
        input_ids, document_ids, position_ids: [B, S] int64.
        anchors: of N slots per row.
        block_tokens, block_positions: [B, N * Bk] int64.
        supervised: [M] int64, rows of the flattened blocks that the loss looks at, ascending.
        labels: [M] int64, the token at that place.
        offsets: [M] int64, k: the place within the block, from 1.
        weights: [M] float32, w_k.
        chunks: boundaries of the supervised rows that the loss takes at a time, from 0 to M; none cuts a block.
    """

    split: str
    indices: tuple[int, ...]
    input_ids: Tensor
    document_ids: Tensor
    position_ids: Tensor
    anchors: Anchors
    block_tokens: Tensor
    block_positions: Tensor
    supervised: Tensor
    labels: Tensor
    offsets: Tensor
    weights: Tensor
    chunks: tuple[int, ...]

    def to(self, device: torch.device) -> "Batch":
        """This batch on `device`; copies to a GPU leave from pinned memory and are not waited for."""
        if self.input_ids.device.type == device.type:
            return self
        moved = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.pin_memory().to(device, non_blocking=True)
        anchors = Anchors(*(part.pin_memory() for part in self.anchors)).to(device)
        return replace(self, anchors=anchors, **moved)


class Batches:
    """Batches of a run, by number of the step.

    Args:
        plan: shapes.
        train, held_out: the rows.
        gamma: decay of the loss weights.
        seed: of the order of the rows and of the anchors.
        rank, world_size: which of how many devices this is.
    """

    def __init__(self, plan: Plan, train: Rows, held_out: Rows, gamma: float, seed: int, rank: int, world_size: int):
        self.plan, self.train_rows, self.held_out_rows = plan, train, held_out
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.loss_weights = loss_weights(plan.block_size, gamma)

    def train(self, step: int) -> Batch:
        """The batch of this device in `step` (from 0): its contiguous share of the rows of the step.

        Rows follow one another in an endless stream of permutations, one for each epoch; anchors are drawn for a
        place in the stream, so that a row has other blocks in each epoch.
        """
        first = (step * self.world_size + self.rank) * self.plan.rows
        stream = range(first, first + self.plan.rows)
        indices = tuple(row_at(place, len(self.train_rows), self.seed) for place in stream)
        return self._batch(self.train_rows, indices, [_generator(self.seed, "anchors", place) for place in stream])

    def held_out(self) -> list[Batch]:
        """This device's share of all held-out rows, the same anchors every time.

        Every batch has the shape of a training batch and every device has the same number of them; what is missing
        at the end is filled with rows that have no blocks.
        """
        per_round = self.plan.rows * self.world_size
        count = -(-len(self.held_out_rows) // per_round)
        return [self._held_out(round_ * per_round + self.rank * self.plan.rows) for round_ in range(count)]

    def _held_out(self, first: int) -> Batch:
        indices = range(first, first + self.plan.rows)
        total = len(self.held_out_rows)
        generators = [_generator(self.seed, "held-out anchors", index) if index < total else None for index in indices]
        return self._batch(self.held_out_rows, tuple(min(index, total - 1) for index in indices), generators)

    def _batch(self, rows: Rows, indices: tuple[int, ...], generators: list[torch.Generator | None]) -> Batch:
        plan, pick = self.plan, torch.tensor(indices)
        input_ids, document_ids = rows.input_ids[pick], rows.document_ids[pick]
        position_ids, loss_mask = rows.position_ids[pick], rows.loss_mask[pick]
        drawn = [
            sample_anchors(loss_mask[i : i + 1], document_ids[i : i + 1], plan.anchors, generator)
            if generator is not None
            else Anchors(
                torch.zeros(1, plan.anchors, dtype=torch.int64), torch.zeros(1, plan.anchors, dtype=torch.bool)
            )
            for i, generator in enumerate(generators)
        ]
        anchors = Anchors(*(torch.cat(parts) for parts in zip(*drawn, strict=True)))
        block_tokens, block_positions = block_inputs(
            input_ids, position_ids, anchors, plan.block_size, plan.drafter["mask_token_id"]
        )
        labels, is_supervised = block_targets(input_ids, loss_mask, document_ids, anchors, plan.block_size)
        supervised = is_supervised.flatten().nonzero().squeeze(1)
        offsets = supervised % plan.block_size
        return Batch(
            split=rows.split,
            indices=indices,
            input_ids=input_ids,
            document_ids=document_ids,
            position_ids=position_ids,
            anchors=anchors,
            block_tokens=block_tokens,
            block_positions=block_positions,
            supervised=supervised,
            labels=labels.flatten()[supervised],
            offsets=offsets,
            weights=self.loss_weights[offsets],
            chunks=chunks_of(offsets, plan.loss_chunk),
        )


def chunks_of(offsets: Tensor, size: int) -> tuple[int, ...]:
    """Boundaries, from 0, of the fewest chunks of at most `size` rows that cut no block.

    Args:
        offsets: [M] int64 on the host, k of each row, from 1 in each block.
        size: at least the longest block.
    """
    ends = [*(offsets == 1).nonzero().flatten().tolist()[1:], len(offsets)]
    bounds = [0]
    while bounds[-1] < len(offsets):
        bounds.append(ends[bisect.bisect_right(ends, bounds[-1] + size) - 1])
    return tuple(bounds)


def row_at(place: int, rows: int, seed: int) -> int:
    """The row at a place in the endless stream of permutations of `rows` rows."""
    epoch, within = divmod(place, rows)
    return _permutation(rows, seed, epoch)[within]


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(rows, generator=_generator(seed, "rows", epoch)).tolist()


def _generator(*parts: int | str) -> torch.Generator:
    """A generator of its own for each purpose and number; a hash, since close seeds of one generator are related."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
