"""Did training run the compiled code that warm-up made, and nothing else? From records; standard library only."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draftflow.checks.result import Check, not_run

# Counts of `compile_cache.guard.Guard` that must be zero once the cache is warm
SURPRISES = (
    "compiles_after_warmup",
    "graph_breaks",
    "fx_graph_misses",
    "fx_graph_bypasses",
    "autograd_misses",
    "autograd_bypasses",
    "benchmarks",
    "kernels_built",
)

KERNEL = re.compile(r"triton_tem_fused_\w*flex_attention\w*|draftflow_attention_\w+")


def compile_checks(trained: dict[str, Any], warmed: dict[str, Any], mode: str) -> list[Check]:
    """Findings on compilation.

    Args:
        trained: `train.json`.
        warmed: `warm.json`.
        mode: `checks.compile`: `warn` lets a failure pass, with a warning.
    """
    targets = trained.get("target_guard") or []
    ranks = [*trained["guard"], *targets]
    on_gpus = warmed["holds"]["plan"]["device_kind"] == "cuda"
    total = {name: sum(counts[name] for counts in ranks) for name in SURPRISES}
    reasons = [reason for counts in ranks for reason in counts["reasons"]]
    # on CPUs the target is not compiled
    hits = min(counts["fx_graph_hits"] for counts in (ranks if on_gpus else trained["guard"]))
    checks = [
        _surprises(
            "compile_surprises",
            total,
            reasons,
            f"Compiles, graph breaks and cache misses in training after warm-up, of {len(ranks)} processes",
        ),
        Check(
            "compile_hits",
            hits >= 1,
            hits,
            ">= 1 graph",
            "Graphs that each training process took from the warm cache: without any, it did not run compiled code.",
            "guard in train.json, and TORCH variables of the environment",
        ),
    ]
    if on_gpus:
        checks += [fused_check(warmed["proof"]["kernels"]), memory_check(warmed["memory"])]
    return [_only_warn(check, mode) for check in checks]


def stage_check(stage: str, counts: Mapping[str, Any], mode: str) -> Check:
    """Finding on a stage after training that compiles nothing, or finds all of it in the warm cache.

    Args:
        stage: name of the stage, in the name of the finding.
        counts: of its guard.
        mode: `checks.compile`.
    """
    total = {name: counts[name] for name in SURPRISES}
    explanation = f"Compiles, graph breaks and cache misses in check_{stage}"
    return _only_warn(_surprises(f"{stage}_compile", total, counts["reasons"], explanation), mode)


def fused_check(kernels: Mapping[str, int]) -> Check:
    """The step launches fused kernels of attention, forward and backward: our own, or flex_attention's.

    A dense call needs no check: it ends training (drafter/attention.py).

    Args:
        kernels: launches of one step, by name, as the profiler of the GPU saw them in warm-up's proof.
    """
    if not kernels:
        return not_run(
            "compile_fused_attention", "the profiler gave no kernels", ">= 1 of each", "proof.kernels in warm.json"
        )
    fused = {name for name in kernels if KERNEL.fullmatch(name)}
    backward = {name for name in fused if "backward" in name}
    return Check(
        "compile_fused_attention",
        bool(backward) and backward < fused,
        f"{len(fused - backward)} forward, {len(backward)} backward",
        ">= 1 of each",
        "Fused kernels of attention that the step launches, by name.",
        "proof.kernels in warm.json, and drafter/attention.py",
    )


def memory_check(memory: Mapping[str, Any]) -> Check:
    """The step takes no more of the GPU than its tensors can: something that should not be there would be large."""
    peak, bound = memory["peak_bytes"]["gpu"], memory["bound_bytes"]
    return Check(
        "compile_memory",
        peak <= bound,
        peak,
        f"<= {bound} bytes",
        "Largest memory of one step on the GPU, against the sum of what it holds.",
        "memory in warm.json, by part, and training/memory.py",
    )


def _surprises(name: str, total: Mapping[str, int], reasons: list[str], explanation: str) -> Check:
    found = {what: count for what, count in total.items() if count}
    words = [f"{count} {what.replace('_', ' ')}" for what, count in found.items()]
    detail = f": {'; '.join(words + reasons[:5])}" if found else ""
    return Check(
        name,
        not found,
        sum(found.values()),
        "0 events",
        f"{explanation}{detail}.",
        "guard in the record, and `snakemake --forcerun warm_cache`",
    )


def _only_warn(check: Check, mode: str) -> Check:
    if mode != "warn" or check.passed:
        return check
    return replace(check, passed=True, warning=f"{check.figure}, should be {check.limit}: {check.explanation}")
