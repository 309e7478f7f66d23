"""The process that `warm` starts on one device: run the step in every shape of the plan, and say what that took."""

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftflow.stage import as_refusal, write_json
from draftflow.training.devices import from_settings

KERNEL = re.compile(r"(triton|draftflow)_\w+")


def exercise(settings: dict[str, Any], rank: int, fingerprint: Path, target: Path) -> dict[str, Any]:
    """What `rank` runs: training steps and an evaluation, or the target; what follows shows that all is compiled.

    Args:
        settings: what shapes the step.
        rank: of the first node; it has a role, and trains, runs the target, or both.
        fingerprint: `fingerprint.json`.
        target: folder of the prepared target.

    Returns:
        kind: the model of the GPU, or `cpu`. counts: of the compile guard. caches: hits and misses of each. graphs:
        that were traced.
        first_pass_seconds: the first step and the evaluation, which compile or load; phases: where they went, of which
        `other` is running, importing and starting the device. step_seconds: of the third step, without the target, or
        of the target. parts: seconds of the process from its start to the end of the first pass. kernels: Triton's, by
        name, that another step launches on a GPU.
        peak_memory_bytes: of the process; memory_bound_bytes: by part, of a step on a GPU.
    """
    started = _since_start()
    import torch

    from draftflow.compile_cache.caches import artefacts, hits_and_misses, loaded_libraries, requests
    from draftflow.compile_cache.guard import Guard
    from draftflow.compile_cache.location import as_fingerprinted, folder_in_use
    from draftflow.compile_cache.timing import phases
    from draftflow.drafter.attention import forbid_dense
    from draftflow.drafter.loss import Objective, default_gamma
    from draftflow.environment.fingerprint import require_same
    from draftflow.training.data import rows_of_one_token
    from draftflow.training.features import Given, Source
    from draftflow.training.memory import step_bound
    from draftflow.training.optimizer import Hyperparameters
    from draftflow.training.plan import plan_of_run
    from draftflow.training.process import load_source, make_batches, make_process, peak_memory_bytes, use_device

    parts = {"interpreter": started, "imports": _since_start() - started}

    def finish() -> float:
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = finish()
        result = work()
        parts[name] = finish() - start
        return result

    devices = from_settings(settings)
    kind, role = devices.kind, devices.role(rank)
    folder = folder_in_use()
    assert folder is not None
    before = artefacts(folder)
    with as_fingerprinted(json.loads(fingerprint.read_text())["compile"]["fields"]):
        timed("fingerprint", lambda: require_same(fingerprint))
    # misses are what a cold device is for; surprises are the second step's
    guard = Guard("error", warm=False)
    shape, plan = plan_of_run(settings, target, kind, devices.count)
    objective = Objective(plan.loss, default_gamma(plan.block_size))
    hyper = Hyperparameters(steps=4, objective=objective, optimizer=plan.optimizer)
    rows = rows_of_one_token(plan, plan.rows)
    device = use_device(plan)
    batch = make_batches(plan, hyper, (rows, rows), 0, devices.count).train(0).to(device)
    source: Source
    if role == "target":
        loaded, source = timed("load", lambda: load_source(plan, (rows, rows), target, 0.0, device))

        def work(number: int) -> Any:
            return source(batch)
    else:
        # a device of a drafter alone need not have room for the target
        given = Given(plan, device) if role == "drafter" else None
        process = timed("load", lambda: make_process(shape, plan, hyper, (rows, rows), target, 0.0, source=given))
        loaded, source, step = process.step.target, process.source, process.step

        def work(number: int) -> Any:
            return step.train(batch, number)

    weights = sum(value.numel() * value.element_size() for value in loaded.model.parameters())
    with forbid_dense(), phases() as found, requests() as asked:
        features = timed("target", lambda: source(batch))
        if role != "target":
            step.source = lambda _: features
            timed("train", lambda: step.train(batch, 0))
            timed("evaluate", lambda: step.evaluate([batch]))
        guard.seal()
        if kind == "cuda":  # where the target is compiled, and what it made must serve other documents
            source(replace(batch, host_document_ids=torch.arange(plan.row_length).expand(plan.rows, -1) // 100))
        work(1)  # in which a GPU may record it
        start = finish()
        work(2)
        seconds = finish() - start
        guard.check()
    counts = guard.counts()
    peak = peak_memory_bytes(device)
    first_pass = sum(parts.get(name, 0.0) for name in ("target", "train", "evaluate"))
    by_phase = found.rounded()
    return {
        "kind": torch.cuda.get_device_name() if kind == "cuda" else "cpu",
        "counts": counts,
        "caches": hits_and_misses(folder, before, counts, asked, loaded_libraries(folder)),
        "graphs": counts["fx_graph_hits"] + counts["fx_graph_misses"] + counts["fx_graph_bypasses"],
        "first_pass_seconds": round(first_pass, 3),
        "phases": {**by_phase, "other": round(max(0.0, first_pass - sum(by_phase.values())), 3)},
        "step_seconds": round(seconds, 4),
        "parts": {name: round(value, 3) for name, value in parts.items()},
        "kernels": kernels_of(lambda: work(3)) if kind == "cuda" else None,
        "peak_memory_bytes": peak,
        "memory_bound_bytes": step_bound(plan, weights) if kind == "cuda" and role != "target" else None,
    }


def kernels_of(work: Callable[[], Any]) -> dict[str, int]:
    """Triton kernels that `work` launches on the GPU: name -> number of launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    events = found.key_averages()
    return {event.key: event.count for event in events if KERNEL.fullmatch(event.key)}


def _since_start() -> float:
    """Seconds since the kernel started this process."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Exercise the step and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--rank", type=int, required=True)
    for name in ("fingerprint", "target", "result"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    paths = (arguments.fingerprint, arguments.target)
    try:
        result = exercise(arguments.settings, arguments.rank, *paths)
    except Exception as error:
        refusal = as_refusal(error)
        if refusal is None:
            raise
        result = {"refusal": refusal.parts()}
    write_json(arguments.result, result)


if __name__ == "__main__":
    main()
