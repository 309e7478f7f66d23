"""The two ways to bring a warmed compile cache elsewhere, measured: the folders as a bundle, and torch's own artifacts.

    PYTHONPATH=src python3 benchmarks/bundle.py --shape smollm2 --output results.json

On the device that torch sees, the drafter's compiled layers run forward and backward, and forward without gradients,
which are the graphs of training. Every line of the table is a process of its own:

    cold        an empty folder
    in place    the same folder
    renamed     the same folder, renamed and nothing else
    folders     draftflow.compile_cache.bundle, unpacked under another path after the first folder was deleted
    artifacts   torch.compiler.save_cache_artifacts() of the cold process, loaded into an empty folder

Kernels are counted by the libraries and GPU binaries that a process writes: the caches of graphs can hit, and every
kernel be compiled all the same. Below comes what compressions make of the archive of the folder.

The interpreter needs torch and transformers, and no network.
"""

import argparse
import gzip
import io
import json
import lzma
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from draftflow.compile_cache import bundle, key, location, manifest
from draftflow.stage import write_json
from draftflow.training.plan import Plan, make_plan

# Sizes of two targets, and what their drafter is trained with on each kind of device.
TARGETS = {
    "smollm2": {
        "target": {"hidden_size": 576, "intermediate_size": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64},
        "rope_theta": 100000.0,
        "vocab_size": 49152,
        "drafter": {"layers": 2, "block_size": 8},
        "cpu": {"row_length": 256, "rows_per_step": 2, "anchors_per_row": 16},
        "cuda": {"row_length": 256, "rows_per_step": 8, "anchors_per_row": 32},
    },
    "qwen3-8b": {
        "target": {"hidden_size": 4096, "intermediate_size": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128},
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
        "drafter": {"layers": 5, "block_size": 16},
        "cpu": {"row_length": 128, "rows_per_step": 1, "anchors_per_row": 4},
        "cuda": {"row_length": 3072, "rows_per_step": 1, "anchors_per_row": 512},
    },
}
TAPS = (1, 2, 3, 4, 5)


def plan_of(name: str, kind: Any) -> Plan:
    """The plan of a target's drafter on one device of `kind`, `cpu` or `cuda`."""
    sizes = TARGETS[name]
    shape = {
        **sizes["target"],
        **sizes["drafter"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        "max_position_embeddings": 8192,
        "vocab_size": sizes["vocab_size"],
        "mask_token_id": 0,
        "target_layer_ids": TAPS,
        "num_target_layers": max(TAPS) + 2,
        "bos_token_id": None,
        "eos_token_ids": (0,),
    }
    return make_plan(shape, {**sizes[kind], "precision": "auto"}, kind, 1)


def run_step(plan: Plan, load: Path | None, save: Path | None) -> dict[str, Any]:
    """What one process takes for its first step and its second, in seconds, and what its compiler did.

    Args:
        plan: the static shapes.
        load: artifacts of torch that are loaded first.
        save: where this process leaves its artifacts in the end.
    """
    import torch
    from torch._inductor.triton_bundler import TritonBundler

    from draftflow.compile_cache.guard import Guard
    from draftflow.compile_cache.vector_isa import load_probes_in_process
    from draftflow.drafter.anchors import Anchors
    from draftflow.drafter.attention import forbid_dense
    from draftflow.drafter.mask import layer_masks
    from draftflow.drafter.model import Drafter
    from draftflow.drafter.shape import DrafterShape

    result: dict[str, Any] = {}
    device = torch.device("cuda:0" if plan.device_kind == "cuda" else "cpu")
    if device.type == "cpu":
        load_probes_in_process()
    emitted: list[str] = []
    read_and_emit = TritonBundler.read_and_emit

    def count_emitted(*arguments: Any, **options: Any) -> Any:
        found = read_and_emit(*arguments, **options)
        emitted.extend(found.cached_kernel_names if found else [])
        return found

    TritonBundler.read_and_emit = staticmethod(count_emitted)
    torch.manual_seed(0)
    shape = DrafterShape(**{**plan.drafter, "target_layer_ids": tuple(plan.drafter["target_layer_ids"])})
    drafter = Drafter(shape).to(device)
    drafter.compile_layers()
    dtype = getattr(torch, plan.precision)
    rows, length, count, block = plan.rows, plan.row_length, plan.anchors, plan.block_size
    features = torch.randn(rows, length, len(TAPS) * shape.hidden_size, device=device, dtype=dtype)
    anchor_embeddings = torch.randn(rows, count, shape.hidden_size, device=device, dtype=dtype)
    mask_embedding = torch.randn(shape.hidden_size, device=device, dtype=dtype)
    positions = torch.arange(length, device=device).expand(rows, length).contiguous()
    starts = torch.linspace(1, length - 1, count, device=device).long().expand(rows, count).contiguous()
    block_positions = (starts[:, :, None] + torch.arange(block, device=device)).flatten(1)
    anchors = Anchors(starts, torch.ones(rows, count, dtype=torch.bool, device=device))
    masks = layer_masks(anchors, torch.zeros_like(positions), shape, dtype)
    inputs = (features, anchor_embeddings, mask_embedding, positions, block_positions, *masks)

    def step() -> float:
        start = time.perf_counter()
        drafter(*inputs).float().sum().backward()
        with torch.no_grad():
            drafter(*inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    if device.type == "cuda":
        torch.cuda.synchronize()
    guard = Guard("error", warm=False)
    if load:
        start = time.perf_counter()
        torch.compiler.load_cache_artifacts(load.read_bytes())
        result["load_seconds"] = time.perf_counter() - start
    with forbid_dense():
        result["first_step_seconds"] = step()
        guard.seal()
        result["second_step_seconds"] = step()
        guard.check()
    if save:
        start = time.perf_counter()
        found = torch.compiler.save_cache_artifacts()
        assert found is not None
        save.write_bytes(found[0])
        result["save_seconds"] = time.perf_counter() - start
    result["counts"] = guard.counts()
    result["triton_emitted"] = len(emitted)
    return result


def measure(name: str, kind: str, folder: Path, load: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Run the step in a fresh process on the cache folder `folder`, and see what that changed in it.

    Returns:
        as `run_step`, and process_seconds. kernels_compiled: libraries and GPU binaries that were written and did not
        come out of an entry of the FX graph cache. written, changed: files, relative to the folder, locks left out.
    """
    environment = {**os.environ, **location.prepare(folder)}
    before = _states(folder)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        command = [sys.executable, __file__, "--shape", name, "--device", kind, "--child", "--output", str(out)]
        for option, path in (("--load", load), ("--save", save)):
            command += [option, str(path)] if path else []
        start = time.perf_counter()
        subprocess.run(command, env=environment, check=True)
        seconds = time.perf_counter() - start
        result = json.loads(out.read_text())
    after = _states(folder)
    written = sorted(path for path in after if path not in before)
    changed = sorted(path for path in after if path in before and after[path] != before[path])
    binaries = [path for path in written + changed if path.endswith((".so", ".cubin", ".hsaco"))]
    result |= {"process_seconds": seconds, "written": written, "changed": changed}
    result["kernels_compiled"] = len(binaries) - result.pop("triton_emitted")
    return result


def _states(folder: Path) -> dict[str, tuple[int, int, int]]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != manifest.NAME)
    files = {path: path.stat() for path in paths if path.suffix != ".lock"}
    return {str(path.relative_to(folder)): (s.st_ino, s.st_mtime_ns, s.st_size) for path, s in files.items()}


def holding(folder: Path, words: str) -> list[str]:
    """Files below `folder`, relative to it, in which `words` occur."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and words.encode() in path.read_bytes()]
    return [str(path.relative_to(folder)) for path in found]


def compressions(folder: Path) -> dict[str, dict[str, float]]:
    """Bytes and seconds, there and back, of the artefacts in one archive under several compressions."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writer:
        for path in sorted(manifest.read(folder)):
            writer.add(folder / path, path)
    raw, found = archive.getvalue(), {}
    ways: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {"none": (bytes, bytes)}
    ways |= {f"gzip {level}": (partial(gzip.compress, compresslevel=level), gzip.decompress) for level in (1, 6, 9)}
    ways |= {f"xz {level}": (partial(lzma.compress, preset=level), lzma.decompress) for level in (0, 1, 3, 6)}
    for way, (compress, decompress) in ways.items():
        start = time.perf_counter()
        small = compress(raw)
        middle = time.perf_counter()
        decompress(small)
        found[way] = {"bytes": len(small), "save_seconds": middle - start, "load_seconds": time.perf_counter() - middle}
    return found


def compare(name: str, kind: str, scratch: Path) -> dict[str, Any]:
    """All measurements of one shape; see the module's docstring."""
    held = key.contents({"digest": "benchmark", "fields": {}}, plan_of(name, kind))
    first, renamed, second, third = (
        scratch / place / key.cache_key(held) for place in ("here", "renamed", "elsewhere", "empty")
    )
    record, packed, artifacts = scratch / "warm.json", scratch / f"bundle{bundle.SUFFIX}", scratch / "artifacts"
    results: dict[str, Any] = {"cold": measure(name, kind, first, save=artifacts)}
    results["in place"] = measure(name, kind, first)
    start = time.perf_counter()
    manifest.write(first)
    results["manifest_seconds"] = time.perf_counter() - start
    results["holds_its_path"] = holding(first, str(first))
    results["compressions"] = compressions(first)
    folder = os.path.relpath(first, scratch)
    write_json(record, {"key": first.name, "holds": held, "devices": [], "folder": folder})
    start = time.perf_counter()
    bundle.pack(record, packed)
    save_seconds = time.perf_counter() - start
    files, size = len(_states(first)), location.size_bytes(first)
    first.parent.rename(renamed.parent)
    results["renamed"] = measure(name, kind, renamed)
    shutil.rmtree(renamed.parent)
    start = time.perf_counter()
    bundle.unpack(packed, second, held)
    load_seconds = time.perf_counter() - start
    results["folders"] = {
        "bytes": packed.stat().st_size,
        "unpacked_bytes": size,
        "files": files,
        "save_seconds": save_seconds,
        "load_seconds": load_seconds,
        **measure(name, kind, second),
    }
    results["artifacts"] = {
        "bytes": artifacts.stat().st_size,
        "save_seconds": results["cold"].pop("save_seconds"),
        **measure(name, kind, third, load=artifacts),
    }
    return results


def table(results: dict[str, Any]) -> str:
    """The figures as a table in Markdown. Bytes in MB of 10^6."""
    head = ("", "MB", "save, s", "load, s", "first step, s", "FX graph", "AOT autograd", "kernels compiled")
    lines = [head, ("---",) * len(head)]
    for way in ("cold", "in place", "renamed", "folders", "artifacts"):
        found = results[way]
        counts = found["counts"]
        hits = [
            f"{counts[f'{cache}_hits']} hits, {counts[f'{cache}_misses']} misses" for cache in ("fx_graph", "autograd")
        ]
        seconds = [f"{found[part]:.2f}" if part in found else "" for part in ("save_seconds", "load_seconds")]
        size = f"{found['bytes'] / 1e6:.2f}" if "bytes" in found else ""
        first = f"{found['first_step_seconds']:.2f}"
        lines.append((way, size, *seconds, first, *hits, str(found["kernels_compiled"])))
    lines.append(("",) * len(head))
    for way, found in results["compressions"].items():
        figures = (f"{found['bytes'] / 1e6:.2f}", f"{found['save_seconds']:.3f}", f"{found['load_seconds']:.3f}")
        lines.append((way, *figures))
    return "\n".join(f"| {' | '.join(line)} |" if any(line) else "" for line in lines)


def machine(kind: str) -> dict[str, Any]:
    """What the figures hold for."""
    import torch

    if kind == "cuda":
        device = torch.cuda.get_device_name(0)
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        device = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"
    date = time.strftime("%Y-%m-%d")
    return {"device": device, "torch": torch.__version__, "python": platform.python_version(), "date": date}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=TARGETS, default="smollm2")
    parser.add_argument("--output", type=Path, required=True, help="JSON of all figures")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if torch sees one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.child:
        write_json(arguments.output, run_step(plan_of(arguments.shape, kind), arguments.load, arguments.save))
        return
    with tempfile.TemporaryDirectory(prefix="draftflow-bundle-") as scratch:
        results = compare(arguments.shape, kind, Path(scratch).resolve())
    facts = machine(kind)
    write_json(arguments.output, {"shape": arguments.shape, **facts, **results})
    print(", ".join(f"{value}" for value in (arguments.shape, *facts.values())))
    print(table(results))


if __name__ == "__main__":
    main()
