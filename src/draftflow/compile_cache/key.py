"""The key of a compile cache: what invalidates it, in a form in which a miss can be explained. No torch."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import draftflow
from draftflow.compile_cache.location import SETTINGS
from draftflow.errors import DraftflowError
from draftflow.training.plan import Plan, plan_differences, plan_id

# The code that is compiled, and the code that decides what it is called with.
COMPILED = (
    "drafter/attention.py",
    "drafter/block_attention.py",
    "drafter/block_attention_kernels.py",
    "drafter/float8.py",
    "drafter/float8_kernels.py",
    "drafter/loss.py",
    "drafter/mask.py",
    "drafter/model.py",
    "drafter/softmax_kernels.py",
    "target/attention.py",
    "target/features.py",
    "target/replayed.py",
    "training/adamw_kernel.py",
    "training/features.py",
    "training/optimizer.py",
    "training/step.py",
)


# Of the flags of /proc/cpuinfo, those that a compiler may use: of x86-64 and of ARM
INSTRUCTIONS = re.compile(
    r"(sse|ssse|avx|amx|fma|f16c|bmi|abm|popcnt|lzcnt|movbe|gfni|vaes|vpclmul|aes|sha|adx|asimd|sve|bf16|i8mm|fphp)\w*"
)

REMEDY = "Run `snakemake --forcerun warm_cache`."


def contents(compile_part: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """What the key is made of: the fingerprint, the compiler's settings, the sources, the plan.

    Args:
        compile_part: `fingerprint.json`'s part `compile`: `digest` and `fields`.
        plan: the static shapes.
    """
    package = Path(draftflow.__file__).parent
    sources = {name: hashlib.sha256((package / name).read_bytes()).hexdigest()[:12] for name in COMPILED}
    return {
        "fingerprint": dict(compile_part),
        "CPU": cpu_instructions() if plan.device_kind == "cpu" else [],
        "settings": SETTINGS,
        "sources": sources,
        "plan": asdict(plan),
        "plan_id": plan_id(plan),
    }


def cpu_instructions(path: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The vector and arithmetic instructions of this CPU, for which C++ kernels are built (-march=native)."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return sorted(flag for flag in set(flags) if INSTRUCTIONS.fullmatch(flag))


def cache_key(held: Mapping[str, Any]) -> str:
    """12 hexadecimal digits over the fingerprint's digest, settings, digests of the sources and the id of the plan."""
    parts = [held["fingerprint"]["digest"], held["CPU"], held["settings"], held["sources"], held["plan_id"]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What differs between the contents of two keys, in words: `torch git 70d99e9 -> 449b176`."""
    found = []
    before, now = recorded["fingerprint"]["fields"], current["fingerprint"]["fields"]
    if recorded["fingerprint"]["digest"] != current["fingerprint"]["digest"]:
        found += plan_differences(before, now)
    found += cpu_differences(recorded["CPU"], current["CPU"])
    found += plan_differences(recorded["settings"], current["settings"])
    for name in COMPILED:
        if recorded["sources"].get(name) != current["sources"][name]:
            found.append(f"{name} was edited")
    if recorded["plan_id"] != current["plan_id"]:
        found += plan_differences(recorded["plan"], current["plan"])
    return found


def cpu_differences(recorded: Iterable[str], current: Iterable[str]) -> list[str]:
    """What differs between the instructions of two CPUs, in words: `another CPU, without avx512f`."""
    before, now = set(recorded), set(current)
    changes = [
        *(f"without {name}" for name in sorted(before - now)),
        *(f"with {name}" for name in sorted(now - before)),
    ]
    return [f"another CPU, {', '.join(changes)}"] if changes else []


def require_warm(warm_record: Path, held: Mapping[str, Any]) -> Path:
    """The warmed cache folder that a warm-up recorded for exactly this key.

    Args:
        warm_record: `warm.json`.
        held: `contents` of the run that is about to start.

    Raises:
        DraftflowError: there was no warm-up, or it was for something else.
    """
    record, folder = read_warm(warm_record)
    if record["key"] != cache_key(held):
        found = ", ".join(differences(record["holds"], held))
        raise DraftflowError(f"The compile cache was warmed for something else: {found}.", REMEDY, str(warm_record))
    return folder


def read_warm(warm_record: Path) -> tuple[dict[str, Any], Path]:
    """Of the record of a warm-up, `key`, `holds` and `devices` (names); and the cache folder that it names.

    Raises:
        DraftflowError: there was no warm-up, or its record cannot be read.
    """
    try:
        record = json.loads(warm_record.read_text(encoding="utf-8"))
        folder = warm_record.parent / record["folder"]
        devices = [device["device"] for device in record["devices"]]
        return {"key": record["key"], "holds": record["holds"], "devices": devices}, folder
    except FileNotFoundError:
        raise DraftflowError("The compile cache was not warmed.", REMEDY, str(warm_record)) from None
    except (ValueError, KeyError, TypeError):
        raise DraftflowError("The record of the warm-up cannot be read.", REMEDY, str(warm_record)) from None


def require_folder(folder: Path) -> None:
    """See that a warmed cache folder is there; whoever calls this holds it, so that none is just being made.

    Raises:
        DraftflowError: it is gone.
    """
    if not folder.is_dir():
        raise DraftflowError(f"The warmed compile cache {folder} is gone.", REMEDY)
