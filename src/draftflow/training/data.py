"""Packed rows into batches: which rows a step takes, where its draft blocks start, what they shall predict.

All of it happens on the host, where the loss mask is known: the numbers of supervised positions are host integers, and
nothing waits for the device. What a step sees depends on the seed and the number of the step alone, never on the number
of devices or on what happened before, so a run that resumes, on any number of devices, continues as if never stopped.

A batch is made by operations on whole arrays, in one piece of memory that one copy takes to the device. On one thread
of a CPU, 32 rows of 2048 tokens with 256 blocks of 16 take 7 ms, one row of 3072 with 512 blocks 0.8 ms.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from draftflow.drafter.anchors import Anchors, sample_anchors
from draftflow.drafter.loss import loss_weights
from draftflow.errors import DraftflowError
from draftflow.training.plan import Plan

TRAIN, HELD_OUT = "train", "held_out"
ALIGNMENT = 64  # bytes, of a tensor's begin


@dataclass(frozen=True)
class Rows:
    """The packed rows of one split, [R, S] each, on the host.

    Attributes:
        split: `train` or `held_out`.
        input_ids, document_ids, position_ids: int32; document -1 is padding, positions restart at 0 per document.
        loss_mask: uint8, 1 for the tokens that the target wrote.
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

    They stay where they are: the file is mapped, so that the processes of a machine share one copy.

    Raises:
        DraftflowError: a split is empty, or rows are not of `row_length` tokens.
    """
    splits = []
    with safe_open(path, "pt") as file:
        for split in (TRAIN, HELD_OUT):
            tensors = {name: file.get_tensor(f"{split}.{name}") for name in _TENSORS}
            for tensor in tensors.values():
                tensor.sum()  # reads it, so that no step waits for the disk
            splits.append(Rows(split, **tensors))
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
        input_ids=torch.zeros(shape, dtype=torch.int32),
        document_ids=torch.zeros(shape, dtype=torch.int32),
        position_ids=torch.arange(plan.row_length, dtype=torch.int32).expand(shape),
        loss_mask=torch.ones(shape, dtype=torch.uint8),
    )


_TENSORS = ("input_ids", "document_ids", "position_ids", "loss_mask")


@dataclass(frozen=True)
class Batch:
    """What one device works on in one step: B rows of S tokens, N blocks a row, M supervised block positions.

    Attributes:
        split, indices: which rows these are; their features are remembered under it.
        input_ids, document_ids, position_ids: [B, S] int64.
        anchors: of N slots per row.
        anchor_tokens: [B, N] int64.
        block_positions: [B, N * Bk] int64.
        supervised: [M] int64, rows of the flattened proposals [B * N * (Bk - 1)] that the loss looks at, ascending.
        labels: [M] int64, the token at that place.
        offsets: [M] int64, k: the place within the block, from 1.
        weights: [M] float32, w_k.
        host_document_ids: document_ids, on the host wherever the rest is: the target's attention is planned from it.
        chunks: 0 .. M, ascending: bounds of parts of the M positions that hold whole blocks each, as many as fit into
            `plan.loss_chunk` (or one, if that is longer).
    """

    split: str
    indices: tuple[int, ...]
    input_ids: Tensor
    document_ids: Tensor
    position_ids: Tensor
    anchors: Anchors
    anchor_tokens: Tensor
    block_positions: Tensor
    supervised: Tensor
    labels: Tensor
    offsets: Tensor
    weights: Tensor
    host_document_ids: Tensor
    chunks: tuple[int, ...]

    def to(self, device: torch.device) -> "Batch":
        """This batch on `device`; a copy to a GPU leaves from pinned memory and is not waited for."""
        if self.input_ids.device.type == device.type:
            return self
        memories: dict[int, Tensor] = {}

        def moved(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in memories:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                if device.type == "cuda" and not memory.is_pinned():
                    memory = memory.pin_memory()
                memories[storage.data_ptr()] = memory.to(device, non_blocking=True)
            first = tensor.storage_offset() * tensor.itemsize
            part = memories[storage.data_ptr()][first : first + tensor.nbytes]
            return part.view(tensor.dtype).view(tensor.shape)

        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "host_document_ids"}
        tensors = {name: moved(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, anchors=Anchors(*map(moved, self.anchors)), **tensors)


class Batches:
    """Batches of a run, by number of the step.

    Args:
        plan: shapes.
        train, held_out: the rows.
        gamma: decay of the loss weights.
        seed: of the order of the rows and of the anchors.
        rank, world_size: which of how many devices this is.
        anchors_per_document: most anchors of one document, or None.
    """

    def __init__(
        self,
        plan: Plan,
        train: Rows,
        held_out: Rows,
        gamma: float,
        seed: int,
        rank: int,
        world_size: int,
        anchors_per_document: int | None = None,
    ):
        self.plan, self.train_rows, self.held_out_rows = plan, train, held_out
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.anchors_per_document = anchors_per_document
        self.loss_weights = loss_weights(plan.block_size, gamma).numpy()

    def train(self, step: int) -> Batch:
        """The batch of this device in `step` (from 0): its contiguous share of the rows of the step.

        Rows follow one another in an endless stream of permutations, one for each epoch; anchors are drawn for a
        place in the stream, so that a row has other blocks in each epoch.
        """
        first = (step * self.world_size + self.rank) * self.plan.rows
        stream = range(first, first + self.plan.rows)
        indices = tuple(row_at(place, len(self.train_rows), self.seed) for place in stream)
        generators = [_generator(self.seed, "anchors", place) for place in stream]
        return self._batch(self.train_rows, indices, generators, pin=self.plan.device_kind == "cuda")

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

    def _batch(
        self,
        rows: Rows,
        indices: tuple[int, ...],
        generators: Sequence[torch.Generator | None],
        pin: bool = False,
    ) -> Batch:
        plan, pick = self.plan, np.array(indices)
        ids, documents, positions, mask = (getattr(rows, name).numpy()[pick] for name in _TENSORS)
        anchors = sample_anchors(mask, documents, plan.anchors, generators, self.anchors_per_document)
        at = anchors.positions.numpy() + np.arange(len(pick))[:, None] * plan.row_length  # [B, N], into all rows
        reach = np.minimum(_supervised_after(mask, documents, at), plan.block_size - 1) * anchors.valid.numpy()
        counts = reach.ravel()  # of block j, the positions k = 1 .. counts[j] are supervised
        total = int(counts.sum())

        shapes = dict.fromkeys(("input_ids", "document_ids", "position_ids"), ids.shape)
        shapes["block_positions"] = (*at.shape, plan.block_size)
        shapes |= dict.fromkeys(("supervised", "labels", "offsets", "weights"), (total,))
        shapes |= dict.fromkeys(("anchors", "valid", "anchor_tokens"), at.shape)
        tensors = _together(shapes, {"weights": torch.float32, "valid": torch.bool}, pin)
        to = {name: tensor.numpy() for name, tensor in tensors.items()}
        to["input_ids"][:], to["document_ids"][:], to["position_ids"][:] = ids, documents, positions
        to["anchors"][:], to["valid"][:] = anchors.positions, anchors.valid
        to["anchor_tokens"][:] = ids.ravel()[at]
        np.add(positions.ravel()[at][:, :, None], np.arange(plan.block_size), out=to["block_positions"])
        block = np.repeat(np.arange(counts.size), counts)  # of each supervised position
        before = np.cumsum(counts) - counts
        np.subtract(np.arange(1, total + 1), before[block], out=to["offsets"])
        np.add(block * (plan.block_size - 1), to["offsets"] - 1, out=to["supervised"])
        to["labels"][:] = ids.ravel()[at.ravel()[block] + to["offsets"]]
        np.take(self.loss_weights, to["offsets"], out=to["weights"])
        return Batch(
            split=rows.split,
            indices=indices,
            anchors=Anchors(tensors.pop("anchors"), tensors.pop("valid")),
            block_positions=tensors.pop("block_positions").flatten(1),
            host_document_ids=tensors["document_ids"],
            chunks=_chunks(np.cumsum(counts).tolist(), plan.loss_chunk),
            **tensors,
        )


def _supervised_after(mask: np.ndarray, documents: np.ndarray, at: np.ndarray) -> np.ndarray:
    """How many tokens behind each of the places `at` are supervised, of its document, and not interrupted.

    Args:
        mask, documents: [B, S].
        at: into the rows laid end to end.
    """
    stops = np.ones(mask.shape, bool)  # tokens at which a block that comes from the left ends
    stops[:, 1:] = (mask[:, 1:] == 0) | (documents[:, 1:] != documents[:, :-1])
    ends = stops.ravel()
    next_stop = np.append(np.flatnonzero(ends), ends.size)[np.cumsum(ends)]  # behind each token
    return next_stop[at] - at - 1


def _chunks(ends: list[int], most: int) -> tuple[int, ...]:
    """Bounds of the fewest runs of whole blocks with at most `most` positions, but at least one block, each.

    Args:
        ends: ascending; block j holds the positions from ends[j - 1] to ends[j] - 1.
    """
    bounds = [0]
    while bounds[-1] < ends[-1]:
        full = bisect_right(ends, bounds[-1] + most) - 1  # the last block that fits
        longest = bisect_right(ends, bounds[-1])  # the next block
        bounds.append(ends[max(full, longest)])
    return tuple(bounds)


def _together(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], pin: bool) -> dict[str, Tensor]:
    """Tensors, not yet filled, in one piece of memory, so that one copy moves them all; int64 unless said otherwise."""
    sizes = [math.prod(shape) * dtypes.get(name, torch.int64).itemsize for name, shape in shapes.items()]
    ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    memory = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pin)
    return {
        name: memory[start : start + size].view(dtypes.get(name, torch.int64)).view(shape)
        for (name, shape), size, start in zip(shapes.items(), sizes, [0, *ends], strict=False)
    }


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
