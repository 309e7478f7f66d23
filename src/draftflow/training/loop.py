"""The loop over steps: batches in, statistics out, and what is due every so many steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftflow.compile_cache.guard import Guard
from draftflow.stage import say
from draftflow.training import checkpoint
from draftflow.training.metrics import Clock, Metrics, split_steps
from draftflow.training.optimizer import Hyperparameters
from draftflow.training.process import Process, peak_memory_bytes
from draftflow.training.step import read_statistics

LOG_EVERY = 10


@dataclass
class Stop:
    """Asked for by a signal; `requested` agrees on it among the ranks of `group`, so that all stop after the same step.

    `group` is None for all ranks.
    """

    asked: bool = False
    group: dist.ProcessGroup | None = None

    def __call__(self, *signal: Any) -> None:
        self.asked = True

    def requested(self) -> bool:
        """Whether any of them was asked to stop. All call this after every step; no device waits for it."""
        if not dist.is_initialized():
            return self.asked
        flag = torch.tensor(int(self.asked))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)  # on the host, through gloo
        return bool(flag)


@dataclass
class Loop:
    """A training run of one process.

    Args:
        process: what works.
        hyper: what decides the numbers.
        guard: checked after every step.
        stop: asked after every step.
        evaluate_every, checkpoint_every: steps between evaluations and checkpoints; both happen at the end as well.
        checkpoints: folder of this run's checkpoints.
        facts: what every checkpoint's state shall hold.
        earlier_guards: what the guards of this run counted before it was stopped.
        metrics: on rank 0; the other ranks have none.
        on_first_step: called when everything that is compiled has been loaded.

    Attributes:
        step: optimizer steps done.
        history: statistics that no line of metrics holds yet, one vector a step, on the device.
    """

    process: Process
    hyper: Hyperparameters
    guard: Guard
    stop: Stop
    evaluate_every: int
    checkpoint_every: int
    checkpoints: Path
    facts: dict[str, Any]
    earlier_guards: list[dict[str, Any]] = field(default_factory=list)
    metrics: Metrics | None = None
    on_first_step: Callable[[], None] = lambda: None
    step: int = 0
    history: list[Tensor] = field(default_factory=list)
    first_step_at: float | None = None

    def __post_init__(self) -> None:
        self.clock = Clock(self.process.device)
        self.process.step.mark = self.clock.mark
        self.held_out = self.process.batches.held_out()

    def resume(self, found: checkpoint.Checkpoint) -> None:
        """Continue from a checkpoint, as if never stopped."""
        trainer = found.trainer()
        self.process.step.optimizer.load_weights(found.weights())
        optimizer = {name: tensor for name, tensor in trainer.items() if not name.startswith("rng.")}
        pending = optimizer.pop("pending")
        self.process.step.optimizer.load(optimizer)
        self.history = list(pending.to(self.process.device))
        torch.set_rng_state(trainer["rng.cpu"])
        if self.process.device.type == "cuda" and "rng.cuda" in trainer:
            torch.cuda.set_rng_state(trainer["rng.cuda"])
        self.step = found.step

    def run(self) -> bool:
        """Train to the end; True if it was reached, False if a stop was asked for. A checkpoint is there either way."""
        self._evaluate(write=self.step == 0)
        while self.step < self.hyper.steps:
            batch = self.process.batches.train(self.step).to(self.process.device)
            self.clock.mark("data")
            self.history.append(self.process.step.train(batch, self.step))
            self.step += 1
            if self.first_step_at is None:
                self._wait()
                self.first_step_at = time.time()
                self.guard.seal()
                self.on_first_step()
                self.guard.check(files=True)
            self.guard.check()
            last, stop = self.step == self.hyper.steps, self.stop.requested()
            if self.step % LOG_EVERY == 0 or self.step == 1 or last:
                self._report()
            if self.step % self.evaluate_every == 0 or last:
                self._evaluate()
            if self.step % self.checkpoint_every == 0 or last or stop:
                self._checkpoint()
            if stop and not last:
                return False
        return True

    def _report(self) -> None:
        """Write a line of metrics over the last steps; between steps, only this waits for the device."""
        parts = self.clock.read()
        history, self.history = torch.stack(self.history).cpu(), []
        if self.metrics is not None:
            loss, accuracy = read_statistics(history[:, :-1].sum(dim=0))
            milliseconds, steps = split_steps(parts)
            mean = sum(steps) / max(len(steps), 1)
            plan = self.process.step.plan
            tokens = plan.rows * self.process.batches.world_size * plan.row_length
            facts = {
                "loss": loss,
                "accuracy": accuracy,
                "learning_rate": self.hyper.learning_rate_at(self.step - 1),
                "gradient_norm": history[-1, -1].item(),
                "step_ms": round(mean, 2),
                "ms": milliseconds,
                "tokens_per_second": round(tokens / mean * 1e3) if mean else 0,
            }
            self.metrics.training(self.step, facts, steps)
        self.clock.mark("report")

    def _evaluate(self, write: bool = True) -> None:
        statistics = self.process.step.evaluate(self.held_out)
        if write:
            loss, accuracy = read_statistics(statistics)
            if self.metrics is not None:
                self.metrics.evaluation(self.step, loss, accuracy)

    def _checkpoint(self) -> None:
        guards = self._guards()
        if self.metrics is not None:  # rank 0
            optimizer = self.process.step.optimizer
            width = self.process.step.statistics + 1
            trainer = {
                **optimizer.state(),
                "pending": torch.stack(self.history) if self.history else torch.zeros(0, width),
                "rng.cpu": torch.get_rng_state(),
            }
            if self.process.device.type == "cuda":
                trainer["rng.cuda"] = torch.cuda.get_rng_state()
            path = checkpoint.write(
                self.checkpoints,
                self.step,
                optimizer.weights(),
                trainer,
                self.metrics.text(),
                {**self.facts, "run": self.summary(guards)},
            )
            say(f"step {self.step}/{self.hyper.steps}: checkpoint {path}")
        self.clock.mark("checkpoint")

    def _guards(self) -> list[dict[str, Any]]:
        """What the guards of all ranks that train counted, on every one of them."""
        if not dist.is_initialized():
            return [self.guard.counts()]
        found: list[Any] = [None] * dist.get_world_size(self.stop.group)
        dist.all_gather_object(found, self.guard.counts(), group=self.stop.group)
        return found

    def summary(self, guards: list[dict[str, Any]]) -> dict[str, Any]:
        """What this process did, for the record of the run; beside it what the guards counted, by rank."""
        source = self.process.source
        return {
            "median_step_ms": self.metrics.median_step_ms() if self.metrics else None,
            "peak_memory_bytes": peak_memory_bytes(self.process.device),
            "guard": [*self.earlier_guards, *guards],
            "feature_cache": {"hits": source.hits, "misses": source.misses},
        }

    def _wait(self) -> None:
        if self.process.device.type == "cuda":
            torch.cuda.synchronize()
