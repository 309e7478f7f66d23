"""Did training run the compiled code that warm-up made, and nothing else? From records; standard library only."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftflow.checks.result import Check

# Counts of `compile_cache.guard.Guard` that must be zero once the cache is warm
SURPRISES = ("compiles_after_warmup", "graph_breaks", "fx_graph_misses", "fx_graph_bypasses", "autograd_misses")

KERNEL = re.compile(r"triton_tem_fused_\w*flex_attention\w*")


def compile_checks(trained: dict[str, Any], warmed: dict[str, Any], cache: Path, mode: str) -> list[Check]:
    """Findings on compilation.

    Args:
        trained: `train.json`.
        warmed: `warm.json`.
        cache: the warmed folder.
        mode: `checks.compile`: `warn` lets a failure pass, with a warning.
    """
    guard = trained["guard"]
    found = {name: guard[name] for name in SURPRISES if guard[name]}
    words = [f"{count} {name.replace('_', ' ')}" for name, count in found.items()]
    detail = f": {'; '.join(words + guard['recompiles'])}" if found else ""
    checks = [
        Check(
            "compile_surprises",
            not found,
            sum(found.values()),
            "0 events",
            f"Compiles, graph breaks and cache misses in training after warm-up{detail}.",
            "guard in train.json, and `snakemake --forcerun warm_cache`",
        ),
        Check(
            "compile_hits",
            guard["fx_graph_hits"] >= 1,
            guard["fx_graph_hits"],
            ">= 1 graph",
            "Graphs that training took from the warm cache: without any, it did not run compiled code.",
            "guard in train.json, and TORCH variables of the environment",
        ),
    ]
    if warmed["holds"]["plan"]["device_kind"] == "cuda":
        checks.append(fused_check(cache))
    return [_only_warn(check) if mode == "warn" and not check.passed else check for check in checks]


def fused_check(cache: Path) -> Check:
    """The compiled code calls flex_attention's fused kernels, forward and backward.

    A dense call in training needs no check: it ends training (drafter/attention.py).
    """
    kernels: set[str] = set()
    for path in cache.rglob("*.py"):
        kernels.update(KERNEL.findall(path.read_text(encoding="utf-8", errors="replace")))
    backward = {name for name in kernels if "backward" in name}
    return Check(
        "compile_fused_attention",
        bool(backward) and backward < kernels,
        f"{len(kernels - backward)} forward, {len(backward)} backward",
        ">= 1 of each",
        "Fused kernels of flex_attention in the code of the warm cache, by name.",
        f"the code in {cache}, and drafter/attention.py",
    )


def _only_warn(check: Check) -> Check:
    return replace(check, passed=True, warning=f"{check.figure}, should be {check.limit}: {check.explanation}")
