"""Measures what step_time.py shows: steps of all trainers on equal rows, in one process, on the device that torch sees.

Each case (a shape, a block size, a row, a number of anchors) is measured twice over. First every trainer alone on the
device: its first call, its peak memory, and steps with its optimizer, whose state would not fit beside that of the
others. Then forward and backward of all in turn, A B C A B C, so that a clock that drifts drifts for all of them.

A figure comes from bursts: the device is idle, one step is not looked at, so that the host is ahead, then come the
steps between two events.
"""

import argparse
import contextlib
import gc
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from typing import Any

import peers
import torch
import transformers
from targets import SHAPES, random_target
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from trainers import TRAINERS, Case, Sample, Trainer, make_samples
from useful import attention_product, block_products

from draftflow.compile_cache.inductor import prepare_inductor
from draftflow.drafter.attention import forbid_dense
from draftflow.drafter.loss import default_gamma
from draftflow.drafter.model import Drafter
from draftflow.drafter.shape import DrafterShape
from draftflow.errors import DraftflowError
from draftflow.stage import say, write_json
from draftflow.training.data import Batch, Rows, rows_of_one_token
from draftflow.training.features import Colocated
from draftflow.training.plan import Plan, make_plan
from draftflow.training.process import extractor_of

SWEEP_ANCHORS = (64, 128, 256, 512, 1024)
SWEEP_ROWS = (1024, 2048, 4096, 8192)
SAMPLES = 4  # draws of anchors that a measurement goes through
# Seconds that no trainer alone may take from those that run beside it, and the share of all that they are at most
KEPT_FOR_THE_REST, KEPT_SHARE = 60.0, 0.3
MATRIX = {"cuda": 8192, "cpu": 512}
# What the host waits in, as torch's profiler names it.
SYNCS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "aten::item",
)
KERNELS = 60


OUT_OF_TIME = "out of time"


class OutOfTimeError(Exception):
    """The time that was granted is over."""


@dataclass
class Budget:
    """Seconds for everything, and what did not happen within them."""

    seconds: float
    skipped: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.start + self.seconds - time.monotonic()

    @property
    def for_the_rest(self) -> float:
        """What no trainer alone may take."""
        return min(KEPT_FOR_THE_REST, KEPT_SHARE * self.seconds)

    def attempt(self, what: str, work: Callable[[], None], keep: float = 0.0) -> str | None:
        """Do `work`, at most until `keep` seconds before the end; returns why it failed, None if it did not."""
        if self.left() - keep <= 0:
            self.skipped.append(what)
            return OUT_OF_TIME
        reason = None
        before = signal.signal(signal.SIGALRM, _ring)
        signal.setitimer(signal.ITIMER_REAL, self.left() - keep, 10.0)  # again, where the first is lost
        try:
            work()
        except Exception as error:  # whatever it is, the other trainers go on
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if reason is None:
            return None
        release_memory()
        if self.left() - keep <= 0:
            self.skipped.append(what)
            return OUT_OF_TIME
        say(f"{what}: {reason}")
        return reason


def forget_hidden_states(decoder: nn.Module) -> None:
    """Take away the hooks that transformers leaves on a model once it was asked for hidden states.

    A compiled layer cannot hold them.
    """
    for module in decoder.modules():
        module._forward_hooks.clear()
    decoder._output_capturing_hooks_installed = False  # type: ignore[assignment]


def release_memory() -> None:
    """Give the device what nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        # of a stream that a graph was recorded on the product's workspace stays, and would count as the next one's
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        torch.cuda.empty_cache()


def _ring(*_: Any) -> None:
    raise OutOfTimeError


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        rounds: figures of each kind.
        burst: steps that one figure is the mean of.
        warm_up: steps before the first figure.
        target_layers: of the random targets.
        trainers: names of those that take part.
        given_anchors: as of `Case`.
        compiled: as of `Case`.
    """

    rounds: int = 8
    burst: int = 3
    warm_up: int = 3
    target_layers: int = 8
    trainers: Sequence[str] = tuple(kind.name for kind in TRAINERS)
    given_anchors: bool = False
    compiled: bool = True


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def burst(work: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Milliseconds of one call of `work`, over `steps` calls in a row."""
    synchronize(device)
    work()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            work()
        return (time.perf_counter() - start) / steps * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(steps):
        work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / steps


def ceiling(device: torch.device) -> float:
    """FLOP/s of a large square matrix product: bf16 on GPUs, fp32 on CPUs; random numbers, which cost more power."""
    size = MATRIX[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [burst(lambda: a @ b, 10, device) for _ in range(5)]
    return 2 * size**3 / (statistics.median(times) * 1e-3)


def visible_keys(sample: Sample, block_size: int) -> int:
    """Pairs of a query and a key that it sees, over all blocks: the context before the anchor, and its own block."""
    context = sample.position_ids.gather(1, sample.anchors.positions)[sample.anchors.valid]
    return int((block_size * (context + block_size)).sum())


def useful_flops(shape: DrafterShape, plan: Plan, visible: int, supervised: int) -> dict[str, float]:
    """Operations that a step cannot do without, by part; a multiplication and an addition are two.

    A product of a weight counts once forward and twice backward, for the weight's gradient and the input's. Features
    need no gradient, so `fc` counts once backward; the head is frozen, so it counts once backward too, and forward
    over the supervised rows alone. Of attention only what is visible counts: two products forward, four backward. What
    the first and the last layer can do without is in `useful.py`. Norms, rotations and softmax are not counted.

    Args:
        visible: of `visible_keys`.
        supervised: block positions that the loss looks at.
    """
    hidden, keys = shape.hidden_size, shape.kv_heads * shape.head_dim
    context = plan.rows * plan.row_length
    return {
        "body": 3 * block_products(shape, plan.rows, plan.anchors),
        "fc": 2 * 2.0 * context * len(shape.target_layer_ids) * hidden * hidden,
        "context": 3 * 2.0 * context * shape.layers * 2 * hidden * keys,
        "attention": 6 * attention_product(shape, visible),
        "head": 2 * 2.0 * supervised * hidden * shape.vocab_size,
    }


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors; one that is named twice counts once."""
    return sum({value.data_ptr(): value.numel() * value.element_size() for value in tensors}.values())


def name_of(kind: type[Trainer], setting: str) -> str:
    """A trainer in one of its settings, as the results name it."""
    return ", ".join(part for part in (kind.name, setting) if part)


@dataclass
class Contestant:
    """A trainer in one of its settings."""

    trainer: Trainer
    setting: str
    samples: Sequence[Sample]
    calls: int = 0

    @property
    def name(self) -> str:
        return name_of(type(self.trainer), self.setting)

    def forward_backward(self) -> Tensor:
        return self.trainer.forward_backward(self._next(), self.setting)

    def train(self, source: Callable[[Batch], Tensor] | None = None) -> None:
        self.trainer.train(self._next(), self.setting, source)

    def _next(self) -> Sample:
        self.calls += 1
        return self.samples[self.calls % len(self.samples)]


class Shape:
    """A target, a drafter's weights and rows of one of `SHAPES`, for all of its cases."""

    def __init__(self, name: str, options: Options, device: torch.device, both: Any):
        self.name, self.options, self.device, self.both = name, options, device, both
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.target = random_target(name, options.target_layers, device, self.dtype)
        torch.manual_seed(0)
        with torch.device(device):
            drafter = Drafter(self.drafter_shape(8))
        self.weights = {key: value.to("cpu", self.dtype) for key, value in drafter.state_dict().items()}

    def drafter_shape(self, block_size: int) -> DrafterShape:
        settings = {"layers": 5, "block_size": block_size, "taps": 5, "target_layers": None, "mask_token": "auto"}
        return DrafterShape.from_target(self.target.description, settings)

    def row(self) -> dict[str, int]:
        """The usual row of the shape: `row_length`, `rows_per_step` and `anchors_per_row`."""
        sizes = SHAPES[self.name]
        return {**sizes["step"], **sizes.get("one_row", {})}

    def case(self, block_size: int, row: Mapping[str, int]) -> Case:
        shape = self.drafter_shape(block_size)
        plan = make_plan(asdict(shape), {**row, "precision": "auto"}, self.device.type, 1)
        gamma = default_gamma(block_size)
        facts = (shape, plan, self.weights, self.target, gamma, self.device, self.both)
        return Case(*facts, given_anchors=self.options.given_anchors, compiled=self.options.compiled)

    def samples(self, case: Case) -> tuple[Rows, list[Sample]]:
        """One document fills the row, and all of it is supervised: no trainer has an advantage from its packing."""
        plan, generator = case.plan, torch.Generator().manual_seed(0)
        rows = rows_of_one_token(plan, plan.rows)
        rows.input_ids.copy_(torch.randint(3, case.shape.vocab_size - 1, rows.input_ids.shape, generator=generator))
        size = (plan.rows, plan.row_length, case.shape.hidden_size)
        last_hidden = torch.randn(size, generator=generator).to(case.device, case.dtype)
        features = torch.randn(*size[:2], size[2] * len(case.shape.target_layer_ids), generator=generator)
        return rows, make_samples(case, rows, features.to(case.device, case.dtype), last_hidden, SAMPLES)


class Measurement:
    """One case under measurement; `facts` is what there is to say of it so far."""

    def __init__(self, shape: Shape, block_size: int, row: Mapping[str, int], budget: Budget):
        self.shape, self.budget, self.options, self.device = shape, budget, shape.options, shape.device
        self.case = shape.case(block_size, row)
        self.rows, self.samples = shape.samples(self.case)
        plan = self.case.plan
        supervised = statistics.mean(len(sample.batch.supervised) for sample in self.samples)
        visible = statistics.mean(visible_keys(sample, block_size) for sample in self.samples)
        self.facts: dict[str, Any] = {
            "shape": shape.name,
            "block_size": block_size,
            "row_length": plan.row_length,
            "rows": plan.rows,
            "anchors": plan.anchors,
            "supervised": round(supervised),
            "target_layers": self.options.target_layers,
            "flops": useful_flops(self.case.shape, plan, round(visible), round(supervised)),
            # what the loss on the target's distribution needs more: the head at the target's hidden states
            "kl_flops": 2.0 * round(supervised) * self.case.shape.hidden_size * self.case.shape.vocab_size,
            "trainers": {},
        }
        self.what = f"{shape.name}, block {block_size}, row {plan.row_length}, {plan.anchors} anchors"
        # each case compiles anew: with static shapes for a trainer that would go over to dynamic ones
        torch._dynamo.reset()

    def run(self, optimizer: bool = True, only: Sequence[str] | None = None) -> None:
        """Measure all contestants, or those named in `only`: alone, then in turn."""
        contestants: list[Contestant] = []
        for kind in TRAINERS:
            settings = [name for name in kind.settings_on(self.device) if only is None or name_of(kind, name) in only]
            if kind.name in self.options.trainers and settings:
                contestants += self._alone(kind, settings, optimizer)
        reason = self._in_turn(contestants)
        if reason not in (None, OUT_OF_TIME):
            self.facts["in_turn_error"] = reason
            for contestant in contestants:  # one after the other is better than nothing
                self.facts["trainers"][contestant.name].pop("ms", None)
                self._in_turn([contestant])

    def measure_target(self) -> None:
        """The target's forward: ours, and transformers' own with all hidden states."""
        source, sample = self.source(self.case.plan), self.samples[0]
        decoder = self.shape.target.model.get_decoder()

        @torch.no_grad()
        def plain() -> None:
            decoder(sample.input_ids, position_ids=sample.position_ids, output_hidden_states=True, use_cache=False)
            forget_hidden_states(decoder)

        found = self.facts["target"] = {}
        works: dict[str, Callable[[], Any]] = {"draftflow": lambda: source(sample.batch), "transformers": plain}
        for name, work in works.items():
            measure = partial(self._fill, found.setdefault(name, []), work)
            if reason := self.budget.attempt(f"{self.what}: target forward of {name}", measure):
                found[name] = reason

    def source(self, plan: Plan) -> Colocated:
        """Features as training computes them by a plan, none of them remembered."""
        extract = extractor_of(self.shape.target, plan, self.device, self.options.compiled)
        return Colocated(extract, plan, {self.rows.split: len(self.rows)}, 0.0, self.device)

    def profile(self, kind: type[Trainer], setting: str, method: str, found: dict[str, Any]) -> None:
        """Add to `found` the profile of a method of a contestant."""
        trainer = kind(self.case)
        trainer.restore()
        work = getattr(Contestant(trainer, setting, self.samples), method)
        found.update(profiled(work, self.options.burst, self.device))
        self._free(trainer)

    def _alone(self, kind: type[Trainer], settings: Sequence[str], optimizer: bool) -> list[Contestant]:
        """Figures of a trainer that is alone on the device; returns its settings that work."""
        made: list[Contestant] = []

        def build() -> None:
            trainer = kind(self.case)
            made.extend(Contestant(trainer, setting, self.samples) for setting in settings)
            trainer.restore()

        say(f"{self.what}: {kind.name}")
        built = self.budget.attempt(f"{self.what}: {kind.name}", build, self.budget.for_the_rest)
        if not made:
            self.facts["trainers"][kind.name] = {"error": built}
        works, reason = [], None
        for contestant in made:
            found = self._found(contestant)
            if error := built or self._attempt(contestant, self._first_calls, found):
                found["error"] = error
            else:
                works.append(contestant)
        for contestant in works if optimizer else []:
            found = self._found(contestant)
            reason = reason or self._attempt(contestant, self._with_optimizer, found)
            if reason:  # for another setting of this trainer there would be no room either
                found["optimizer_error"] = reason
        self._free(*(contestant.trainer for contestant in made[:1]))
        return works

    def _found(self, contestant: Contestant) -> dict[str, Any]:
        return self.facts["trainers"].setdefault(contestant.name, {})

    def _attempt(
        self, contestant: Contestant, measure: Callable[[Contestant, dict[str, Any]], None], found: dict[str, Any]
    ) -> str | None:
        what = f"{self.what}: {contestant.name}"
        return self.budget.attempt(what, lambda: measure(contestant, found), self.budget.for_the_rest)

    def _first_calls(self, contestant: Contestant, found: dict[str, Any]) -> None:
        start, hits = time.perf_counter(), counters["inductor"]["fxgraph_cache_hit"]
        loss = contestant.forward_backward()
        synchronize(self.device)
        found["loss"] = round(loss.item(), 4)
        found["first_call_s"] = round(time.perf_counter() - start, 3)
        found["first_call_hits"] = counters["inductor"]["fxgraph_cache_hit"] - hits
        for _ in range(self.options.warm_up):
            contestant.forward_backward()
        with self._peak(contestant, found, "peak_bytes"):
            contestant.forward_backward()

    def _with_optimizer(self, contestant: Contestant, found: dict[str, Any]) -> None:
        source = self.source(contestant.trainer.feature_plan(contestant.setting))
        for _ in range(self.options.warm_up):
            contestant.train()
        with self._peak(contestant, found, "train_peak_bytes"):
            contestant.train()
        self._fill(found.setdefault("train_ms", []), contestant.train)
        self._fill(found.setdefault("target_ms", []), lambda: contestant.train(source))

    def _in_turn(self, contestants: Sequence[Contestant]) -> str | None:
        """Forward and backward of all, A B C A B C, on a device that holds them all; returns why it failed."""
        trainers = list({id(contestant.trainer): contestant.trainer for contestant in contestants}.values())

        def measure() -> None:
            for trainer in trainers:
                trainer.restore()
            for contestant in contestants:
                contestant.forward_backward()
            for _ in range(self.options.rounds):
                for contestant in contestants:
                    times = self._found(contestant).setdefault("ms", [])
                    times.append(round(burst(contestant.forward_backward, self.options.burst, self.device), 3))

        names = ", ".join(contestant.name for contestant in contestants)
        reason = self.budget.attempt(f"{self.what}: in turn: {names}", measure)
        self._free(*trainers)
        return reason

    def _fill(self, times: list[float], work: Callable[[], Any]) -> None:
        for _ in range(self.options.rounds):
            times.append(round(burst(work, self.options.burst, self.device), 3))

    @contextlib.contextmanager
    def _peak(self, contestant: Contestant, found: dict[str, Any], name: str) -> Iterator[None]:
        """Peak memory as torch allocated it; of the target and of the sample only what the trainer reads is counted."""
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        sample = self.samples[0]
        there = [*self.shape.target.model.parameters(), sample.features, sample.last_hidden, sample.features_and_last]
        read = contestant.trainer.reads(sample, contestant.setting)
        found[name] = torch.cuda.max_memory_allocated() - storage_bytes(there) + storage_bytes(read)

    def _free(self, *trainers: Trainer) -> None:
        for trainer in trainers:
            trainer.release()
        release_memory()


def profiled(work: Callable[[], Any], steps: int, device: torch.device) -> dict[str, Any]:
    """What `steps` calls of `work` spend their time on, per call.

    Returns:
        wall_ms: between two events. kernel_ms: sum over the kernels (on a CPU, operators). kernels: the longest, each
        with `name`, `ms`, `count` and `share` of kernel_ms. syncs: how often the host waits for the device, by the
        name of the call.
    """
    work()
    wall = burst(work, steps, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as found:
        synchronize(device)
        with record_function("draftflow-measured"):
            for _ in range(steps):
                work()
        synchronize(device)
    events = found.events()
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    window = next(event.time_range for event in on_host if event.name == "draftflow-measured")
    inside = [event.name for event in on_host if window.start <= event.time_range.start <= window.end]
    rows = []
    for row in found.key_averages():
        on_device = row.device_type != DeviceType.CPU
        if row.is_user_annotation or on_device != (device.type == "cuda"):
            continue
        time_us = row.self_device_time_total if on_device else row.self_cpu_time_total
        rows.append({"name": row.key[:120], "ms": time_us / 1e3 / steps, "count": row.count / steps})
    rows.sort(key=lambda row: -row["ms"])
    total = sum(row["ms"] for row in rows)
    return {
        "wall_ms": round(wall, 3),
        "kernel_ms": round(total, 3),
        "kernels": [{**row, "ms": round(row["ms"], 4), "share": round(row["ms"] / total, 4)} for row in rows[:KERNELS]],
        "syncs": {name: inside.count(name) / steps for name in SYNCS},
    }


def profile_case(measurement: Measurement, results: dict[str, Any]) -> None:
    """Profiles of the trainers but speculators, forward and backward, and with the optimizer."""
    for kind in TRAINERS:
        if kind.name not in measurement.options.trainers or kind.name == "speculators":
            continue
        for setting in kind.settings_on(measurement.device):
            for method, what in (("forward_backward", "forward and backward"), ("train", "step")):
                found: dict[str, Any] = {}
                name = f"{measurement.what}: {name_of(kind, setting)}, {what}"
                measure = partial(measurement.profile, kind, setting, method, found)
                reason = measurement.budget.attempt(f"profile of {name}", measure)
                results[name] = {"error": reason} if reason else found


def sweep(shape: Shape, block_size: int, base: dict[str, Any], budget: Budget) -> Iterator[dict[str, Any]]:
    """Cases with other numbers of anchors and rows of other lengths, for ours and the best of the peers."""
    medians = {
        name: statistics.median(found["ms"]) for name, found in base["trainers"].items() if found.get("ms") is not None
    }
    others = [name for name in medians if not name.startswith("draftflow")]
    only = ["draftflow", *([min(others, key=medians.__getitem__)] if others else [])]
    row = shape.row()
    points = [{**row, "anchors_per_row": anchors} for anchors in SWEEP_ANCHORS]
    points += [{**row, "row_length": length} for length in SWEEP_ROWS]
    points = [point for point in points if point["anchors_per_row"] < point["row_length"] and point != row]
    for point in points:
        measurement = Measurement(shape, block_size, point, budget)
        measurement.run(optimizer=False, only=only)
        yield measurement.facts


def measure_shape(
    shape: Shape, arguments: argparse.Namespace, budget: Budget, results: dict[str, Any], save: Callable[[], None]
) -> None:
    """All cases of a shape, into `results`."""
    for block_size in arguments.block or (8, 16):
        measurement = Measurement(shape, block_size, shape.row(), budget)
        results["cases"].append(measurement.facts)
        measurement.run()
        save()
        measurement.measure_target()
        if arguments.profile:
            profile_case(measurement, results["profiles"])
        save()
        if arguments.sweep:
            for facts in sweep(shape, block_size, measurement.facts, budget):
                results["sweeps"].append(facts)
                save()


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure what the arguments of step_time.py ask for; the results so far are in `--output` at any time."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    options = Options(
        rounds=arguments.rounds,
        burst=arguments.burst,
        warm_up=arguments.warm_up,
        target_layers=arguments.target_layers,
        trainers=arguments.trainer or Options.trainers,
        given_anchors=arguments.given_anchors,
        compiled=not arguments.eager,
    )
    for kind, named, known in (("shape", arguments.shape, SHAPES), ("trainer", options.trainers, Options.trainers)):
        if not named or set(named) - set(known):
            raise DraftflowError(
                f"{', '.join(named) or 'Nothing'} is not what can be measured.",
                f"Choose from {', '.join(known)}.",
                f"--{kind}",
            )
    alone = set(options.trainers) == {"draftflow"}
    if not alone and arguments.peers is None:
        raise DraftflowError(
            "It is not said where the peers are.", "Name the folder that benchmarks/peers.py filled.", "--peers"
        )
    both = None if alone else peers.load(arguments.peers)
    prepare_inductor(device.type)
    budget = Budget(arguments.seconds)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": str(date.today()),
        "command": command,
        "ceiling_flops": [ceiling(device)],
        "cases": [],
        "sweeps": [],
        "profiles": {},
        "skipped": budget.skipped,
        "errors": [],
    }

    def save() -> None:
        results["seconds"] = round(time.monotonic() - budget.start)
        write_json(arguments.output, results)

    with forbid_dense():
        for name in arguments.shape:
            shapes: list[Shape] = []
            reason = budget.attempt(name, lambda: shapes.append(Shape(name, options, device, both)))  # noqa: B023
            if reason:
                results["errors"].append(f"{name}: {reason}")
            while shapes:
                measure_shape(shapes.pop(), arguments, budget, results, save)
            release_memory()
    results["ceiling_flops"].append(ceiling(device))
    save()
    return results
