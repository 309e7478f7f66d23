"""Threads that run compiled code, with and without a guard, on real torch builds; the table of docs/threads.md.

    uv run python benchmarks/threads.py --write docs/threads.md

Needs no GPU, and with `--gpus` uses those that there are, one for each thread as far as they go. The environment of a
build is made from its committed lock, if it is not there already; an interpreter that has torch may be named instead.
The trials themselves are in threads_trials.py.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from documents import replace_between

from draftflow.environment.builds import choose, detect_gpus
from draftflow.environment.install import install
from draftflow.environment.lock import environment_id, lock_file
from draftflow.errors import DraftflowError
from draftflow.stage import Record, say
from draftflow.training.devices import visible_gpus

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table of benchmarks/threads.py -->", "<!-- end of the table -->"
KINDS = {
    "function": "a function",
    "backward": "forward and backward",
    "flex": "`flex_attention`, forward",
    "masks": "masks and `flex_attention`",
}
CURES = ("one_at_a_time", "processes")

# Threads of kernels and of the compiler would only compete with those that the trials are about.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "PYTHONPATH": str(ROOT / "src"),
    "DRAFTFLOW_SRC": str(ROOT / "src"),
}


def interpreter(version: str) -> Path:
    """The Python of PyPI's build of a torch version: what the workflow installed, or else one of the benchmark's own.

    Raises:
        DraftflowError: no such build, no lock of it, or it cannot be installed.
    """
    choice = choose(version, "auto", "pypi", detect_gpus())
    lock = lock_file(ROOT, "train", choice)
    name = environment_id(choice, lock)
    folders = [ROOT / "results" / place / name for place in ("environments", "benchmarks")]
    for folder in folders:
        python = folder / "venv" / "bin" / "draftflow-python"
        if python.exists():
            return python
    say(f"installing torch {version} ({choice.build}) into {folders[-1]}")
    install(folders[-1], lock, choice, "pypi", "auto", Record("install"))
    return python


def make_plan(trials: int, failing: int, inductor: int) -> list[tuple[str, str, str, int]]:
    """Kind, backend, condition and number of trials: `trials` of what should not fail, `failing` of what should."""
    plan = []
    for kind in KINDS:
        partial = ["lock around first calls", *(["one_at_a_time, not around masks"] if kind == "masks" else [])]
        plan += [(kind, "aot_eager", condition, failing) for condition in ("unguarded", *partial)]
        plan += [(kind, "aot_eager", condition, trials) for condition in CURES]
    for kind in ("backward", "flex"):
        plan += [(kind, "inductor", condition, inductor) for condition in ("unguarded", *CURES)]
    return [row for row in plan if row[-1]]


def run(python: Path, plan: Sequence[tuple[str, str, str, int]], gpus: bool = False) -> list[dict[str, Any]]:
    """Results of a build, in the order of the plan."""
    results = []
    command = [str(python), str(ROOT / "benchmarks" / "threads_trials.py"), "--plan", json.dumps(plan)]
    command += ["--device", "cuda" if gpus else "cpu"]
    environment = {**os.environ, **ENVIRONMENT, **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            result = json.loads(line)
            results.append(result)
            say(f"torch {result['torch']}, {result['kind']} with {result['backend']}, {in_words(result)}")
    if process.returncode:
        raise DraftflowError("The trials did not run.", "The reason is above.", str(python))
    return results


def in_words(result: dict[str, Any]) -> str:
    """A result as a line of the log."""
    return f"{result['condition']}: {cell(result)}"


def cell(result: dict[str, Any]) -> str:
    """A result as a cell of the table."""
    words = f"{result['bad']} of {result['trials']}"
    words = f"{words} ({result['seconds'] / result['trials']:.1f} s)"
    if result["errors"]:
        words += ": " + ", ".join(f"{error} {count}" for error, count in sorted(result["errors"].items()))
    if result["kind"] == "flex" and result["backend"] == "inductor":
        words += f"; {result['dense']} dense calls"
    return words


def table(results: Sequence[Sequence[dict[str, Any]]], plan: Sequence[tuple[str, str, str, int]]) -> str:
    """The Markdown table: a row for each entry of the plan, a column for each build."""
    builds = [build[0]["torch"] for build in results]
    rows: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for build in results:
        for result in build:
            rows[result["kind"], result["backend"], result["condition"]].append(cell(result))
    lines = ["| compiled code | backend | condition | " + " | ".join(builds) + " |"]
    lines.append("|---" * (3 + len(builds)) + "|")
    for (kind, backend, condition), cells in rows.items():
        name = condition.replace("one_at_a_time", "`one_at_a_time`")
        lines.append(f"| {KINDS[kind]} | {backend} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine(gpus: bool) -> str:
    """The processor and how many of it there are, and the GPUs if they are used."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "CPU")
    names = Counter(gpu.name for gpu in visible_gpus(detect_gpus())) if gpus else {}
    used = "".join(f"{count} x {name}, " for name, count in names.items())
    return f"{used}{os.cpu_count()} cores of {model}, Linux {platform.release()}"


def main() -> None:
    """Run the trials, print the table, and write it where one asks for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", help="a torch version; default: 2.10.0, 2.11.0, 2.12.1, 2.14.1")
    parser.add_argument("--python", action="append", type=Path, help="an interpreter with torch, in place of builds")
    parser.add_argument("--trials", type=int, default=200, help="of what should not fail")
    parser.add_argument("--failing-trials", type=int, default=50, help="of what should fail")
    parser.add_argument("--inductor-trials", type=int, default=3, help="of either, with Inductor (up to a minute each)")
    parser.add_argument("--jobs", type=int, default=1, help="builds at a time")
    parser.add_argument("--gpus", action="store_true", help="call on GPUs")
    parser.add_argument("--write", type=Path, help="the document that holds the table")
    arguments = parser.parse_args()
    if arguments.gpus and not visible_gpus(detect_gpus()):
        raise DraftflowError("There is no GPU.", "Leave it out, or look at nvidia-smi.", "--gpus")
    start = time.monotonic()
    builds = arguments.build or ["2.10.0", "2.11.0", "2.12.1", "2.14.1"]
    pythons = arguments.python or [interpreter(version) for version in builds]
    plan = make_plan(arguments.trials, arguments.failing_trials, arguments.inductor_trials)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda python: run(python, plan, arguments.gpus), pythons))
    command = shlex.join(["uv", "run", "python", "benchmarks/threads.py", *sys.argv[1:]])
    where, minutes = machine(arguments.gpus), (time.monotonic() - start) / 60
    made = f"Made by `{command}` on {date.today()}, {where}, in {minutes:.0f} minutes."
    text = f"{table(results, plan)}\n\n{made}"
    print(text)
    if arguments.write:
        replace_between(arguments.write, BEGIN, END, text)


if __name__ == "__main__":
    try:
        main()
    except DraftflowError as error:
        sys.exit(f"draftflow: error: {error}")
