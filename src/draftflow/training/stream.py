"""Split topology: target ranks stream features to drafter ranks, in an order that is known beforehand.

Ranks 0 .. D - 1 train, ranks D .. D + T - 1 run the target. A drafter asks for the same batches in the same order as it
would compute them itself; those of drafter d in step n come from target (n D + d) mod T. Between the two go

    drafter -> target   ticket     there is room for one more batch, or: there will be no more
    target -> drafter   header     which rows come, and what the target has to say
                        features   [B, S, taps * H]

A target computes a batch once it holds the ticket for it. So memory is bounded: `depth` batches on a drafter beside the
one in use, two on a target; and whoever is faster waits. Nobody waits in a circle, since what is waited for always
belongs to an earlier step, or to the same step of an earlier drafter.

Tickets and headers go through gloo, so that a rank whose peer is gone learns of it. So do features on CPUs, and where a
GPU has both roles: NCCL takes one rank per GPU. Elsewhere NCCL brings them, beside the step.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftflow.training.data import HELD_OUT, TRAIN, Batch, Batches
from draftflow.training.features import Source, row_shape
from draftflow.training.metrics import Clock
from draftflow.training.plan import Plan

TICKET, HEADER, FEATURES = 1, 2, 3  # tags, which NCCL does not look at
MORE, NO_MORE = 1, 0

# Measurements that a clock holds before it is read, for which the device is waited for.
READ_EVERY = 1000


@dataclass(frozen=True)
class Schedule:
    """Which batches are asked for, in which order, and who computes them: the same on every rank.

    Attributes:
        drafters, targets: number of ranks of each role (D, T).
        depth: batches that a drafter has room for beside the one in use.
        first, steps: the first step of these processes (from 0), and the number of steps of the run.
        evaluate_every: steps between evaluations; there is one before the first step and one after the last.
        held_out: batches of an evaluation, on each drafter.
    """

    drafters: int
    targets: int
    depth: int
    first: int
    steps: int
    evaluate_every: int
    held_out: int

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """The split, and the number of the step or of the held-out batch, as `loop.Loop` goes through them."""
        evaluation = [(HELD_OUT, number) for number in range(self.held_out)]
        yield from evaluation
        for step in range(self.first, self.steps):
            yield TRAIN, step
            if (step + 1) % self.evaluate_every == 0 or step + 1 == self.steps:
                yield from evaluation

    def target(self, number: int, drafter: int) -> int:
        """The rank that computes batch `number` of either split for a drafter."""
        return self.drafters + (number * self.drafters + drafter) % self.targets

    @property
    def target_ranks(self) -> range:
        """The ranks that run the target."""
        return range(self.drafters, self.drafters + self.targets)

    @property
    def settling(self) -> int:
        """Batches at the beginning whose waiting does not count: before the first step is done, code is loaded."""
        return self.held_out + self.depth + 1


class Waiting:
    """How long a device waited for the other role. A GPU's own time counts: its host runs ahead of it."""

    def __init__(self, device: torch.device):
        self._clock, self._counted, self._milliseconds = Clock(device), 0, 0.0

    @contextmanager
    def __call__(self, counts: bool) -> Iterator[None]:
        """The enclosed block waits; whether that `counts`."""
        self._clock.mark("work")
        yield
        self._clock.mark("waiting" if counts else "settling")
        self._counted += 1
        if self._counted % READ_EVERY == 0:
            self.seconds()

    def seconds(self) -> float:
        """Seconds of waiting so far; waits for the device."""
        self._milliseconds += sum(time for part, time in self._clock.read() if part == "waiting")
        return self._milliseconds / 1e3


def connect(schedule: Schedule, rank: int, wire: torch.device) -> None:
    """Send a first message between this rank and every rank of the other role.

    NCCL makes a connection at the first message, for which both ranks wait: in the same order everywhere, or for ever.
    """
    for target in schedule.target_ranks:
        for drafter in range(schedule.drafters):
            if rank == target:
                dist.send(torch.zeros(1, device=wire), drafter, tag=FEATURES)
            elif rank == drafter:
                dist.recv(torch.zeros(1, device=wire), target, tag=FEATURES)


@dataclass(frozen=True)
class _Coming:
    """A batch that a drafter has asked for: who computes it, where it will lie, and the messages that bring it."""

    target: int
    header: Tensor
    features: Tensor
    works: tuple[Any, ...]


class Streamed:
    """Features from target ranks, for a drafter rank: the source of a `Step` in place of `features.Colocated`.

    Args:
        schedule: of the run; `connect` was called.
        rank: of this drafter.
        plan: shapes.
        device: where features are wanted.
        wire: where they arrive: `device`, or the host.
        stop: called when a target was asked to stop.

    Attributes:
        hits, misses: rows that all targets remembered, and rows that they computed, as far as they told.
        waiting: for features.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        plan: Plan,
        device: torch.device,
        wire: torch.device,
        stop: Callable[[], None],
    ):
        self.schedule, self.rank, self.device, self.stop = schedule, rank, device, stop
        self.waiting = Waiting(device)
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._order, self._taken = iter(schedule), 0
        self._told: dict[int, tuple[int, int]] = {}
        self._coming: deque[_Coming] = deque()
        shape, dtype = (plan.rows, *row_shape(plan)), getattr(torch, plan.precision)
        for _ in range(schedule.depth):
            self._ask(torch.empty(shape, dtype=dtype, device=wire, pin_memory=device.type != wire.type))

    @property
    def hits(self) -> int:
        return sum(hits for hits, _ in self._told.values())

    @property
    def misses(self) -> int:
        return sum(misses for _, misses in self._told.values())

    def __call__(self, batch: Batch) -> Tensor:
        """Features of a batch on the device, [B, S, taps * H], without gradient; batches come in the schedule's order.

        Raises:
            RuntimeError: another batch is next, or a target is gone.
        """
        coming = self._coming.popleft()
        with self.waiting(self._taken >= self.schedule.settling):
            _wait(coming.works)
        self._taken += 1
        asked, hits, misses, held_out, *indices = coming.header.tolist()
        came = (HELD_OUT if held_out else TRAIN, tuple(indices))
        if came != (batch.split, batch.indices):
            raise RuntimeError(f"features of {came} came where those of {batch.split, batch.indices} are wanted")
        self._told[coming.target] = hits, misses
        if asked:
            self.stop()
        features = self._copied(coming.features)
        self._ask(coming.features)
        return features

    def close(self) -> None:
        """Take what was asked for, and tell all targets that this was the last; all drafters do so after one step."""
        while self._coming:
            _wait(self._coming.popleft().works)
        _wait([dist.isend(torch.tensor(NO_MORE), rank, tag=TICKET) for rank in self.schedule.target_ranks])
        _finish(self.device)

    def _copied(self, arrived: Tensor) -> Tensor:
        """A copy on the device, so that there is room for the next batch while this one is in use."""
        if self._beside is None or arrived.is_cuda:
            return arrived.clone()
        with torch.cuda.stream(self._beside):
            features = arrived.to(self.device)  # the host waits for this copy, not for the step before it
        features.record_stream(torch.cuda.current_stream())
        return features

    def _ask(self, room: Tensor) -> None:
        """Send the ticket for the batch after those that were asked for, if there is one, and be ready for it."""
        wanted = next(self._order, None)
        if wanted is None:
            return
        target = self.schedule.target(wanted[1], self.rank)
        header = torch.empty(4 + len(room), dtype=torch.int64)
        works = (
            dist.isend(torch.tensor(MORE), target, tag=TICKET),
            dist.irecv(header, target, tag=HEADER),
            self._receive(room, target),
        )
        self._coming.append(_Coming(target, header, room, works))

    def _receive(self, room: Tensor, target: int) -> Any:
        if self._beside is None or not room.is_cuda:
            return dist.irecv(room, target, tag=FEATURES)
        self._beside.wait_stream(torch.cuda.current_stream())  # what lay there has been copied
        with torch.cuda.stream(self._beside):
            return dist.irecv(room, target, tag=FEATURES)


def serve(
    schedule: Schedule,
    rank: int,
    source: Source,
    batches: Sequence[Batches],
    device: torch.device,
    wire: torch.device,
    asked: Callable[[], bool],
    after_batch: Callable[[int], None],
) -> float:
    """What a target rank does: compute and send, batch after batch, until there are no more tickets.

    Args:
        schedule: of the run; `connect` was called.
        rank: of this target.
        source: computes features on `device`.
        batches: of each drafter.
        device: where the target runs.
        wire: where features are sent from: `device`, or the host.
        asked: whether this process was asked to stop; the drafters are told, and decide after which step.
        after_batch: called after each batch, with how many there were.

    Returns:
        Seconds that the device waited for room on a drafter.

    Raises:
        RuntimeError: a drafter is gone.
    """
    held_out = [part.held_out() for part in batches]
    waiting, sending, ended = Waiting(device), deque[list[Any]](), set[int]()
    for served, (place, drafter, split, number) in enumerate(_pieces(schedule, rank)):
        with waiting(place >= schedule.settling):
            if _ticket(drafter) == NO_MORE:
                ended.add(drafter)
                break
            if len(sending) > 1:
                _wait(sending.popleft())
        batch = held_out[drafter][number] if split == HELD_OUT else batches[drafter].train(number)
        features = source(batch.to(device)).to(wire)  # the host waits for them if they go through it
        facts = [int(asked()), source.hits, source.misses, int(split == HELD_OUT), *batch.indices]
        header = dist.isend(torch.tensor(facts), drafter, tag=HEADER)
        sending.append([header, dist.isend(features, drafter, tag=FEATURES)])
        after_batch(served + 1)
    for works in sending:
        _wait(works)
    for drafter in set(range(schedule.drafters)) - ended:
        _ticket(drafter)  # that there will be no more: what there was has been served
    _finish(device)
    return waiting.seconds()


def _pieces(schedule: Schedule, rank: int) -> Iterator[tuple[int, int, str, int]]:
    """What a target rank computes: place in the schedule, drafter, split, number."""
    for place, (split, number) in enumerate(schedule):
        for drafter in range(schedule.drafters):
            if schedule.target(number, drafter) == rank:
                yield place, drafter, split, number


def _ticket(drafter: int) -> int:
    ticket = torch.empty((), dtype=torch.int64)
    dist.recv(ticket, drafter, tag=TICKET)
    return int(ticket)


def _wait(works: Sequence[Any]) -> None:
    """Wait for messages; for those of NCCL, the device does."""
    for work in works:
        work.wait()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
