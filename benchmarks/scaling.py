"""A model of the time per step on 1 to 512 GPUs, colocated and split; the tables of docs/scaling.md.

    uv run python benchmarks/scaling.py --write docs/scaling.md

Needs no GPU and no torch: it computes. What a single GPU takes is assumed until it was measured; --read takes it from
what benchmarks/step_time.py wrote, for the shapes that are in there:

    uv run python benchmarks/scaling.py --read step_time.json --write docs/scaling.md

Bandwidths and latencies are parameters: `--network NAME=GB/s,us` of a node, all of its cards together, and
`--nvlink GB/s,us` of a GPU, both as bus bandwidth of an all-reduce (`busbw` of nccl-tests).
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from documents import replace_between
from target_shapes import SHAPES
from useful import attention_product, block_products

from draftflow.drafter.shape import DrafterShape
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage
from draftflow.target.taps import tap_layers
from draftflow.training.memory import step_bound
from draftflow.training.plan import SUMMED_BYTES, Plan, drafter_parameters, make_plan, worth_capturing

BEGIN, END = "<!-- tables of benchmarks/scaling.py -->", "<!-- end of the tables -->"

MODELS = {"smollm2": "SmolLM2-135M", "qwen3-4b": "Qwen3-4B", "qwen3-8b": "Qwen3-8B", "qwen3-32b": "Qwen3-32B"}
GPUS = tuple(2**power for power in range(10))
DRAFTER = {"layers": 5, "taps": 5, "target_layers": None, "mask_token": "auto"}
FIXED_ROWS = 64  # of a step, in the tables of a fixed batch
LIMITS = (0.9, 0.5)
NOTICEABLE = 1.01  # times as fast

# of a parameter and optimizer step: read for the norm (2); read and written by AdamW: fp32 weight and two moments
# (2 x 12), gradient (2), weight in bf16 (2)
OPTIMIZER_BYTES = 30
# of a parameter in a checkpoint: fp32 weight and two moments
CHECKPOINT_BYTES = 12
GRADIENT_BYTES = FEATURE_BYTES = 2  # bf16


@dataclass(frozen=True)
class Link:
    """A way between ranks: bytes/s as bus bandwidth, and seconds of one hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """What a step runs on.

    Attributes:
        gpus_per_node: ranks that NVLink connects.
        nvlink: between the GPUs of a node.
        network: between nodes; the bandwidth is that of a node with all of its cards.
        flops: bf16 operations per second that a large matrix product reaches.
        memory: bytes of a GPU.
        memory_bandwidth: bytes/s of it that an elementwise kernel reaches.
        launch: seconds of a collective that moves nothing, beside its hops.
        disk: bytes/s at which rank 0 writes a checkpoint, for which the others wait.
    """

    nvlink: Link
    network: Link
    gpus_per_node: int = 8
    flops: float = 700e12
    memory: float = 141e9
    memory_bandwidth: float = 4.0e12
    launch: float = 10e-6
    disk: float = 1e9


NVLINK = Link(360e9, 3e-6)
NETWORKS = {"8 x 400 Gb/s": Link(320e9, 10e-6), "1 x 100 Gb/s": Link(10e9, 15e-6)}
# Share of `flops` that the operations of use reach, in drafter and target
UTILIZATION = {"smollm2": 0.15, "qwen3-4b": 0.4, "qwen3-8b": 0.4, "qwen3-32b": 0.4}
CHECKPOINT_EVERY = 100
# of a step that nothing hides: the batch's way to the device, and the host's
DATA_SECONDS = 0.5e-3
STREAM_DEPTH = 2


@dataclass(frozen=True)
class Times:
    """Seconds of one step's parts on one GPU, for the rows that are in `rows`.

    Attributes:
        rows: of one step on one GPU.
        target: features.
        forward: of the drafter, and the loss with its gradient.
        backward: of the drafter, during which gradients are summed.
        optimizer: clipping and AdamW; does not depend on the rows.
        source: where the figures come from.
    """

    rows: int
    target: float
    forward: float
    backward: float
    optimizer: float
    source: str

    def for_rows(self, rows: float) -> "Times":
        """The same for another number of rows, in proportion."""
        scale = rows / self.rows
        parts = {name: getattr(self, name) * scale for name in ("target", "forward", "backward")}
        return replace(self, rows=rows, **parts)


@dataclass(frozen=True)
class Model:
    """A target and its drafter, and what they take on one GPU."""

    name: str
    shape: DrafterShape
    target_layers: int
    step: Mapping[str, int]
    times: Times

    @property
    def parameters(self) -> int:
        """Weights of the drafter that train."""
        return drafter_parameters(vars(self.shape))

    @property
    def layer_parameters(self) -> int:
        """Of them, those of one layer."""
        return (self.parameters - self.fc_parameters) // self.shape.layers

    @property
    def fc_parameters(self) -> int:
        """Of them, those whose gradient comes last, with the norm behind."""
        return len(self.shape.target_layer_ids) * self.shape.hidden_size**2 + 2 * self.shape.hidden_size

    @property
    def target_parameters(self) -> int:
        """Weights of the target, embedding and head included."""
        shape, config = self.shape, SHAPES[self.name]["config"]
        attention = shape.hidden_size * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
        layer = attention + 3 * shape.hidden_size * shape.intermediate_size
        ends = shape.vocab_size * shape.hidden_size * (1 if config["tie_word_embeddings"] else 2)
        return self.target_layers * layer + ends

    @property
    def batch_feature_bytes(self) -> float:
        """Features of one row."""
        return self.step["row_length"] * len(self.shape.target_layer_ids) * self.shape.hidden_size * FEATURE_BYTES


def drafter_shape(name: str, block_size: int, layers: int) -> DrafterShape:
    """The drafter of a shape of `SHAPES`, for a target of so many layers."""
    config = SHAPES[name]["config"]
    description = {**config, "num_hidden_layers": layers, "bos_token_id": 1, "eos_token_ids": [2]}
    description["mask_token_id_auto"] = config["vocab_size"] - 1
    return DrafterShape.from_target(description, {**DRAFTER, "block_size": block_size})


def row_flops(shape: DrafterShape, step: Mapping[str, int]) -> dict[str, float]:
    """Operations of use for one row that is one document, all of it supervised; as `useful_flops` of the benchmark.

    Returns:
        forward: of the drafter, and the head with its gradient. backward: of the drafter. target: up to the last
        tapped layer.
    """
    hidden, queries, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    context, anchors, block = step["row_length"], step["anchors_per_row"], step["block_size"]
    layer = hidden * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    # anchors lie evenly: a block sees half the row on average
    visible = anchors * block * (context / 2 + block)
    supervised = anchors * (block - 1)
    body = block_products(shape, 1, anchors)
    body += 2.0 * context * shape.layers * 2 * hidden * keys + 2 * attention_product(shape, visible)
    fc = 2.0 * context * len(shape.target_layer_ids) * hidden * hidden
    head = 2 * 2.0 * supervised * hidden * shape.vocab_size
    target_layer = 2.0 * context * layer + 4.0 * context * context / 2 * queries
    return {
        "forward": body + fc + head,
        "backward": 2 * body + fc,
        "target": target_layer * (shape.target_layer_ids[-1] + 1),
    }


def assumed(name: str, machine: Machine) -> Model:
    """A model with the times that `UTILIZATION` gives."""
    step, layers = SHAPES[name]["step"], SHAPES[name]["layers"]
    shape = drafter_shape(name, step["block_size"], layers)
    rows, rate = step["rows_per_step"], machine.flops * UTILIZATION[name]
    seconds = {part: rows * flops / rate for part, flops in row_flops(shape, step).items()}
    optimizer = drafter_parameters(vars(shape)) * OPTIMIZER_BYTES / machine.memory_bandwidth
    source = f"assumed: {UTILIZATION[name]:.0%} of {machine.flops / 1e12:.0f} TFLOP/s"
    return Model(name, shape, layers, step, Times(rows=rows, optimizer=optimizer, source=source, **seconds))


def measured(model: Model, results: Mapping[str, Any]) -> Model:
    """The model with the times that benchmarks/step_time.py found for its shape, if it has them all; else as it is."""
    for case in results["cases"]:
        found = case["trainers"].get("draftflow", {})
        same = case["shape"] == model.name and case["block_size"] == model.step["block_size"]
        same = same and case["row_length"] == model.step["row_length"]
        same = same and case["anchors"] == model.step["anchors_per_row"]
        target = case.get("target", {}).get("draftflow")
        if not same or not found.get("ms") or not found.get("train_ms") or not isinstance(target, list):
            continue
        ms, train, features = (statistics.median(times) / 1e3 for times in (found["ms"], found["train_ms"], target))
        flops = row_flops(model.shape, model.step)
        backward = ms * flops["backward"] / (flops["forward"] + flops["backward"])
        # the target of the benchmark has few layers, and runs up to its last tapped one
        ran = tap_layers(case["target_layers"], len(model.shape.target_layer_ids))[-1] + 1
        times = Times(
            rows=case["rows"],
            target=features * (model.shape.target_layer_ids[-1] + 1) / ran,
            forward=ms - backward,
            backward=backward,
            optimizer=max(0.0, train - ms),
            source=f"measured: {results['device']}, {results['date']}, `{results['command']}`",
        )
        return replace(model, times=times)
    return model


def all_reduce(size: float, ranks: int, machine: Machine) -> float:
    """Seconds to sum `size` bytes over `ranks`, which fill nodes one after the other; as NCCL's own tuning reckons.

    A ring takes 2 (n - 1) steps, of which 2 (m - 1) go between the m nodes, and moves 2 (n - 1) / n of the bytes over
    its slowest link. A tree between nodes moves twice the bytes and goes up and down its log2(m) levels, and the
    GPUs of a node in a chain. The faster one is taken.
    """
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / machine.gpus_per_node)
    bandwidth = machine.nvlink.bandwidth if nodes == 1 else min(machine.nvlink.bandwidth, machine.network.bandwidth)
    between = 2 * (nodes - 1)
    ring = 2 * (ranks - 1) / ranks * size / bandwidth
    ring += between * machine.network.latency + (2 * (ranks - 1) - between) * machine.nvlink.latency
    if nodes == 1:
        return machine.launch + ring
    inside = ranks / nodes - 1
    tree = 2 * size / bandwidth
    tree += 2 * (math.log2(nodes) * machine.network.latency + inside * machine.nvlink.latency)
    return machine.launch + min(ring, tree)


def exposed_reduction(model: Model, times: Times, ranks: int, machine: Machine) -> float:
    """Seconds for which a step waits for gradients after its backward pass.

    Gradients are summed as soon as they are there, one after the other: a layer's when the backward pass has gone
    through it, those of `fc` at the end, since every layer reads what it gives. A layer is up to seven sums, of its
    matrices; small ones wait for one another, and the last of them come behind `fc`. Where the step is replayed, all
    are summed as one tensor after it, which they are copied to and from. Behind them comes the sum of the statistics.

    Args:
        times: of the rows of a rank.
    """
    if ranks == 1:
        return 0.0
    layers, backward = model.shape.layers, times.backward
    small = all_reduce(0.0, ranks, machine)
    if worth_capturing(plan_of(model, round(times.rows))):
        size = model.parameters * GRADIENT_BYTES
        return all_reduce(size, ranks, machine) + 4 * size / machine.memory_bandwidth + small
    size = model.layer_parameters * GRADIENT_BYTES
    layer = all_reduce(size, ranks, machine) + (min(7, math.ceil(size / SUMMED_BYTES)) - 1) * small
    free = 0.0
    for number in range(1, layers + 1):
        free = max(free, backward * number / layers) + layer
    last = all_reduce(model.fc_parameters * GRADIENT_BYTES, ranks, machine) + small
    return max(free, backward) + last + small - backward


@dataclass(frozen=True)
class Point:
    """One topology on so many GPUs.

    Attributes:
        drafters, targets: GPUs of each role; targets 0 is colocated.
        rows: of a step, over all devices.
        seconds: of a step.
        exposed: of them, waiting for gradients.
        bound: what the step waits for.
    """

    drafters: int
    targets: int
    rows: int
    seconds: float
    exposed: float
    bound: str = "drafter"

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.drafters + self.targets

    @property
    def rate(self) -> float:
        """Rows per second and GPU."""
        return self.rows / self.seconds / self.gpus


def colocated(model: Model, gpus: int, rows: int, machine: Machine) -> Point:
    """Every GPU runs the target and trains."""
    times = model.times.for_rows(rows / gpus)
    exposed = exposed_reduction(model, times, gpus, machine)
    seconds = times.target + times.forward + times.backward + exposed + times.optimizer + overhead(model, machine)
    return Point(gpus, 0, rows, seconds, exposed)


def overhead(model: Model, machine: Machine) -> float:
    """Seconds of a step for the batch and, spread over the steps between, the checkpoint."""
    return DATA_SECONDS + model.parameters * CHECKPOINT_BYTES / machine.disk / CHECKPOINT_EVERY


def split(model: Model, drafters: int, targets: int, rows: int, machine: Machine) -> Point:
    """Some GPUs run the target and stream its features to those that train: the slowest of three decides.

    Features come over the network if the GPUs are more than one node holds: the roles fill nodes one after the other.
    There they share it with the gradients. A target works at a batch that a drafter has room for, so that no more of
    them work than there is room.
    """
    times = model.times.for_rows(rows / drafters)
    exposed = exposed_reduction(model, times, drafters, machine)
    drafter = times.forward + times.backward + exposed + times.optimizer + overhead(model, machine)
    target = drafters * times.target / min(targets, STREAM_DEPTH * drafters)
    size = rows / drafters * model.batch_feature_bytes
    sent = size * drafters / targets
    if drafters + targets <= machine.gpus_per_node:
        stream = max(size, sent) / machine.nvlink.bandwidth
    else:
        of_node = max(min(drafters, machine.gpus_per_node) * size, min(targets, machine.gpus_per_node) * sent)
        stream = of_node / machine.network.bandwidth
        if drafters > machine.gpus_per_node:
            stream += all_reduce(model.parameters * GRADIENT_BYTES, drafters, machine)
    seconds, bound = max((drafter, "drafter"), (target, "target"), (stream, "network"))
    return Point(drafters, targets, rows, seconds, exposed, bound)


def best_split(model: Model, gpus: int, machine: Machine, rows_each: int | None, rows: int | None) -> Point | None:
    """The division of the GPUs that gives the most tokens per second.

    Args:
        rows_each: of each drafter and step, or None.
        rows: of a step, which the drafters must share evenly, or None.
    """
    found = [
        split(model, drafters, gpus - drafters, rows or drafters * (rows_each or 0), machine)
        for drafters in range(1, gpus)
        if rows is None or rows % drafters == 0
    ]
    return max(found, key=lambda point: point.rate, default=None)


def plan_of(model: Model, rows: int) -> Plan:
    """The plan of a GPU with so many rows."""
    return make_plan(vars(model.shape), {**model.step, "rows_per_step": rows, "precision": "bf16"}, "cuda", 1)


def memory_bytes(model: Model, rows: int, targets: bool) -> float:
    """Bound of a GPU's memory that trains, with the target on it or not."""
    weights = 2 * model.target_parameters if targets else 2 * 2 * model.shape.vocab_size * model.shape.hidden_size
    return step_bound(plan_of(model, rows), weights)["total"]


# Tables. Of a number of GPUs: colocated, and the best split
Pair = tuple[Point | None, Point | None]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def fits(model: Model, point: Point, machine: Machine) -> bool:
    """Whether the GPUs that train have the memory, and those that run the target alone."""
    each = point.rows // point.drafters
    return memory_bytes(model, each, point.targets == 0) <= machine.memory >= 2 * model.target_parameters


def growing(model: Model, machine: Machine) -> list[Pair]:
    """Colocated and the best split where each GPU that trains has the rows of one."""
    each = model.times.rows
    return [
        (colocated(model, gpus, gpus * each, machine), best_split(model, gpus, machine, each, None)) for gpus in GPUS
    ]


def fixed(model: Model, machine: Machine) -> list[Pair]:
    """Colocated and the best split where the rows of a step are the same on any number of GPUs."""
    return [
        (
            colocated(model, gpus, FIXED_ROWS, machine) if FIXED_ROWS % gpus == 0 else None,
            best_split(model, gpus, machine, None, FIXED_ROWS),
        )
        for gpus in GPUS
    ]


def model_table(model: Model, machines: Mapping[str, Machine], found: Mapping[str, Sequence[Pair]], title: str) -> str:
    """All numbers of GPUs, over the networks."""
    head = ["GPUs"]
    for name in found:
        head += [f"colocated, {name}", "gradients, ms", "tokens/s", f"split, {name}", "drafter + target"]
    rows = []
    for number, gpus in enumerate(GPUS):
        row = [str(gpus)]
        for name, points in found.items():
            one, two = points[number]
            row += [cell(model, one, points, machines[name])]
            row += [] if one else ["", ""]
            if one:
                row += [f"{one.exposed * 1e3:.1f}", f"{one.rate * one.gpus * model.step['row_length']:,.0f}"]
            row += [cell(model, two, points, machines[name]), f"{two.drafters} + {two.targets}" if two else ""]
        rows.append(row)
    return f"{title}\n\n{markdown(head, rows)}"


def cell(model: Model, point: Point | None, points: Sequence[Pair], machine: Machine) -> str:
    """The efficiency, in brackets where there is too little memory."""
    if point is None:
        return ""
    text = f"{efficiency(point, points) * 100:.0f} %"
    return text if fits(model, point, machine) else f"({text})"


def efficiency(point: Point, points: Sequence[Pair]) -> float:
    """Rows per second and GPU, of what the one colocated GPU at the head of `points` does."""
    alone = points[0][0]
    assert alone is not None
    return point.rate / alone.rate


def largest(model: Model, points: Sequence[Pair], side: int, limit: float, machine: Machine) -> str:
    """The largest number of GPUs on which a topology has an efficiency."""
    found = [pair[side] for pair in points]
    held = [
        point.gpus for point in found if point and fits(model, point, machine) and efficiency(point, points) >= limit
    ]
    return "none" if not held else f"{max(held)}{' or more' if max(held) == GPUS[-1] else ''}"


def overtakes(model: Model, points: Sequence[Pair], machine: Machine) -> str:
    """The numbers of GPUs on which a split trains noticeably faster than colocated, or is all that can be."""
    faster, alone = [], []
    for one, two in points:
        if two and fits(model, two, machine):
            if one is None or not fits(model, one, machine):
                alone.append(str(two.gpus))
            elif two.rate > NOTICEABLE * one.rate:
                faster.append(str(two.gpus))
    return (", ".join(faster) or "none") + (f"; alone: {', '.join(alone)}" if alone else "")


def input_table(models: Sequence[Model], machine: Machine) -> str:
    """What one GPU takes."""
    head = ["target", "rows", "target, ms", "forward and loss, ms", "backward, ms", "optimizer, ms"]
    head += [
        "batch and checkpoint, ms",
        "drafter",
        "gradients, GB",
        "features of a token, kB",
        "bound of GPU memory, GB",
        "without target",
    ]
    rows = []
    for model in models:
        times = model.times
        seconds = (times.target, times.forward, times.backward, times.optimizer, overhead(model, machine))
        rows.append(
            [MODELS[model.name], str(times.rows), *(f"{value * 1e3:.2f}" for value in seconds)]
            + [f"{model.parameters / 1e6:,.0f} M", f"{model.parameters * GRADIENT_BYTES / 1e9:.2f}"]
            + [f"{model.batch_feature_bytes / model.step['row_length'] / 1e3:.1f}"]
            + [f"{memory_bytes(model, times.rows, targets) / 1e9:.0f}" for targets in (True, False)]
        )
    sources = "\n".join(f"- {MODELS[model.name]}: {model.times.source}." for model in models)
    return f"{markdown(head, rows)}\n\nWhere the times are from:\n\n{sources}"


def render(models: Sequence[Model], machines: Mapping[str, Machine], command: str) -> str:
    """All tables."""
    parts = ["### One GPU", input_table(models, next(iter(machines.values()))), machine_words(machines)]
    kinds = {"growing": growing, "fixed": fixed}
    found = {
        kind: {model.name: {name: points(model, machine) for name, machine in machines.items()} for model in models}
        for kind, points in kinds.items()
    }
    titles = {
        "growing": "rows per GPU that trains stay the same",
        "fixed": f"{FIXED_ROWS} rows per step on any number of GPUs",
    }
    head = ["target", "network", *(f"{what}, {limit:.0%}" for what in ("colocated", "split") for limit in LIMITS)]
    for kind, title in titles.items():
        rows = [
            [MODELS[model.name], name]
            + [largest(model, points, side, limit, machines[name]) for side in (0, 1) for limit in LIMITS]
            + [overtakes(model, points, machines[name])]
            for model in models
            for name, points in found[kind][model.name].items()
        ]
        parts.append(f"### The most GPUs at an efficiency: {title}\n\n{markdown([*head, 'split is faster'], rows)}")
    for kind, title in titles.items():
        parts += [
            model_table(model, machines, found[kind][model.name], f"### {MODELS[model.name]}: {title}")
            for model in models
        ]
    parts.append(f"Made by `{command}`.")
    return "\n\n".join(parts)


def machine_words(machines: Mapping[str, Machine]) -> str:
    """The parameters, in a sentence each."""
    one = next(iter(machines.values()))
    networks = "; ".join(f"{name}: {link_words(machine.network)}" for name, machine in machines.items())
    return (
        f"Assumed of the machines: {one.gpus_per_node} GPUs a node; NVLink {link_words(one.nvlink)}; networks of a "
        f"node {networks}; {one.launch * 1e6:g} us for a collective by itself; {one.memory / 1e9:.0f} GB of memory at "
        f"{one.memory_bandwidth / 1e12:g} TB/s; checkpoints every {CHECKPOINT_EVERY} steps at {one.disk / 1e9:g} GB/s; "
        f"{DATA_SECONDS * 1e3:g} ms of a step for the batch."
    )


def link_words(link: Link) -> str:
    return f"{link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} us a hop"


def read(path: Path) -> dict[str, Any]:
    """What benchmarks/step_time.py wrote.

    Raises:
        DraftflowError: there is no such file, or another one.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        _ = results["cases"], results["device"], results["date"], results["command"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        remedy = "Name an --output of `benchmarks/step_time.py`."
        raise DraftflowError("This is not what the benchmark of a step writes.", remedy, str(path)) from None
    return results


def link(text: str) -> Link:
    """`320,10`: GB/s and microseconds."""
    bandwidth, _, latency = text.partition(",")
    return Link(float(bandwidth) * 1e9, float(latency) * 1e-6)


def named_link(text: str) -> tuple[str, Link]:
    """`NAME=320,10`."""
    name, _, values = text.partition("=")
    return name, link(values)


def models_of(results: Sequence[Mapping[str, Any]], machine: Machine) -> Iterator[Model]:
    """All models, with the last measured times of each, or else assumed ones."""
    for name in MODELS:
        model = assumed(name, machine)
        for found in results:
            model = measured(model, found)
        yield model


def parse(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, action="append", default=[], help="JSON of benchmarks/step_time.py")
    parser.add_argument("--network", type=named_link, action="append", help="NAME=GB/s,us; may be repeated")
    parser.add_argument("--nvlink", type=link, default=NVLINK, help="GB/s,us")
    parser.add_argument("--disk", type=float, default=1.0, help="GB/s at which a checkpoint is written")
    parser.add_argument("--memory", type=float, default=141.0, help="GB of a GPU")
    parser.add_argument("--write", type=Path, help="the document that holds the tables")
    return parser.parse_args(line)


def tables(line: Sequence[str]) -> str:
    """What a command line gives."""
    arguments = parse(line)
    networks = dict(arguments.network) if arguments.network else NETWORKS
    machines = {
        name: Machine(arguments.nvlink, network, disk=arguments.disk * 1e9, memory=arguments.memory * 1e9)
        for name, network in networks.items()
    }
    models = list(models_of([read(path) for path in arguments.read], next(iter(machines.values()))))
    return render(models, machines, shlex.join(["uv", "run", "python", "benchmarks/scaling.py", *line]))


def main() -> None:
    """Compute, print the tables, and write them where one asks for it."""
    text = tables(sys.argv[1:])
    print(text)
    if file := parse().write:
        replace_between(file, BEGIN, END, text)


if __name__ == "__main__":
    run_stage(main)
