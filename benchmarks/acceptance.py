"""Acceptance against minutes of training, ours and SpecForge's model and loss on the same data; docs/acceptance.md.

    uv run python benchmarks/prompts.py prompts
    uv run python benchmarks/peers.py peers --python 3.12
    PYTHONPATH=src python benchmarks/acceptance.py --target results/targets/TARGET --prompts prompts --peers peers \\
        --output results/benchmarks/acceptance --variant draftflow --variant specforge

needs an interpreter with torch, transformers and matplotlib, and no network. The target answers all prompts, the
answers are packed, and each variant trains on them in a process of its own for the same time by the clock. What has
been done lies in the output folder; the same command goes on from there, so that the time may be spent in parts:
`--seconds` is for one call. The table and the plot are made from what there is. Afterwards

    uv run python benchmarks/acceptance.py --output results/benchmarks/acceptance --write docs/acceptance.md

puts them into the document. `--tiny` does all of it on a CPU in a minute, with a random target. The steps are in
acceptance_trials.py, the trainers in trainers.py.
"""

import argparse
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from documents import replace_between
from step_time import markdown, number

from draftflow.checks.acceptance import acceptance_length, bootstrap_interval
from draftflow.errors import DraftflowError
from draftflow.stage import end_with_parent, run_stage, say, write_json, write_text

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tables of benchmarks/acceptance.py -->", "<!-- end of the tables -->"
AT = (25, 50, 75, 100, 150, 300, 600)
SETS = {"held_out": "held out", "humaneval": "HumanEval"}
DRAFTER = {"layers": 5, "taps": 5, "target_layers": None, "mask_token": "auto"}
KEPT_FOR_THE_REPORT = 5.0  # seconds
LEAST = 10.0  # seconds without which nothing is begun

FULL: dict[str, Any] = {
    "response_tokens": 128,
    "samples": 0,
    "temperature": 0.7,
    "batch": 256,
    "held_out_share": 0.02,
    "held_out_prompts": 100,
    "new_tokens": 64,
    "workers": 8,
    "step": {"row_length": 256, "rows_per_step": 32, "anchors_per_row": 32, "block_size": 8},
    "feature_cache_gb": 32.0,
    "eager": False,
    "in_process": False,
}
TINY: dict[str, Any] = {
    **FULL,
    "response_tokens": 24,
    "batch": 16,
    "held_out_share": 0.2,
    "held_out_prompts": 4,
    "new_tokens": 16,
    "workers": 1,
    "step": {"row_length": 256, "rows_per_step": 2, "anchors_per_row": 8, "block_size": 4},
    "feature_cache_gb": 0.1,
    "eager": True,
    "in_process": True,
}
TINY_PROMPTS = 32


@dataclass
class Run:
    """One call: the output folder, its settings, the time that is left, and what was left out for want of it."""

    output: Path
    settings: dict[str, Any]
    deadline: float
    left_out: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def left(self) -> float:
        return self.deadline - time.time()

    def do(self, what: str, done: Callable[[], bool], *commands: Sequence[str], cache: Path | None = None) -> bool:
        """Run commands side by side unless it is `done`; whether it is done then."""
        if what in self.left_out:
            self.left_out.remove(what)
        if done():
            return True
        if self.left() < LEAST:
            self.left_out.append(what)
            return False
        say(what)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])}
        if cache is not None:
            environment |= {
                "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
                "TRITON_CACHE_DIR": str(cache / "triton"),
            }
        codes = []
        if self.settings["in_process"]:
            codes = [run_here(command) for command in commands]
        else:
            codes = self._side_by_side(commands, environment)
        if any(codes):
            self.errors.append(f"{what}: failed, see what it wrote")
        elif not done():
            self.left_out.append(what)
        return done()

    def _side_by_side(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[int]:
        """Exit codes of those that ended in time."""
        running = [
            subprocess.Popen([sys.executable, *command], env=environment, preexec_fn=end_with_parent)
            for command in commands
        ]
        codes = []
        try:
            for process in running:
                codes.append(process.wait(timeout=max(1.0, self.left())))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in running:
                process.kill()
                process.wait()
        return codes

    def trial(self, step: str, *more: str) -> list[str]:
        """Command of a step of acceptance_trials.py; it ends by itself before it would be ended."""
        deadline = str(self.deadline - KEPT_FOR_THE_REPORT)
        return ["-m", "acceptance_trials", step, str(self.output), "--deadline", deadline, *more]


def run_here(command: Sequence[str]) -> int:
    """Run `-m MODULE ...` in this process: starting one takes longer than what a tiny one does. The exit code."""
    _, name, *arguments = command
    module = importlib.import_module(name)
    with mock.patch.object(sys, "argv", [name, *arguments]):
        try:
            module.run_stage(module.main)
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def make_dataset(run: Run) -> bool:
    """Prompts, the target's responses, packed rows, and the prompts of evaluation; whether all of it is there."""
    settings, output = run.settings, run.output
    target, device = settings["target"], settings["device"]
    canonical, answered = output / "conversations.jsonl", output / "responses.jsonl"
    repeated, sampled = output / "repeated.jsonl", output / "sampled.jsonl"
    fitting, rows, prompts = output / "fitting.jsonl", output / "rows.safetensors", output / "prompts.json"
    read = {"responses": "regenerate"}
    ask = {"max_new_tokens": settings["response_tokens"], "temperature": 0.0, "top_p": 1.0, "seed": settings["seed"]}
    ask["batch_size"] = settings["batch"]
    row_length, seed = settings["step"]["row_length"], settings["seed"]
    pack = {"row_length": row_length, "held_out": settings["held_out_share"], "seed": seed}

    def stage(name: str, given: Mapping[str, Any], *more: Any, record: Path | None = None) -> list[str]:
        record = record or output / f"{name}.json"
        arguments = ["-m", f"draftflow.dataset.{name}", "--settings", json.dumps(given), "--record", str(record)]
        return [*arguments, *map(str, more)]

    reading = stage("read", read, "--output", canonical, settings["prompts"])
    targeted = ("--target", target, "--conversations")
    asking = stage("regenerate", ask, "--device", device, *targeted, canonical, "--output", answered)
    held_out = ("--held-out", output / "held_out.jsonl")
    packing = stage("pack", pack, *targeted, fitting, "--output", rows, *held_out)
    if not run.do("reading the prompts", canonical.is_file, reading):
        return False
    if not run.do("the target's responses", answered.is_file, asking):
        return False
    if settings["samples"]:
        if not repeated.is_file():
            write_repeated(canonical, repeated, settings["samples"])
        again = {**ask, "temperature": settings["temperature"]}
        answering = ("--device", device, *targeted, repeated, "--output", sampled)
        sampling = stage("regenerate", again, *answering, record=output / "sampled.json")
        if not run.do("samples of the target's responses", sampled.is_file, sampling):
            return False
    if not fitting.is_file():
        write_fitting([answered, *([sampled] if settings["samples"] else [])], fitting, Path(target), row_length)
    if not run.do("packing", rows.is_file, packing):
        return False
    if not prompts.is_file():
        write_prompts(run, prompts)
    texts = output / "texts.json"
    return run.do("the target's own continuations", texts.is_file, run.trial("texts"))


def write_repeated(canonical: Path, output: Path, times: int) -> None:
    """Each conversation several times; a response's sampling is seeded by the prompt and how often it came before."""
    from draftflow.dataset import formats

    formats.write(output, formats.read_canonical(canonical) * times)


def write_fitting(answered: Sequence[Path], output: Path, target: Path, row_length: int) -> None:
    """Leave out conversations from which nothing could be learned in a row."""
    from draftflow.dataset import formats
    from draftflow.dataset.pack import fault
    from draftflow.dataset.template import encode
    from draftflow.target.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(target)
    stops = json.loads((target / "target.json").read_text(encoding="utf-8"))["eos_token_ids"]
    found = [each for path in answered for each in formats.read_canonical(path)]
    kept = [each for each in found if fault(encode(tokenizer, each.messages, stops, each.where), row_length) is None]
    say(f"{len(found) - len(kept)} of {len(found)} conversations do not fit a row of {row_length}")
    formats.write(output, kept)


def write_prompts(run: Run, output: Path) -> None:
    """The prompts of evaluation: of the held-out ones the first so many, and all of HumanEval."""
    from draftflow.dataset import formats
    from draftflow.dataset.pack import held_out_prompts
    from draftflow.target.tokenizer import load_tokenizer

    settings = run.settings
    lines = (run.output / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    found = [{"set": "held_out", **json.loads(line)} for line in lines[: settings["held_out_prompts"]]]
    tokenizer = load_tokenizer(Path(settings["target"]))
    evaluation = formats.read([Path(settings["humaneval"])], "regenerate")
    found += [{"set": "humaneval", **prompt} for prompt in held_out_prompts(tokenizer, evaluation)]
    write_json(output, [{name: prompt[name] for name in ("set", "id", "prompt_ids")} for prompt in found])


def train_all(run: Run, variants: Sequence[str]) -> None:
    """The first step of each variant with an empty cache, then its run, whose first step finds the cache warm.

    What it kept is measured before the next one trains: where the time is short, a few variants are whole.
    """
    for variant in variants:
        folder, cache = run.output / "runs" / variant, run.output / "cache" / variant
        named, trained = ("--variant", variant, "--started"), partial(is_trained, run, variant)
        first = folder / "first.json"
        if not first.is_file() and not (folder / "run.json").is_file():
            shutil.rmtree(cache, ignore_errors=True)
            run.do(f"{variant}: first step", first.is_file, run.trial("first", *named, str(time.time())), cache=cache)
        started = str(time.time())
        run.do(f"{variant}: training", trained, run.trial("train", *named, started), cache=cache)
        replay_all(run)


def is_trained(run: Run, variant: str) -> bool:
    from acceptance_trials import Variant

    marks = [entry["mark"] for entry in read_run(run.output, variant)["marks"]]
    return set(Variant.parse(variant).marks(run.settings["at"])) <= set(marks)


def read_run(output: Path, variant: str) -> dict[str, Any]:
    """`run.json` of a variant, without marks if it has not begun."""
    path = output / "runs" / variant / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"marks": []}


def kept_weights(run: Run) -> list[tuple[str, float]]:
    """Variants and seconds of all weights that were kept."""
    return [(v, entry["mark"]) for v in run.settings["variants"] for entry in read_run(run.output, v)["marks"]]


def replay_all(run: Run) -> None:
    """Acceptance of all that was kept, on all prompts, from the target's texts."""
    replayed = [run.output / "replay" / variant / f"{mark:g}.json" for variant, mark in kept_weights(run)]
    cache = run.output / "cache" / "replay"
    run.do("replay", lambda: all(path.is_file() for path in replayed), run.trial("replay"), cache=cache)


def measure_all(run: Run) -> None:
    """Of what was kept, what generators find that decode with it."""
    output, settings = run.output, run.settings
    kept = kept_weights(run)
    if not kept:
        return
    replay_all(run)
    # by generators, which take longer than the replay: the chosen ones
    chosen = dict(entry for entry in kept if entry[1] in settings["generate_at"])
    speeds = [output / "speed" / f"{variant}.json" for variant in chosen]
    run.do("speed", lambda: all(path.is_file() for path in speeds), run.trial("speed"))
    workers = settings["workers"]
    parts = [
        output / "generated" / variant / f"{mark:g}" / f"{shard}-of-{workers}.json"
        for variant, mark in kept
        for shard in range(workers)
        if mark in settings["generate_at"]
    ]
    commands = [run.trial("generate", "--shard", str(shard), str(workers)) for shard in range(workers)]
    run.do("z-lab's generator", lambda: all(path.is_file() for path in parts), *commands)


def collect(output: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All results of a folder, as tables and plot need them."""
    found: dict[str, Any] = {"settings": settings, "variants": {}}
    for name in ("read", "regenerate", "sampled", "pack"):
        path = output / f"{name}.json"
        found[name] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for variant in settings["variants"]:
        run = read_run(output, variant)
        for entry in run["marks"]:
            mark = f"{entry['mark']:g}"
            entry["replay"] = _acceptance(_merge([output / "replay" / variant / f"{mark}.json"]))
            workers = settings["workers"]
            parts = [output / "generated" / variant / mark / f"{i}-of-{workers}.json" for i in range(workers)]
            entry["generated"] = _acceptance(_merge(parts))
        for name, path in (("first", output / "runs" / variant / "first.json"), ("speed", _speed(output, variant))):
            run[name] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        found["variants"][variant] = run
    return found


def _speed(output: Path, variant: str) -> Path:
    return output / "speed" / f"{variant}.json"


def _merge(parts: Sequence[Path]) -> dict[str, Any]:
    """What several parts found, by set of prompts; nothing where one of them is missing."""
    if not all(path.is_file() for path in parts):
        return {}
    merged: dict[str, Any] = {}
    for path in parts:
        for name, part in json.loads(path.read_text(encoding="utf-8")).items():
            before = merged.setdefault(name, {"lengths": [], "proposed": [], "accepted": []})
            before["lengths"] += part["lengths"]
            before["proposed"], before["accepted"] = part["proposed"], part["accepted"]
    return merged


def _acceptance(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Acceptance length, its interval, and rates by position, for each set of prompts."""
    found = {}
    for name, part in parts.items():
        interval = bootstrap_interval(part["lengths"])
        counts = zip(part["proposed"], part["accepted"], strict=True)
        found[name] = {
            "length": round(acceptance_length(part["lengths"]), 4),
            "interval": [round(interval.lower, 4), round(interval.upper, 4)],
            "prompts": len(part["lengths"]),
            "by_position": [round(accepted / proposed, 4) if proposed else 0.0 for proposed, accepted in counts],
        }
    return found


def render(found: Mapping[str, Any]) -> str:
    """All tables."""
    tables = {"": curve_table, "### By position": position_table, "### First step, and speed": speed_table}
    parts = []
    for title, table in tables.items():
        head, rows = table(found)
        parts += [*([title] if title else []), markdown(head, rows)] if rows else []
    parts += facts(found)
    return "\n\n".join(parts)


def _length(part: Mapping[str, Any], name: str) -> str:
    if name not in part:
        return ""
    lower, upper = part[name]["interval"]
    return f"{part[name]['length']:.2f} ({lower:.2f}-{upper:.2f})"


def curve_table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line for each variant and time."""
    rows = []
    for variant, run in found["variants"].items():
        for entry in run["marks"]:
            lengths = [_length(entry[way], name) for way in ("replay", "generated") for name in SETS]
            loss = number(entry.get("held_out_loss"), ".3f")
            rows.append([variant, f"{entry['seconds']:.0f}", f"{entry['steps']}", loss, *lengths])
    prompts = {name: _prompts(found, name) for name in SETS}
    head = [f"{label} ({prompts[name]})" for name, label in SETS.items()]
    head = ["trainer", "training, s", "steps", "held-out loss", *head]
    return [*head, *(f"{label}, z-lab's generator" for label in SETS.values())], rows


def _prompts(found: Mapping[str, Any], name: str) -> int:
    entries = [entry for run in found["variants"].values() for entry in run["marks"]]
    return max((entry["replay"].get(name, {}).get("prompts", 0) for entry in entries), default=0)


def position_table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Share of the blocks accepted up to each position, after all of the training."""
    rows, positions = [], 0
    for variant, run in found["variants"].items():
        for name, label in SETS.items():
            last = run["marks"][-1] if run["marks"] else {"replay": {}}
            if name in last["replay"]:
                rates = last["replay"][name]["by_position"]
                positions = len(rates)
                rows.append([variant, f"{last['seconds']:.0f}", label, *(f"{rate:.3f}" for rate in rates)])
    return ["trainer", "training, s", "prompts", *(f"{k}" for k in range(1, positions + 1))], rows


def speed_table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """First steps, training steps, and tokens per second."""
    rows = []
    for variant, run in found["variants"].items():
        speed = run.get("speed") or {}
        trained = run.get("seconds") and run["done"] / run["seconds"]
        rates = [number((speed.get(way) or {}).get("tokens_per_second")) for way in ("greedy", "draftflow", "dflash")]
        equal = f"{speed['equal']} of {speed['prompts']}" if speed else ""
        cold = number((run.get("first") or {}).get("seconds"))
        warm = number(run.get("first_step_seconds"))
        rows.append([variant, cold, warm, number(trained and 1e3 / trained), *rates, equal])
    head = ["trainer", "first step cold, s", "warm, s", "ms/step", "greedy, tokens/s", "with ours, tokens/s"]
    return [*head, "with z-lab's, tokens/s", "prompts on which these agree"], rows


def facts(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines below the tables."""
    settings, step = found["settings"], found["settings"]["step"]
    regenerated, packed, sampled = found["regenerate"], found["pack"], found.get("sampled")
    if packed:
        train, held = packed["train"], packed["held_out"]
        yield (
            f"{train['conversations']:,} conversations to train on, {held['conversations']:,} held out; "
            f"{train['supervised_tokens']:,} response tokens in {train['rows']:,} rows, "
            f"{train['fill'] * 100:.0f} % full; "
            f"the target wrote {regenerated['tokens_per_second']:,.0f} tokens/s ({regenerated['device']})."
        )
        if sampled:
            yield (
                f"Of the responses {sampled['responses']:,} are sampled, up to {settings['samples']} of each prompt "
                f"at a temperature of {settings['temperature']:g}."
            )
    yield (
        f"{step['rows_per_step']} rows of {step['row_length']} tokens and {step['anchors_per_row']} anchors a row per "
        f"step, block {step['block_size']}, {DRAFTER['layers']} layers; {settings['new_tokens']} new tokens, greedy."
    )
    for variant, run in found["variants"].items():
        if "steps" in run:
            guard = run.get("guard")
            compiled = f", {guard['compiles_after_warmup']} compiles after warm-up" if guard else ""
            kept = run.get("feature_cache")
            kept = f", features kept of {kept['hits']:,} rows of {kept['hits'] + kept['misses']:,}" if kept else ""
            yield (
                f"{variant}: learning rate over {run['steps']} steps, rising over {run['warmup']}; "
                f"in {run['sittings']} sittings{compiled}{kept}."
            )
    yield from found.get("errors", [])
    if found.get("left_out"):
        yield "Left out for want of time: " + "; ".join(found["left_out"]) + "."
    if "command" in found:
        yield f"Made by `{found['command']}`."


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """Acceptance against minutes, one colour a variant, in the format of the file's suffix."""
    from draftflow.checks import plots

    def curves(axes: Any, _: Any) -> None:
        for color, (variant, run) in enumerate(found["variants"].items()):
            for (name, label), style in zip(SETS.items(), ("o-", "s--"), strict=True):
                entries = [entry for entry in run["marks"] if name in entry["replay"]]
                minutes = [entry["seconds"] / 60 for entry in entries]
                lengths = [entry["replay"][name]["length"] for entry in entries]
                errors = [
                    [abs(end - entry["replay"][name]["length"]) for end in entry["replay"][name]["interval"]]
                    for entry in entries
                ]
                lower, upper = zip(*errors, strict=True) if errors else ((), ())
                line = {"color": f"C{color}", "markersize": 4, "capsize": 2, "linewidth": 1.2}
                axes.errorbar(minutes, lengths, yerr=(lower, upper), fmt=style, label=f"{variant}, {label}", **line)
        axes.set(xlabel="minutes of training", ylabel="acceptance length (tokens per block)", title="Acceptance")
        axes.grid(alpha=0.3)
        if found["variants"]:
            axes.legend(frameon=False, fontsize=8)

    plots.save(path, curves, None)


def write_document(document: Path, text: str, plot: Path) -> None:
    """Put tables and plot between the markers of a document; the plot goes beside it.

    Raises:
        DraftflowError: it has no such markers.
    """
    beside = document.with_suffix(plot.suffix)
    replace_between(document, BEGIN, END, f"![Acceptance against minutes]({beside.name})\n\n{text}")
    shutil.copyfile(plot, beside)


def tiny_inputs(output: Path) -> dict[str, Path]:
    """A random target and a few prompts of the starter set, where none are named."""
    sys.path.append(str(ROOT / "tests" / "torch_env"))
    from tiny import make_target

    from draftflow.stage import Record
    from draftflow.target.prepare import prepare

    target, prompts = output / "target", output / "prompts"
    if not (target / "target.json").is_file():
        prepare({"source": str(make_target(output / "model"))}, None, target, Record("prepare_target"))
    lines = (ROOT / "data" / "starter" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    short = [line for line in lines if len(line) < 220]
    write_text(prompts / "prompts.jsonl", "".join(f"{line}\n" for line in short[:TINY_PROMPTS]))
    write_text(prompts / "humaneval.jsonl", "".join(f"{line}\n" for line in short[-4:]))
    return {"target": target, "prompts": prompts}


def make_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the steps are given; written to the output folder.

    Raises:
        DraftflowError: target or prompts are not named or not there, or the folder holds results of other settings.
    """
    import torch
    from acceptance_trials import Variant

    path = arguments.output / "settings.json"
    given = {"target": arguments.target, "prompts": arguments.prompts}
    if arguments.tiny:
        made = tiny_inputs(arguments.output)
        given = {name: value or made[name] for name, value in given.items()}
    for name, value in given.items():
        if value is None or not value.is_dir():
            raise DraftflowError(f"There is no folder of the {name}.", f"Name it with --{name}.", str(value or ""))
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    variants = arguments.variant or before.get("variants", ["draftflow", "specforge"])
    parsed, at = [Variant.parse(variant) for variant in variants], sorted(arguments.at or AT)
    for variant in parsed:
        variant.marks(at)
    if arguments.peers is None and any(variant.trainer == "specforge" for variant in parsed):
        raise DraftflowError(
            "It is not said where the peers are.", "Name the folder of benchmarks/peers.py.", "--peers"
        )
    size = TINY if arguments.tiny else FULL
    step = {**size["step"], "precision": "auto"}
    step["drafter"] = {**DRAFTER, "block_size": step["block_size"]}
    settings = {
        **size,
        "step": step,
        "target": str(given["target"].resolve()),
        "prompts": str((given["prompts"] / "prompts.jsonl").resolve()),
        "humaneval": str((given["prompts"] / "humaneval.jsonl").resolve()),
        "peers": None if arguments.peers is None else str(arguments.peers.resolve()),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "seed": arguments.seed,
        "at": at,
        "generate_at": sorted(arguments.generate_at or at),
        "variants": variants,
    }
    for name in ("workers", "held_out_prompts", "batch", "samples", "temperature"):
        if getattr(arguments, name) is not None:
            settings[name] = getattr(arguments, name)
    # a folder of before a setting was there has its default
    changed = [name for name in FIXED if before and before.get(name, size.get(name)) != settings[name]]
    if changed:
        raise DraftflowError(
            f"The folder holds results of another {changed[0]}.", "Give these a folder of their own.", str(path.parent)
        )
    settings["variants"] = list(dict.fromkeys([*before.get("variants", []), *variants]))
    write_json(path, settings)
    return settings


# What all results of one folder have in common.
FIXED = (
    "target",
    "prompts",
    "humaneval",
    "device",
    "seed",
    "step",
    "response_tokens",
    "samples",
    "temperature",
    "held_out_prompts",
    "at",
    "workers",
)


def run_all(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Everything that fits into the time, and its results."""
    deadline = time.time() + arguments.seconds
    settings = make_settings(arguments)
    run = Run(arguments.output, settings, deadline)
    if make_dataset(run):
        train_all(run, arguments.variant or settings["variants"])
        measure_all(run)
    found = collect(arguments.output, settings)
    found |= {"left_out": run.left_out, "errors": run.errors, "command": command}
    write_json(arguments.output / "results.json", found)
    return found


def parse(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument("--target", type=Path, help="prepared target")
    parser.add_argument("--prompts", type=Path, help="folder of benchmarks/prompts.py")
    parser.add_argument("--peers", type=Path, help="folder of benchmarks/peers.py")
    parser.add_argument("--variant", action="append", help="a trainer, as draftflow,loss=kl,lr=1e-3; may be repeated")
    parser.add_argument("--at", type=float, action="append", help=f"seconds at which weights are kept; default {AT}")
    parser.add_argument(
        "--generate-at", type=float, action="append", help="those that generators are used on; default all"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="for this call; what does not fit is left out")
    parser.add_argument("--held-out-prompts", type=int, help=f"to evaluate on; default {FULL['held_out_prompts']}")
    parser.add_argument("--samples", type=int, help="responses of each prompt beside the greedy one; default none")
    parser.add_argument("--temperature", type=float, help=f"of these; default {FULL['temperature']}")
    parser.add_argument("--batch", type=int, help=f"responses that are written together; default {FULL['batch']}")
    parser.add_argument("--workers", type=int, help=f"processes that generate at once; default {FULL['workers']}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a look on a CPU")
    parser.add_argument("--write", type=Path, help="the document that holds the tables; nothing is run")
    return parser.parse_args(line)


def main() -> None:
    """Do what there is time for, print the tables, and write them and the plot."""
    arguments = parse()
    if arguments.write:
        path = arguments.output / "results.json"
        if not path.is_file():
            raise DraftflowError("There are no results.", "Run the benchmark first.", str(path))
        found = json.loads(path.read_text(encoding="utf-8"))
    else:
        found = run_all(arguments, shlex.join(["python", "benchmarks/acceptance.py", *sys.argv[1:]]))
    text, plot = render(found), arguments.output / "acceptance.svg"
    print(text)
    write_text(arguments.output / "acceptance.md", text + "\n")
    try:
        draw(plot, found)
    except ModuleNotFoundError as error:
        say(f"no plot: there is no {error.name} here; --write draws it where there is")
        return
    if arguments.write:
        write_document(arguments.write, text, plot)


if __name__ == "__main__":
    run_stage(main)
