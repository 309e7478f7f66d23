"""The process that `warm` starts on one device: run the step in every shape of the plan, and say what that took."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from draftflow.errors import DraftflowError
from draftflow.stage import write_json


def exercise(settings: dict[str, Any], world_size: int, fingerprint: Path, target: Path) -> dict[str, Any]:
    """Two training steps and an evaluation; the second step shows that the first left nothing to compile.

    Returns:
        counts: of the compile guard. first_pass_seconds: the first step and the evaluation, which compile or load.
        step_seconds: of the second step. phases: torch.compile's own timers, seconds, at least 0.05; they nest.
        peak_memory_bytes: of the process.
    """
    import torch
    from torch._dynamo.utils import compilation_time_metrics

    from draftflow.compile_cache.guard import Guard
    from draftflow.compile_cache.location import as_fingerprinted
    from draftflow.drafter.attention import forbid_dense
    from draftflow.drafter.loss import default_gamma
    from draftflow.environment.fingerprint import require_same
    from draftflow.training.data import rows_of_one_token
    from draftflow.training.optimizer import Hyperparameters
    from draftflow.training.plan import plan_of_run
    from draftflow.training.process import make_process, peak_memory_bytes

    with as_fingerprinted(json.loads(fingerprint.read_text())["compile"]["fields"]):
        require_same(fingerprint)
    # misses are what a cold device is for; surprises are the second step's
    guard = Guard("error", warm=False)
    kind = settings["devices"]["kind"]
    shape, plan = plan_of_run(settings, target, kind, world_size)
    hyper = Hyperparameters(steps=2, gamma=default_gamma(plan.block_size))
    rows = rows_of_one_token(plan, plan.rows)
    process = make_process(shape, plan, hyper, (rows, rows), target, feature_cache_gb=0.0)

    def finish() -> float:
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with forbid_dense():
        batch = process.batches.train(0).to(process.device)
        features = process.source(batch)
        process.step.source = lambda _: features  # the target is not compiled; once is enough
        start = finish()
        process.step.train(batch, 0)
        process.step.evaluate([batch])
        first_pass = finish() - start
        guard.seal()
        start = finish()
        process.step.train(batch, 1)
        seconds = finish() - start
        guard.check()
    phases = {name: round(sum(times), 3) for name, times in compilation_time_metrics.items() if sum(times) >= 0.05}
    return {
        "counts": guard.counts(),
        "first_pass_seconds": round(first_pass, 3),
        "step_seconds": round(seconds, 3),
        "phases": dict(sorted(phases.items(), key=lambda item: -item[1])),
        "peak_memory_bytes": peak_memory_bytes(process.device),
    }


def main() -> None:
    """Exercise the step and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    for name in ("fingerprint", "target", "result"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    paths = (arguments.fingerprint, arguments.target)
    try:
        result = exercise(arguments.settings, arguments.world_size, *paths)
    except DraftflowError as error:
        result = {"refusal": {"what": error.what, "remedy": error.remedy, "where": error.where}}
    write_json(arguments.result, result)


if __name__ == "__main__":
    main()
