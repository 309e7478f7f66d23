"""Where a step's context features come from. A source is called with a batch and yields [B, S, taps * H].

With the loss `kl`, the output of the target's last layer, [B, S, H], lies behind those that are tapped.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from draftflow.training.data import Batch
from draftflow.training.memory import step_bound
from draftflow.training.plan import Plan

# Tokens that the target works on at a time: as few as keep the device busy.
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 4096}
# Share of a GPU's free memory that features may be kept in.
MOST_OF_GPU = 0.25


def rows_at_once(plan: Plan) -> int:
    """Rows that the target works on at a time."""
    return max(1, min(plan.rows, TOKENS_AT_ONCE[plan.device_kind] // plan.row_length))


def row_shape(plan: Plan) -> tuple[int, int]:
    """Shape of the features of a row, [S, taps * H]."""
    return plan.row_length, len(plan.feature_layers) * plan.drafter["hidden_size"]


def fits_beside_step(plan: Plan, size: int, free: int) -> bool:
    """Whether features of `size` bytes leave a GPU room for the step, which is not yet there when `free` are free."""
    return size <= min(MOST_OF_GPU * free, free - step_bound(plan, 0)["total"])


Extractor = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Features of token ids, document ids (on the host) and positions, each [B, S]; they stand until the next call."""


class Source(Protocol):
    """Called with the batches of a run, one after the other, each once."""

    def __call__(self, batch: Batch) -> Tensor:
        """Features of a batch on the device, [B, S, taps * H], without gradient."""

    @property
    def hits(self) -> int:
        """Rows that were remembered."""

    @property
    def misses(self) -> int:
        """Rows that were computed."""


class Given:
    """Zeros in place of features, for warm-up of a step whose features come from other processes."""

    hits = misses = 0

    def __init__(self, plan: Plan, device: torch.device):
        self._zeros = torch.zeros(plan.rows, *row_shape(plan), dtype=getattr(torch, plan.precision), device=device)

    def __call__(self, batch: Batch) -> Tensor:
        return self._zeros.clone()


class Colocated:
    """Features from a target on the device that trains; those of rows that are visited again are kept.

    Rows are remembered, exactly as computed, in the order of their first visit until the memory is full, and none is
    forgotten: since every epoch visits each row once, any row is as likely as another to come next. The target works on
    groups of a fixed number of rows, whatever is remembered, since another shape may round differently.

    Args:
        extractor: `target.features.FeatureExtractor` on `device`, or one that is replayed.
        plan: shapes.
        rows: number of rows of each split.
        limit_gb: memory for features, in 10^9 bytes: of a GPU where there is room beside the step, or else of the host.
        device: where features are wanted.

    Attributes:
        hits, misses: rows that were remembered, and rows that were computed.
        capacity: rows that can be remembered.
    """

    def __init__(
        self,
        extractor: Extractor,
        plan: Plan,
        rows: Mapping[str, int],
        limit_gb: float,
        device: torch.device,
    ):
        self.extractor, self.device = extractor, device
        self.hits = self.misses = 0
        self._group = rows_at_once(plan)
        self._dtype = getattr(torch, plan.precision)
        self._row = row_shape(plan)
        row_bytes = self._row[0] * self._row[1] * self._dtype.itemsize
        self.capacity = min(sum(rows.values()), int(limit_gb * 1e9) // row_bytes)
        # One allocation: pinning memory is slow, and pages of ordinary memory are not taken before they are written.
        size = self.capacity * row_bytes
        if device.type == "cuda" and fits_beside_step(plan, size, torch.cuda.mem_get_info(device)[0]):
            self._kept = torch.empty(self.capacity, *self._row, dtype=self._dtype, device=device)
        else:
            self._kept = torch.empty(self.capacity, *self._row, dtype=self._dtype, pin_memory=device.type == "cuda")
        self._place: dict[tuple[str, int], int] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """Features of a batch on the device, [B, S, taps * H], without gradient."""
        places = [self._place.get((batch.split, index)) for index in batch.indices]
        known = {row: place for row, place in enumerate(places) if place is not None}
        new = [row for row, place in enumerate(places) if place is None]
        self.hits += len(known)
        self.misses += len(new)
        if not new and self._kept.device.type == self.device.type == "cuda":
            return self._kept.index_select(0, self._on_device(list(known.values())))
        features = torch.empty(len(batch.indices), *self._row, dtype=self._dtype, device=self.device)
        for row, place in known.items():
            features[row].copy_(self._kept[place], non_blocking=True)
        for start in range(0, len(new), self._group):
            self._compute(batch, new[start : start + self._group], features)
        return features

    def _on_device(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)

    def _compute(self, batch: Batch, rows: list[int], features: Tensor) -> None:
        """Write the features of some rows of the batch to their places in `features`, and keep them."""
        filled = rows + rows[-1:] * (self._group - len(rows))
        pick = self._on_device(filled)
        computed = self.extractor(batch.input_ids[pick], batch.host_document_ids[filled], batch.position_ids[pick])
        for row, values in zip(rows, computed, strict=False):
            features[row].copy_(values)
            key = (batch.split, batch.indices[row])
            if key not in self._place and len(self._place) < len(self._kept):
                self._place[key] = len(self._place)
                self._kept[self._place[key]].copy_(values, non_blocking=True)
