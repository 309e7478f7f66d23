"""Stage: compile the step once per device, one device after the other, and prove that a fresh process finds it.

Compiling happens here and nowhere else. Every device runs the very step of training, in all shapes of the plan, in a
process of its own that sees no other device. The cache folder is named by its key (see key.py); what is in
it from an earlier warm-up is kept unless a fresh start is asked for.
No torch in this process.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftflow.compile_cache import key, location
from draftflow.errors import DraftflowError
from draftflow.stage import Record, run_stage, say, stage_parser
from draftflow.training.devices import Devices, from_settings, process_environment, threads_per_process
from draftflow.training.plan import plan_of_run


@dataclass(frozen=True)
class WarmUp:
    """A warm-up: settings of the step, and the paths that its processes need."""

    settings: dict[str, Any]
    fingerprint: Path
    target: Path

    @property
    def devices(self) -> Devices:
        """The devices of the run."""
        return from_settings(self.settings)

    def on(self, rank: int, compile_environment: dict[str, str]) -> dict[str, Any]:
        """Exercise the step in a fresh process on the device of `rank`; see `exercise.exercise` for the result.

        Raises:
            DraftflowError: the process failed.
        """
        devices = self.devices
        environment = {**os.environ, **compile_environment, **threads_per_process(devices)}
        environment |= process_environment(devices, rank)
        with tempfile.TemporaryDirectory(prefix="draftflow-") as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", "draftflow.compile_cache.exercise"]
            command += ["--settings", json.dumps(self.settings), "--world-size", str(devices.count)]
            for name, path in [("fingerprint", self.fingerprint), ("target", self.target)]:
                command += [f"--{name}", str(path)]
            start = time.perf_counter()
            done = subprocess.run(
                [*command, "--result", str(result)], env=environment, stderr=subprocess.PIPE, text=True, check=False
            )
            seconds = time.perf_counter() - start
            found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        if "refusal" in found:
            raise DraftflowError(**found["refusal"])
        if done.returncode or not found:
            raise _failed(f"{devices.kind}:{devices.ids[rank]}", done)
        return {"process_seconds": round(seconds, 3), **found}


def warm(work: WarmUp, cache: Path, fresh: bool, record: Record) -> None:
    """Warm the cache below `cache` on all devices in turn, prove it, and put what happened into `record`.

    Raises:
        DraftflowError: a device failed, or a fresh process missed something after all.
    """
    devices = work.devices
    _, plan = plan_of_run(work.settings, work.target, devices.kind, devices.count)
    held = key.contents(json.loads(work.fingerprint.read_text(encoding="utf-8"))["compile"], plan)
    folder = cache / key.cache_key(held)
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    environment = location.prepare(folder)
    record["key"], record["holds"] = folder.name, held
    record["devices"] = []
    for rank, device in enumerate(devices.ids):
        name = f"{devices.kind}:{device}" if devices.kind == "cuda" else "cpu"
        say(f"{name}: compiling the step" if rank == 0 else f"{name}: the same kind of device, loading")
        with record.part(name):
            found = work.on(rank, environment)
        counts = found["counts"]
        cold = counts["fx_graph_misses"] > 0
        record["devices"].append({"device": name, "cold": cold, **found})
        say(f"{name}: {'cold' if cold else 'warm'}, {found['first_pass_seconds']:.1f} s, {_hits(counts)}")
        if devices.kind == "cpu":
            break  # processes on CPUs are all alike
    with record.part("proof"):
        proof = work.on(0, environment)
    say(f"proof in a fresh process: {proof['first_pass_seconds']:.1f} s, {_hits(proof['counts'])}")
    record["proof"] = proof
    record["cold_seconds"] = record["devices"][0]["first_pass_seconds"]
    record["warm_seconds"] = proof["first_pass_seconds"]
    record["size_bytes"] = location.size_bytes(folder)
    counts = proof["counts"]
    missed = {
        name: counts[name] for name in ("fx_graph_misses", "fx_graph_bypasses", "autograd_misses") if counts[name]
    }
    if missed or not counts["fx_graph_hits"]:
        raise DraftflowError(
            f"A fresh process did not find what was just compiled: {missed or 'it looked for nothing'}.",
            "Look for a TORCH or TRITON setting that changes between processes, then run "
            "`snakemake --forcerun warm_cache`.",
            str(folder),
        )


def _hits(counts: dict[str, Any]) -> str:
    return f"{counts['fx_graph_hits']} hits, {counts['fx_graph_misses']} misses"


def _failed(device: str, done: "subprocess.CompletedProcess[str]") -> DraftflowError:
    lines = done.stderr.strip().splitlines()
    sys.stderr.write(done.stderr)
    last = lines[-1] if lines else f"it ended with status {done.returncode}"
    return DraftflowError(f"Compiling failed: {last}.", "The whole message is above.", device)


def main() -> None:
    """Warm the compile cache of a run."""
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--fingerprint", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--target", type=Path, required=True, help="folder of the prepared target")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the compile caches of this device kind")
    parser.add_argument("--fresh", action="store_true", help="start from an empty folder of this key")
    parser.add_argument("--record", type=Path, required=True, help="warm.json")
    arguments = parser.parse_args()
    record = Record("warm_cache", settings=arguments.settings)
    arguments.record.unlink(missing_ok=True)  # an interrupted warm-up must not look like the one before
    work = WarmUp(arguments.settings, arguments.fingerprint, arguments.target)
    warm(work, arguments.cache, arguments.fresh, record)
    # relative, so that the project folder can be moved with its warm cache
    record["folder"] = os.path.relpath(arguments.cache / record["key"], arguments.record.parent)
    record.write(arguments.record)
    say(f"compile cache {record['key']}: cold {record['cold_seconds']:.1f} s, warm {record['warm_seconds']:.1f} s")


if __name__ == "__main__":
    run_stage(main)
