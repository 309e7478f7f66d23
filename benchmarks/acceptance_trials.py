"""The processes of acceptance.py: what trains a drafter by the clock, and what measures how much of it is accepted.

    python acceptance_trials.py STEP OUTPUT [--variant NAME] [--shard I OF] [--started TIME] --deadline TIME

Steps: `texts` (what the target itself writes after the prompts of evaluation), `first` (one training step, from the
start of the process), `train`, `replay` and `generate` (acceptance), `speed`. Each reads `settings.json` of OUTPUT,
writes its results as it gets them, stops at the deadline (seconds since 1970), and goes on from there if run again.
"""

import argparse
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import peers
import torch
import torch.nn.functional as F
import trainers
from torch import Tensor

from draftflow.compile_cache.guard import Guard
from draftflow.dataset.regenerate import generate as continue_prompts
from draftflow.drafter import checkpoint as native
from draftflow.drafter.anchors import Anchors, block_inputs
from draftflow.drafter.attention import forbid_dense
from draftflow.drafter.generate import generate, greedy
from draftflow.drafter.loss import Objective, default_gamma
from draftflow.drafter.mask import layer_masks
from draftflow.drafter.model import EAGER, Drafter
from draftflow.drafter.shape import DrafterShape
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage, say, write_json
from draftflow.target.features import FeatureExtractor
from draftflow.target.load import Target, load_target
from draftflow.training.data import TRAIN, Batch, Batches, Rows, read_rows, rows_of_one_token
from draftflow.training.features import Colocated
from draftflow.training.optimizer import Hyperparameters
from draftflow.training.plan import CUDA_TILE, Plan, plan_of_run
from draftflow.training.process import extractor_of, make_process, peak_memory_bytes
from draftflow.training.step import read_statistics

WARM_UP, TIMED = 3, 10  # steps on other data before the clock starts; of the timed ones the length of the run is judged
MOST_WARM_UP = 100  # steps over which the learning rate rises, if 4 % of the run are more
ROWS_AT_ONCE = 8  # texts that replay looks at together
SPEED_PROMPTS = 8


@dataclass(frozen=True)
class Variant:
    """A trainer and what is particular about it: `draftflow,loss=kl,lr=1e-3`.

    Attributes:
        text: as it was given.
        trainer: `draftflow` or `specforge`.
        loss, optimizer, precision: of ours.
        learning_rate: at its highest.
        warmup: steps over which it rises; None is 4 % of the run, 100 at most.
        steps: over which it falls; None is as many as the run is expected to have.
        until: seconds of training after which it ends; None is the last at which weights are kept.
    """

    text: str
    trainer: Literal["draftflow", "specforge"]
    loss: Literal["decay", "dpace", "kl"] = "decay"
    optimizer: Literal["adamw", "muon"] = "adamw"
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    learning_rate: float = trainers.LEARNING_RATE
    warmup: int | None = None
    steps: int | None = None
    until: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """The variant that `text` describes.

        Raises:
            DraftflowError: there is no such trainer or setting.
        """
        trainer, *parts = text.split(",")
        try:
            given = dict(part.split("=") for part in parts)
            found = cls(
                text,
                cast(Any, trainer),
                cast(Any, given.pop("loss", "decay")),
                cast(Any, given.pop("optimizer", "adamw")),
                cast(Any, given.pop("precision", "auto")),
                float(given.pop("lr", trainers.LEARNING_RATE)),
                int(given.pop("warmup")) if "warmup" in given else None,
                int(given.pop("steps")) if "steps" in given else None,
                float(given.pop("until")) if "until" in given else None,
            )
        except ValueError:
            found, given = None, {"": ""}
        known = found is not None and (
            found.loss in ("decay", "dpace", "kl")
            and found.optimizer in ("adamw", "muon")
            and found.precision in ("auto", "fp32", "bf16", "fp8")
            if trainer == "draftflow"
            else trainer == "specforge" and (found.loss, found.optimizer, found.precision) == ("decay", "adamw", "auto")
        )
        if given or found is None or not known:
            raise DraftflowError(
                f"{text!r} is not a trainer and its settings.",
                "Write draftflow or specforge, and after commas lr=, warmup=, steps=, until=; of draftflow also "
                "loss=decay|dpace|kl, optimizer=adamw|muon and precision=auto|fp32|bf16|fp8.",
                "--variant",
            )
        return found

    def marks(self, at: Sequence[float]) -> list[float]:
        """Those of the seconds `at` that its run reaches.

        Raises:
            DraftflowError: none of them.
        """
        found = [mark for mark in at if self.until is None or mark <= self.until]
        if not found:
            raise DraftflowError(
                f"{self.text!r} ends before weights are kept for the first time.",
                f"Let it train until {at[0]:g} s or longer, or name an earlier --at.",
                "--variant",
            )
        return found

    def schedule(self, expected_steps: int) -> tuple[int, int]:
        """Steps of the run and those of them over which the learning rate rises."""
        steps = self.steps or expected_steps
        warmup = min(MOST_WARM_UP, round(0.04 * steps)) if self.warmup is None else self.warmup
        return steps, max(1, min(warmup, steps - 1))


@dataclass(frozen=True)
class Job:
    """What all steps are given."""

    output: Path
    settings: dict[str, Any]
    deadline: float

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def target(self) -> Path:
        return Path(self.settings["target"])

    def run_folder(self, variant: str) -> Path:
        return self.output / "runs" / variant

    def plan(self, variant: Variant) -> tuple[DrafterShape, Plan]:
        kind = self.device.type
        settings = {**self.settings["step"], "loss": variant.loss, "optimizer": variant.optimizer}
        settings["precision"] = variant.precision
        return plan_of_run(settings, self.target, cast(Any, kind), 1)

    def late(self) -> bool:
        return time.time() > self.deadline


def wait(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Worker(ABC):
    """A trainer at work on the rows of the dataset, one step after another."""

    shape: DrafterShape
    batches: Batches

    @abstractmethod
    def warm_up(self, batches: Batches, kept: bool = False) -> None:
        """One step on other data; `kept`: with features that were computed before, if the trainer keeps any."""

    @property
    def kept_share(self) -> float:
        """Share of the rows of a second epoch whose features were kept."""
        return 0.0

    @abstractmethod
    def begin(self, steps: int, warmup: int) -> None:
        """Start from the first weights, with the learning rates of a run of so many steps."""

    @abstractmethod
    def step(self, number: int) -> None:
        """Step `number` of the run, from 0."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Of the drafter, by native names."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a run is continued from."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave, after `begin`."""

    def held_out_loss(self) -> float | None:
        """Of its own kind, on all rows that are held out, in its precision; None if the trainer does not say."""
        return None

    def facts(self) -> dict[str, Any]:
        """What else there is to say at the end of a run."""
        return {}


class Draftflow(Worker):
    """Ours, as a training process makes it: features that were computed once are kept."""

    def __init__(self, job: Job, variant: Variant, rows: tuple[Rows, Rows]):
        self.guard = Guard("warn", warm=False)
        self.shape, plan = job.plan(variant)
        hyper = Hyperparameters(
            trainers.STEPS,
            Objective(variant.loss, default_gamma(plan.block_size)),
            variant.learning_rate,
            clip_norm=trainers.CLIP_NORM,
            optimizer=variant.optimizer,
            seed=job.settings["seed"],
        )
        self.process = make_process(self.shape, plan, hyper, rows, job.target, job.settings["feature_cache_gb"])
        self.batches, self.device = self.process.batches, self.process.device
        if job.settings["eager"]:
            self.process.step.drafter._run = EAGER
        # of other data, as the usual one keeps those of the dataset
        keeping = (plan, {TRAIN: plan.rows}, job.settings["feature_cache_gb"], self.device)
        self.other_source = Colocated(self.process.source.extractor, *keeping)
        none = (plan, {TRAIN: 0}, 0.0, self.device)
        self.forgetful_source = Colocated(self.process.source.extractor, *none)
        optimizer = self.process.step.optimizer
        self.first = {"weights": _copies(optimizer.weights()), "state": _copies(optimizer.state())}

    def warm_up(self, batches: Batches, kept: bool = False) -> None:
        step, batch = self.process.step, batches.train(0).to(self.device)
        source, step.source = step.source, self.other_source if kept else self.forgetful_source
        step.train(batch, 0)
        step.source = source

    @property
    def kept_share(self) -> float:
        return self.process.source.capacity / len(self.batches.train_rows)

    def begin(self, steps: int, warmup: int) -> None:
        optimizer = self.process.step.optimizer
        self.load(self.first)
        optimizer.hyper = replace(optimizer.hyper, steps=steps, warmup=warmup / steps)
        self.held_out_loss()  # compiles
        self.guard.seal()

    def step(self, number: int) -> None:
        last = self.process.step.optimizer.hyper.steps - 1
        self.process.step.train(self.batches.train(number).to(self.device), min(number, last))

    def weights(self) -> dict[str, Tensor]:
        return self.process.step.optimizer.weights()

    def state(self) -> dict[str, Any]:
        optimizer = self.process.step.optimizer
        return {"weights": optimizer.weights(), "state": optimizer.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.process.step.optimizer.load_weights(state["weights"])
        self.process.step.optimizer.load(state["state"])

    def held_out_loss(self) -> float:
        step = self.process.step
        # which keeps none, so that no row of the dataset goes for it
        source, step.source = step.source, self.forgetful_source
        loss, _ = read_statistics(step.evaluate(self.batches.held_out()))
        step.source = source
        return loss

    def facts(self) -> dict[str, Any]:
        source = self.process.source
        return {"guard": self.guard.counts(), "feature_cache": {"hits": source.hits, "misses": source.misses}}


class SpecForge(Worker):
    """SpecForge's model, loss and optimizer in a plain loop; the target computes features in every step."""

    def __init__(self, job: Job, variant: Variant, rows: tuple[Rows, Rows]):
        self.shape, plan = job.plan(variant)
        self.rows, self.device, self.learning_rate = rows, job.device, variant.learning_rate
        gamma, seed = default_gamma(plan.block_size), job.settings["seed"]
        drafter = Drafter(self.shape, torch.Generator().manual_seed(seed))
        target = load_target(job.target, self.device, job.dtype)
        self.both = peers.load(Path(job.settings["peers"]))
        case = trainers.Case(
            self.shape, plan, drafter.state_dict(), target, gamma, self.device, self.both, given_anchors=True
        )
        self.trainer = trainers.SpecForge(case)
        self.trainer.restore()
        self.batches = Batches(plan, *rows, gamma, seed, rank=0, world_size=1)
        extract = extractor_of(target, plan, self.device, compiled=not job.settings["eager"])
        self.source = Colocated(extract, plan, {TRAIN: len(rows[0])}, 0.0, self.device)
        self._set_schedule(trainers.STEPS, MOST_WARM_UP)

    def warm_up(self, batches: Batches, kept: bool = False) -> None:
        self._train(batches.train(0), batches.train_rows)

    def begin(self, steps: int, warmup: int) -> None:
        self.trainer.restore()
        self._set_schedule(steps, warmup)

    def _set_schedule(self, steps: int, warmup: int) -> None:
        self.last = steps - 1
        self.trainer.optimizer = self.both[0].BF16Optimizer(
            self.trainer.module,
            lr=self.learning_rate,
            max_grad_norm=trainers.CLIP_NORM,
            total_steps=steps,
            warmup_ratio=(warmup + 0.5) / steps,  # it rounds down
        )

    def step(self, number: int) -> None:
        if number > self.last:  # after its end the schedule would rise again
            for group in self.trainer.optimizer.optimizer.param_groups:
                group["lr"] = 0.0
        self._train(self.batches.train(number), self.rows[0])

    def _train(self, batch: Batch, rows: Rows) -> None:
        mask = rows.loss_mask[list(batch.indices)].to(self.device, non_blocking=True)
        batch = batch.to(self.device)
        none = batch.weights.new_zeros(0)
        facts = (batch.input_ids, batch.document_ids, batch.position_ids, mask, batch.anchors, none, none, none)
        self.trainer.train(trainers.Sample(*facts, batch), "unchunked", self.source)

    def weights(self) -> dict[str, Tensor]:
        return self.trainer.module.state_dict()

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights(), "optimizer": self.trainer.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.trainer.module.load_state_dict(state["weights"])
        # its own `load_state_dict` needs a process group, to print
        optimizer, saved = self.trainer.optimizer, state["optimizer"]
        optimizer.optimizer.load_state_dict(saved["optimizer_state_dict"])
        optimizer.scheduler.load_state_dict(saved["scheduler_state_dict"])
        with torch.no_grad():
            for parameter, value in zip(optimizer.fp32_params, saved["fp32_params"], strict=True):
                parameter.copy_(value)


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def make_worker(job: Job, variant: Variant) -> Worker:
    rows = read_rows(job.output / "rows.safetensors", job.settings["step"]["row_length"])
    return (Draftflow if variant.trainer == "draftflow" else SpecForge)(job, variant, rows)


def other_data(job: Job, worker: Worker) -> Batches:
    """Batches of the same shapes that hold nothing of the dataset."""
    plan = worker.batches.plan
    rows = rows_of_one_token(plan, plan.rows)
    return Batches(plan, rows, rows, default_gamma(plan.block_size), job.settings["seed"], rank=0, world_size=1)


def first_step(job: Job, variant: Variant, started: float) -> None:
    """How long it takes from the start of a process to the end of its first step."""
    worker = make_worker(job, variant)
    worker.warm_up(other_data(job, worker))
    wait(job.device)
    write_json(job.run_folder(variant.text) / "first.json", {"seconds": round(time.time() - started, 2)})


def _step_seconds(job: Job, worker: Worker, other: Batches, kept: bool) -> float:
    """How long a step takes, of which none on the dataset."""
    for _ in range(WARM_UP):
        worker.warm_up(other, kept)
    start = wait(job.device)
    for _ in range(TIMED):
        worker.warm_up(other, kept)
    return (wait(job.device) - start) / TIMED


def expected_steps(seconds: float, epoch: int, first: float, again: float, kept: float) -> int:
    """Steps that a run of so many seconds has.

    Args:
        seconds: of training.
        epoch: steps in which each row is visited once.
        first: seconds of a step of the first epoch, which computes features.
        again: seconds of one whose features were kept.
        kept: share of the rows whose features are kept.
    """
    if seconds <= epoch * first:
        return round(seconds / first)
    return round(epoch + (seconds - epoch * first) / (kept * again + (1 - kept) * first))


def train(job: Job, variant: Variant, started: float) -> None:
    """Train by the clock, and keep weights and loss of the given seconds; the clock stands meanwhile."""
    folder, marks = job.run_folder(variant.text), variant.marks(job.settings["at"])
    worker = make_worker(job, variant)
    other = other_data(job, worker)
    worker.warm_up(other)
    wait(job.device)
    warm = round(time.time() - started, 2)
    first, again = (_step_seconds(job, worker, other, kept) for kept in (False, True))
    epoch = -(-len(worker.batches.train_rows) // worker.batches.plan.rows)
    expected = expected_steps(marks[-1], epoch, first, again, worker.kept_share)
    saved, before_that = folder / "state.pt", None
    if saved.is_file():
        before_that = torch.load(saved, map_location=job.device, weights_only=False)
        run = before_that["run"]
    else:
        steps, warmup = variant.schedule(max(2, expected))
        run = {"variant": variant.text, "steps": steps, "warmup": warmup, "marks": [], "sittings": 0}
        run |= {"done": 0, "seconds": 0.0, "first_step_seconds": warm}
        run |= {"warm_up_step_ms": {"first": round(first * 1e3, 2), "again": round(again * 1e3, 2)}}
    worker.begin(run["steps"], run["warmup"])
    if before_that is not None:
        worker.load(before_that["worker"])
    run["sittings"] += 1
    before, number, start = run["seconds"], run["done"], wait(job.device)
    # dense attention would be no measure of a trainer
    with forbid_dense():
        for mark in (mark for mark in marks if mark not in [entry["mark"] for entry in run["marks"]]):
            while (seconds := before + time.perf_counter() - start) < mark and not job.late():
                worker.step(number)
                number += 1
            run["seconds"] = before = before + wait(job.device) - start
            run["done"] = number
            if seconds >= mark:
                keep(worker, folder / f"at-{mark:g}")
                entry = {"mark": mark, "seconds": round(before, 2), "steps": number}
                run["marks"].append({**entry, "held_out_loss": worker.held_out_loss()})
                say(f"{variant.text}: {number} steps in {before:.1f} s")
            run |= {"memory": peak_memory_bytes(job.device), **worker.facts()}
            torch.save({"run": run, "worker": worker.state()}, saved.with_name(".state.pt"))
            saved.with_name(".state.pt").replace(saved)
            write_json(folder / "run.json", run)
            if seconds < mark:
                say(f"{variant.text}: the time is over after {before:.1f} s of training")
                return
            start = wait(job.device)
    saved.unlink(missing_ok=True)


def keep(worker: Worker, folder: Path) -> None:
    """Write the weights in the native format, in bf16."""
    drafter = Drafter(worker.shape)
    drafter.load_state_dict({name: value.detach().float().cpu() for name, value in worker.weights().items()})
    native.export(drafter, folder, torch.bfloat16)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_texts(job: Job) -> None:
    """Add to the prompts of evaluation what the target writes after them, greedily."""
    target = load_target(job.target, job.device, job.dtype)
    texts = json.loads((job.output / "prompts.json").read_text(encoding="utf-8"))
    settings = {"max_new_tokens": job.settings["new_tokens"], "temperature": 0.0, "top_p": 1.0, "seed": 0}
    order, size = sorted(range(len(texts)), key=lambda index: len(texts[index]["prompt_ids"])), job.settings["batch"]
    for first in range(0, len(order), size):
        part = [texts[index] for index in order[first : first + size]]
        written = continue_prompts(target, [text["prompt_ids"] for text in part], [""] * len(part), settings)
        for text, new in zip(part, written, strict=True):
            text["new"] = new
    write_json(job.output / "texts.json", texts)


@dataclass(frozen=True)
class Replayed:
    """What speculative decoding does with one text.

    Attributes:
        lengths: acceptance length of each block.
        proposed, accepted: by position in the block, as `drafter.generate` counts them.
    """

    lengths: list[int]
    proposed: list[int]
    accepted: list[int]


def walk(new: Sequence[int], drafts: Sequence[Sequence[int]], positions: int, limit: int) -> Replayed:
    """Speculative decoding of a text that is known already, since greedy decoding gives it whatever is drafted.

    Args:
        new: the target's tokens after the prompt; the first comes with the prefill.
        drafts: for each of them but the last, the proposals of a block that is anchored there.
        positions: proposals of a block.
        limit: most new tokens; a text that has fewer was ended by its last token.
    """
    lengths: list[int] = []
    proposed, accepted = [0] * positions, [0] * positions
    at = 0
    while at < len(new) - 1:
        known = new[at + 1 :]
        room = min(positions, limit - 1 - at)  # a block is no longer than what is asked for
        matches = 0
        while matches < min(room, len(known)) and drafts[at][matches] == known[matches]:
            matches += 1
        length = min(matches + 1, len(known))
        for position in range(length if length <= matches else room):
            proposed[position] += 1
            accepted[position] += position < matches
        lengths.append(length)
        at += length
    return Replayed(lengths, proposed, accepted)


@torch.inference_mode(False)
@torch.no_grad()
def draft_everywhere(
    drafter: Drafter, target: Target, extractor: Callable[..., Tensor], texts: Sequence[dict[str, Any]], size: int
) -> list[list[list[int]]]:
    """Proposals of a block anchored at each new token but the last: for each text, [new tokens - 1][block size - 1].

    Args:
        texts: `prompt_ids` and `new` of each.
        size: most new tokens of any of them.
    """
    device, block = target.embed_weight.device, drafter.shape.block_size
    longest = max(len(text["prompt_ids"]) + size for text in texts)
    length = -(-longest // CUDA_TILE) * CUDA_TILE
    found = []
    for first in range(0, len(texts), ROWS_AT_ONCE):
        part = list(texts[first : first + ROWS_AT_ONCE])
        rows = part + part[-1:] * (ROWS_AT_ONCE - len(part))  # one shape for all
        ids = torch.zeros(ROWS_AT_ONCE, length, dtype=torch.int64)
        documents = torch.full_like(ids, -1)
        anchors = Anchors(
            torch.zeros(ROWS_AT_ONCE, size, dtype=torch.int64), torch.zeros(ROWS_AT_ONCE, size, dtype=torch.bool)
        )
        for row, text in enumerate(rows):
            tokens, start = [*text["prompt_ids"], *text["new"]], len(text["prompt_ids"])
            ids[row, : len(tokens)], documents[row, : len(tokens)] = torch.tensor(tokens), 0
            count = len(text["new"]) - 1
            anchors.positions[row, :count], anchors.valid[row, :count] = torch.arange(start, start + count), True
        positions = torch.arange(length).expand_as(ids).contiguous()
        inputs = (*block_inputs(ids, positions, anchors, block), ids, documents, positions)
        tokens_in, block_positions, ids, documents, positions = (value.to(device) for value in inputs)
        anchors = anchors.to(device)
        features = extractor(ids, documents, positions)
        masks = layer_masks(anchors, documents, drafter.shape, features.dtype)
        embeddings = F.embedding(tokens_in, target.embed_weight), target.embed_weight[drafter.shape.mask_token_id]
        hidden = drafter(features, *embeddings, positions, block_positions, *masks).unflatten(1, (size, block - 1))
        chosen = F.linear(hidden, target.head_weight).argmax(dim=-1).tolist()
        found += [chosen[row][: len(text["new"]) - 1] for row, text in enumerate(part)]
    return found


def snapshots(job: Job) -> list[tuple[str, float, Path]]:
    """Variant, mark and folder of all weights that were kept, those of one time together."""
    found = []
    for variant in job.settings["variants"]:
        run = _read(job.run_folder(variant) / "run.json") or {"marks": []}
        marks = [entry["mark"] for entry in run["marks"]]
        found += [(variant, mark, job.run_folder(variant) / f"at-{mark:g}") for mark in marks]
    return sorted(found, key=lambda entry: entry[1])


def result(texts: Sequence[dict[str, Any]], outcomes: Sequence[Replayed]) -> dict[str, Any]:
    """Acceptance lengths and counts by position, for each set of prompts."""
    found: dict[str, Any] = {}
    for text, outcome in zip(texts, outcomes, strict=True):
        part = found.setdefault(text["set"], {"lengths": [], "proposed": [], "accepted": []})
        part["lengths"].append(outcome.lengths)
        for name, counts in (("proposed", outcome.proposed), ("accepted", outcome.accepted)):
            part[name] = [sum(pair) for pair in zip(part[name] or [0] * len(counts), counts, strict=True)]
    return found


def replay(job: Job) -> None:
    """Acceptance of all snapshots on all prompts, from the target's own texts."""
    texts = [text for text in json.loads((job.output / "texts.json").read_text(encoding="utf-8")) if text["new"]]
    target = load_target(job.target, job.device, job.dtype)
    drafter = None
    for variant, mark, folder in snapshots(job):
        output = job.output / "replay" / variant / f"{mark:g}.json"
        if output.is_file():
            continue
        if job.late():
            return
        loaded = native.load(folder, job.device, job.dtype)
        if drafter is None:  # one, so that it is compiled once
            drafter = loaded
            extractor = FeatureExtractor(target, drafter.shape.target_layer_ids)
            if not job.settings["eager"]:
                drafter.compile_layers()
        drafter.load_state_dict(loaded.state_dict())
        with forbid_dense():
            drafts = draft_everywhere(drafter, target, extractor, texts, job.settings["new_tokens"])
        sizes = (drafter.shape.block_size - 1, job.settings["new_tokens"])
        outcomes = [walk(text["new"], of, *sizes) for text, of in zip(texts, drafts, strict=True)]
        write_json(output, result(texts, outcomes))
        say(f"replayed {variant} after {mark:g} s")


def reference() -> Any:
    """The module with z-lab's generator: PyPI's `dflash`, from the environment or the folder of the peers.

    Raises:
        DraftflowError: it is in neither.
    """
    try:
        import dflash.model
    except ImportError as error:
        raise DraftflowError(
            f"PyPI's dflash cannot be imported ({error}).",
            "Put it into the folder of the peers: `uv pip install --no-deps --target PEERS/site dflash==0.1.0`.",
        ) from None
    return dflash.model


def lend_peers(job: Job) -> None:
    """Make what lies in the folder of the peers importable, after what the environment has."""
    if job.settings["peers"] is not None:
        sys.path.append(str(Path(job.settings["peers"]) / "site"))


def use_generator(job: Job, folder: Path) -> Callable[[Target, list[int]], tuple[list[int], list[int]]]:
    """z-lab's generator with the weights of a folder: prompt -> new tokens, acceptance length of each block."""
    module = reference()
    if job.device.type == "cpu":
        module._cuda_time = time.perf_counter
    model = module.DFlashDraftModel.from_pretrained(folder, dtype=job.dtype, local_files_only=True)
    model = model.to(job.device).eval()

    @torch.inference_mode()
    def run(target: Target, prompt: list[int]) -> tuple[list[int], list[int]]:
        given = torch.tensor([prompt], device=job.device)
        arguments = (given, job.settings["new_tokens"], target.eos_token_ids)
        found = module.dflash_generate(model, target.model, *arguments, return_stats=True)
        return found.output_ids[0, len(prompt) :].tolist(), found.acceptance_lengths

    return run


def generate_all(job: Job, shard: int, shards: int) -> None:
    """Acceptance of the chosen snapshots by z-lab's generator, on every `shards`-th prompt from `shard` on."""
    texts = json.loads((job.output / "texts.json").read_text(encoding="utf-8"))[shard::shards]
    target = None
    for variant, mark, folder in snapshots(job):
        output = job.output / "generated" / variant / f"{mark:g}" / f"{shard}-of-{shards}.json"
        if output.is_file() or mark not in job.settings["generate_at"]:
            continue
        target = target or load_target(job.target, job.device, job.dtype)
        run = use_generator(job, folder)
        outcomes = []
        for text in texts:
            if job.late():
                return
            outcomes.append(Replayed(run(target, text["prompt_ids"])[1], [], []))
        write_json(output, result(texts, outcomes))
        say(f"generated with {variant} after {mark:g} s, part {shard + 1} of {shards}")


def speed(job: Job) -> None:
    """Tokens per second of z-lab's generator, of ours and of plain greedy decoding, and whether the first two agree."""
    texts = json.loads((job.output / "texts.json").read_text(encoding="utf-8"))[:SPEED_PROMPTS]
    target = load_target(job.target, job.device, job.dtype)
    new_tokens, stops = job.settings["new_tokens"], target.eos_token_ids
    chosen = job.settings["generate_at"]
    last = {variant: (mark, folder) for variant, mark, folder in snapshots(job) if mark in chosen}
    for variant, (mark, folder) in last.items():
        output = job.output / "speed" / f"{variant}.json"
        if (_read(output) or {}).get("mark") == mark:
            continue
        if job.late():
            return
        theirs, drafter = use_generator(job, folder), native.load(folder, job.device, job.dtype)

        def ours(target: Target, prompt: list[int], drafter: Drafter = drafter) -> tuple[list[int], list[int]]:
            found = generate(drafter, target, prompt, new_tokens, stops)
            return found.tokens, found.acceptance_lengths

        ways: dict[str, Callable[[Target, list[int]], tuple[list[int], list[int]]]] = {
            "dflash": theirs,
            "draftflow": ours,
            "greedy": lambda target, prompt: (greedy(target, prompt, new_tokens, stops), []),
        }
        found: dict[str, Any] = {"mark": mark}
        outcomes: dict[str, list[tuple[list[int], list[int]]]] = {}
        for name, way in ways.items():
            way(target, texts[0]["prompt_ids"])
            start = wait(job.device)
            outcomes[name] = [way(target, text["prompt_ids"]) for text in texts]
            seconds = wait(job.device) - start
            found[name] = {
                "tokens_per_second": round(sum(len(tokens) for tokens, _ in outcomes[name]) / seconds, 1),
                "lengths": [lengths for _, lengths in outcomes[name]],
            }
        pairs = list(zip(outcomes["dflash"], outcomes["draftflow"], strict=True))
        found["prompts"] = len(texts)
        found["equal"] = sum(one == other for one, other in pairs)
        write_json(output, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["texts", "first", "train", "replay", "generate", "speed"])
    parser.add_argument("output", type=Path)
    parser.add_argument("--variant", default="draftflow")
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--started", type=float, default=0.0)
    parser.add_argument("--deadline", type=float, required=True)
    arguments = parser.parse_args()
    settings = json.loads((arguments.output / "settings.json").read_text(encoding="utf-8"))
    job = Job(arguments.output, settings, arguments.deadline)
    if job.device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    lend_peers(job)
    started = arguments.started or time.time()
    if arguments.step in ("first", "train"):
        {"first": first_step, "train": train}[arguments.step](job, Variant.parse(arguments.variant), started)
    elif arguments.step == "generate":
        generate_all(job, *arguments.shard)
    else:
        {"texts": write_texts, "replay": replay, "speed": speed}[arguments.step](job)


if __name__ == "__main__":
    run_stage(main)
