"""Cold warm-up and warm start, by shape: seconds by phase, hits and misses, and what becomes of a cache that is moved.

    PYTHONPATH=src python benchmarks/warm_start.py --shape smollm2 --shape qwen3-8b --output warm_start.json

Runs with the torch of its interpreter, on all GPUs that it sees, or on the CPU. Each shape is warmed in a new folder by
the stage that the workflow runs. Then the folder is moved, and a fresh process starts on it; and its bundle is unpacked
elsewhere, the folder deleted, and a fresh process starts on that.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from targets import SHAPES, make_target, step_settings

from draftflow.compile_cache import bundle, location, manifest
from draftflow.compile_cache.warm import WarmUp, warm
from draftflow.environment.fingerprint import take
from draftflow.stage import Record, write_json


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Everything for one shape, in an empty folder."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    ids = list(range(torch.cuda.device_count())) if kind == "cuda" else [0]
    target = make_target(folder / "target", name)
    torch.cuda.empty_cache()
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.pop(variable, None)  # torch sets them in its own process
    write_json(folder / "install.json", {"packages": {}})
    write_json(folder / "fingerprint.json", take({"packages": {}}))
    work = WarmUp(step_settings(name, kind, device.lower().replace(" ", "-"), ids), folder / "fingerprint.json", target)
    record = Record("warm_cache")
    warm(work, folder / "one/cache", False, record)
    record["folder"] = f"../cache/{record['key']}"
    record.write(folder / "one/step/warm.json")

    shutil.move(folder / "one", folder / "two")
    moved = folder / "two/cache" / record["key"]
    found = {"device": device, "torch": torch.__version__, "warm_up": record.facts | {"seconds": record.seconds}}
    found["moved"] = start(work, moved)

    packed = bundle.pack(folder / "two/step/warm.json", folder / "bundle.tar.xz")
    shutil.rmtree(folder / "two")
    began = time.perf_counter()
    unpacked = bundle.unpack(folder / "bundle.tar.xz", folder / "three" / record["key"], record["holds"])
    seconds = round(time.perf_counter() - began, 3)
    found["bundle"] = {
        "bytes": packed["bytes"],
        "unpacked_bytes": unpacked["unpacked_bytes"],
        "unpack_seconds": seconds,
        "start": start(work, folder / "three" / record["key"]),
    }
    return found


def start(work: WarmUp, folder: Path) -> dict[str, Any]:
    """A fresh process on a cache; what it did to the folder beside."""
    manifest.relocate(folder)
    found = work.on(0, location.prepare(folder))
    after = manifest.examine(folder)
    return {**found, "changed_files": [*after.damaged, *after.foreign]}


def row(name: str, what: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    caches = found["caches"]
    hits, misses = (sum(cache[key] for cache in caches.values()) for key in ("hits", "misses"))
    phases = "  ".join(f"{phase} {seconds:6.2f}" for phase, seconds in found["phases"].items())
    tuned = found["counts"]["benchmarks"]
    times = f"{found['first_pass_seconds']:7.2f} s  {phases}  step {found['step_seconds'] * 1e3:7.1f} ms"
    return f"{name:10} {what:8} {times}  {hits:4} hits {misses:4} misses {tuned:4} timed kernels"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.shape:
        with tempfile.TemporaryDirectory(prefix="draftflow-") as folder:
            found = results[name] = measure(name, Path(folder))
        lines = [(device["device"], device) for device in found["warm_up"]["devices"]]
        lines += [("proof", found["warm_up"]["proof"]), ("moved", found["moved"]), ("bundle", found["bundle"]["start"])]
        for what, facts in lines:
            print(row(name, what, facts), flush=True)
        write_json(arguments.output, results)


if __name__ == "__main__":
    main()
