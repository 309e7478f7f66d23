"""A training step, ours and that of the other trainers of DFlash drafters; the tables of docs/step.md.

    uv run python benchmarks/step_time.py --shape qwen3-8b --output step_time.json --write docs/step.md

fetches the peers and installs an environment, then measures in it. An interpreter with torch and transformers measures
at once, without a network where the peers lie in a folder already:

    uv run python benchmarks/peers.py peers --python 3.12
    PYTHONPATH=src python benchmarks/step_time.py --peers peers --shape qwen3-8b --output step_time.json

and the tables of several runs are made from what they wrote:

    uv run python benchmarks/step_time.py --read step_time.json --read other.json --write docs/step.md

`--read-profiles` takes of a run what its kernels were, and no times.

Shapes are smollm2, qwen3-4b, qwen3-8b, qwen3-32b, and tiny, which a CPU can do. The measuring is in
step_time_trials.py, the trainers are in trainers.py.
"""

import argparse
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import peers
from documents import replace_between
from threads import interpreter

from draftflow.errors import DraftflowError
from draftflow.stage import run_stage

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tables of benchmarks/step_time.py -->", "<!-- end of the tables -->"
TORCH = "2.11.0"
OURS, OURS_KL = "draftflow", "draftflow, KL"
SHOWN_KERNELS = 12


def in_environment(arguments: argparse.Namespace) -> None:
    """Run this command again in an environment with torch, both made if they are not there."""
    folder = arguments.peers or ROOT / "results" / "benchmarks" / "peers"
    if not (folder / f"python{peers.THIS_PYTHON}").is_dir():
        peers.fetch(folder)
    sources = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    again = [str(interpreter(arguments.torch)), __file__, *sys.argv[1:], "--peers", str(folder)]
    done = subprocess.run(again, env={**os.environ, "DRAFTFLOW_SRC": sources})
    if done.returncode:
        sys.exit(done.returncode)


def median(times: Sequence[float] | None) -> float | None:
    return statistics.median(times) if times else None


def spread(times: Sequence[float] | None) -> str:
    """Median and range in milliseconds."""
    if not times:
        return ""
    digits = 1 if min(times) >= 10 else 2
    return f"{statistics.median(times):.{digits}f} ({min(times):.{digits}f}-{max(times):.{digits}f})"


def number(value: float | None, form: str = ".1f", scale: float = 1.0) -> str:
    return "" if value is None else format(value / scale, form)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns without a single entry are left out."""
    used = [column for column in range(len(head)) if any(row[column] for row in rows)]
    lines = [[head[column] for column in used], ["---"] * len(used)]
    lines += [[row[column] for column in used] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def case_table(case: Mapping[str, Any], ceiling: float) -> str:
    """Trainers of one case."""
    useful, tokens = sum(case["flops"].values()), case["rows"] * case["row_length"]
    rows = []
    for name, found in case["trainers"].items():
        same, more = (OURS_KL, case["kl_flops"]) if name.endswith("KL") else (OURS, 0.0)
        ours, flops = median(case["trainers"].get(same, {}).get("ms")), useful + more
        ms, train = median(found.get("ms")), median(found.get("train_ms"))
        rows.append(
            [
                name,
                found.get("error") or spread(found.get("ms")),
                number(ms and ours and ms / ours, ".2f"),
                number(ms and flops / (ms * 1e-3) / ceiling * 100, ".0f"),
                number(found.get("peak_bytes"), ".1f", 2**30),
                found.get("optimizer_error") or spread(found.get("train_ms")),
                number(train and tokens / (train * 1e-3), ",.0f"),
                number(found.get("train_peak_bytes"), ".1f", 2**30),
                spread(found.get("target_ms")),
                number(found.get("first_call_s")) + (" (cached)" if found.get("first_call_hits") else ""),
            ]
        )
    head = [
        *("trainer", "forward + backward, ms", "of ours of its loss", "MFU, %", "peak GiB"),
        *("with optimizer, ms", "tokens/s", "peak GiB", f"and target ({case['target_layers']} layers), ms"),
        "first call, s",
    ]
    parts = ", ".join(f"{name} {value / 1e12:.3g}" for name, value in case["flops"].items())
    lines = [f"### {title(case)}", "", markdown(head, rows), ""]
    lines.append(
        f"{case['supervised']:,} supervised positions; {useful / 1e12:.3g} TFLOP of use ({parts}), "
        f"{case['kl_flops'] / 1e12:.3g} more for KL."
    )
    for name, times in case.get("target", {}).items():
        found = times if isinstance(times, str) else f"{spread(times)} ms"
        lines.append(f"Target forward, {case['target_layers']} layers, {name}: {found}.")
    if "in_turn_error" in case:
        lines.append(f"Not in turn but one after the other: {case['in_turn_error']}.")
    return "\n".join(lines)


def title(case: Mapping[str, Any]) -> str:
    row = (
        f"row of {case['row_length']} tokens" if case["rows"] == 1 else f"{case['rows']} x {case['row_length']} tokens"
    )
    return f"{case['shape']}, block {case['block_size']}: {row}, {case['anchors']} anchors"


def sweep_tables(cases: Sequence[Mapping[str, Any]], sweeps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How the cost of a shape grows with anchors and with the row; the usual case stands among them."""
    for base in cases:
        same = [case for case in sweeps if all(case[key] == base[key] for key in ("shape", "block_size"))]
        for varied, fixed in (("anchors", "row_length"), ("row_length", "anchors")):
            points = [case for case in same if case[fixed] == base[fixed]]
            names = list(dict.fromkeys(name for case in points for name in case["trainers"]))
            if not names:
                continue
            rows = []
            for case in sorted([*points, base], key=itemgetter(varied)):
                trainers = [case["trainers"].get(name, {}) for name in names]
                times = [trainer.get("error") or spread(trainer.get("ms")) for trainer in trainers]
                medians = [median(trainer.get("ms")) for trainer in trainers]
                peaks = [number(trainer.get("peak_bytes"), ".1f", 2**30) for trainer in trainers]
                ratios = [number(value and medians[0] and value / medians[0], ".2f") for value in medians[1:]]
                rows.append([f"{case[varied]}", *times, *ratios, *peaks])
            head = [varied.replace("_", " "), *(f"{name}, ms" for name in names)]
            head += [*(f"{name}, of ours" for name in names[1:]), *(f"{name}, peak GiB" for name in names)]
            at = f"{fixed.replace('_', ' ')} {base[fixed]}"
            yield f"### {base['shape']}, block {base['block_size']}, {at}\n\n{markdown(head, rows)}"


def profile_table(name: str, found: Mapping[str, Any]) -> str:
    """The longest kernels of a step, and its waits."""
    if "error" in found:
        return f"### Profile: {name}\n\n{found['error']}"
    rows = [
        [f"`{kernel['name'][:90]}`", f"{kernel['ms']:.3f}", f"{kernel['share'] * 100:.1f}", f"{kernel['count']:g}"]
        for kernel in found["kernels"][:SHOWN_KERNELS]
    ]
    waits = ", ".join(f"{name} {count:g}" for name, count in found["syncs"].items() if count) or "none"
    return (
        f"### Profile: {name}\n\n{markdown(['kernel', 'ms', '%', 'launches'], rows)}\n\n"
        f"{found['wall_ms']:.1f} ms; kernels take {found['kernel_ms']:.1f} ms. Waits of the host in a step: {waits}."
    )


def render(results: Sequence[Mapping[str, Any]]) -> str:
    """All tables of one run, or of several."""
    parts = []
    for found in results:
        ceilings = [value / 1e12 for value in found["ceiling_flops"]]
        said = " and ".join(f"{value:.3g}" for value in ceilings)
        parts += [case_table(case, statistics.mean(found["ceiling_flops"])) for case in found["cases"]]
        parts += sweep_tables(found["cases"], found["sweeps"])
        parts += [profile_table(name, profile) for name, profile in found["profiles"].items()]
        versions = f"Python {found['python']}, torch {found['torch']}, transformers {found['transformers']}"
        made = f"{found['device']}, {versions}, {found['date']}, {found['seconds'] / 60:.1f} minutes."
        parts.append(f"{made} A large matrix product reaches {said} TFLOP/s before and after, which is 100 % MFU.")
        parts += found["errors"]
        if found["skipped"]:
            parts.append("Not measured for want of time: " + "; ".join(found["skipped"]) + ".")
        parts.append(f"Made by `{found['command']}`.")
    return "\n\n".join(parts)


def read(path: Path) -> dict[str, Any]:
    """What an earlier run wrote.

    Raises:
        DraftflowError: there is no such file, or another one.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        results = None
    if not isinstance(results, dict) or "ceiling_flops" not in results:
        raise DraftflowError("This is not what the benchmark writes.", "Name an --output of an earlier run.", str(path))
    return results


def parse(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", default=[], help="of the target; may be given more than once")
    parser.add_argument("--block", type=int, action="append", help="block size; default: 8 and 16")
    parser.add_argument("--trainer", action="append", help="draftflow, SpecForge or speculators; default: all")
    parser.add_argument("--peers", type=Path, help="folder of `benchmarks/peers.py`")
    parser.add_argument("--output", type=Path, default=Path("step_time.json"), help="JSON to write")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for everything; what does not fit is skipped")
    parser.add_argument("--rounds", type=int, default=8, help="figures of each kind")
    parser.add_argument("--burst", type=int, default=3, help="steps that a figure is the mean of")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the first figure")
    parser.add_argument("--target-layers", type=int, default=8, help="of the random target")
    parser.add_argument("--given-anchors", action="store_true", help="the peers draw no anchors of their own")
    parser.add_argument("--eager", action="store_true", help="do not compile our layers: for a look on a CPU")
    parser.add_argument("--sweep", action="store_true", help="other numbers of anchors and rows of other lengths, too")
    parser.add_argument("--profile", action="store_true", help="kernels and waits of a step, too")
    parser.add_argument("--torch", default=TORCH, help="of the environment that is installed where there is none")
    parser.add_argument("--read", type=Path, action="append", help="make the tables of this JSON; may be repeated")
    parser.add_argument("--read-profiles", type=Path, action="append", help="of this JSON; may be repeated")
    parser.add_argument("--write", type=Path, help="the document that holds the tables")
    return parser.parse_args(line)


def main() -> None:
    """Measure, print the tables, and write them where one asks for it."""
    arguments = parse()
    if arguments.read or arguments.read_profiles:
        results = [read(path) for path in arguments.read or []]
        results += [{**read(path), "cases": [], "sweeps": [], "skipped": []} for path in arguments.read_profiles or []]
    elif importlib.util.find_spec("torch") is None:
        in_environment(arguments)
        return
    else:
        import step_time_trials

        command = shlex.join(["python", "benchmarks/step_time.py", *sys.argv[1:]])
        results = [step_time_trials.run(arguments, command)]
    text = render(results)
    print(text)
    if arguments.write:
        replace_between(arguments.write, BEGIN, END, text)


if __name__ == "__main__":
    run_stage(main)
