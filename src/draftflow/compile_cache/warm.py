"""Stage: compile the step once per device, one device after the other, and prove that a fresh process finds it.

Compiling happens here and nowhere else. Every device runs what it runs in training, in all shapes of the plan, in a
process of its own that sees no other device: the step, with the target's forward or without, or that forward alone. The
cache folder is named by its key (see key.py) and is alone in hand while it is filled. What is in it from an earlier
warm-up is kept if it is whole and a fresh start is not asked for; a bundle that was warmed elsewhere can be the
beginning. The devices of one node may be of several kinds: the key then names all of them, and one of each is proved,
and of each role. Nodes of several kinds have a warm-up each (see kinds.py).
No torch in this process.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftflow.compile_cache import bundle, key, location, manifest
from draftflow.compile_cache.kinds import Kind
from draftflow.compile_cache.within import verified
from draftflow.errors import DraftflowError
from draftflow.stage import Record, end_with_parent, run_stage, say, stage_parser
from draftflow.training.devices import Devices, from_settings, process_environment, threads_per_process
from draftflow.training.memory import dense_scores_bytes
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

    def on(self, rank: int, compile_environment: dict[str, str], hold: location.Hold | None = None) -> dict[str, Any]:
        """Exercise what `rank` runs in a fresh process on its device; see `exercise.exercise` for the result.

        Args:
            rank: of the first node.
            compile_environment: of `location.prepare`.
            hold: of the cache folder, which the process holds as long as it lives.

        Raises:
            DraftflowError: the process failed, or the disk filled.
        """
        devices = self.devices
        environment = {**os.environ, **compile_environment, **threads_per_process(devices)}
        environment |= process_environment(devices, rank)
        with tempfile.TemporaryDirectory(prefix="draftflow-") as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", "draftflow.compile_cache.exercise"]
            command += ["--settings", json.dumps(self.settings), "--rank", str(rank)]
            for name, path in [("fingerprint", self.fingerprint), ("target", self.target)]:
                command += [f"--{name}", str(path)]
            start = time.perf_counter()
            done = subprocess.run(
                [*command, "--result", str(result)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                pass_fds=() if hold is None else hold.descriptors,
                preexec_fn=end_with_parent,
            )
            seconds = time.perf_counter() - start
            found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        location.require_not_full(Path(compile_environment["TORCHINDUCTOR_CACHE_DIR"]))
        if "refusal" in found:
            raise DraftflowError(**found["refusal"])
        if done.returncode or not found:
            raise _failed(devices.name(rank), done)
        return {"process_seconds": round(seconds, 3), **found}

    def prove(
        self, rank: int, compile_environment: dict[str, str], folder: Path, hold: location.Hold
    ) -> dict[str, Any]:
        """Exercise it once more, in a fresh process on the device of `rank`, which must find everything.

        Raises:
            DraftflowError: it missed something, or the process failed.
        """
        proof = self.on(rank, compile_environment, hold)
        say(f"proof in a fresh process: {proof['first_pass_seconds']:.1f} s, {_hits(proof)}")
        counts = proof["counts"]
        missed = {f"misses of {name}": found["misses"] for name, found in proof["caches"].items() if found["misses"]}
        for name in ("fx_graph_bypasses", "autograd_bypasses", "benchmarks"):
            if counts[name]:  # whether training may go on with it is for checks.compile to say
                say(f"warning: a fresh process had {counts[name]} {name.replace('_', ' ')}, and so will training")
        if missed or not counts["fx_graph_hits"]:
            raise DraftflowError(
                f"A fresh process did not find what was just compiled: {missed or 'it looked for nothing'}.",
                "Look for a TORCH or TRITON setting that changes between processes, then run "
                "`snakemake --forcerun warm_cache`.",
                str(folder),
            )
        return proof


@dataclass(frozen=True)
class CacheInUse:
    """A verified cache, or one of each kind of device.

    Attributes:
        environment: variables of processes that read it; of several kinds, those that all have in common.
        hold: on it, or on all.
        folders: of several kinds, by name: a process reads that of its own device.
    """

    environment: dict[str, str]
    hold: location.Hold
    folders: dict[str, str] = field(default_factory=dict)


def warm(work: WarmUp, cache: Path, fresh: bool, record: Record, start_from: Path | None = None) -> None:
    """Warm the cache below `cache` on all devices in turn, prove it, and put what happened into `record`.

    Args:
        work: what is run.
        cache: folder of the caches of this kind of device.
        fresh: empty the folder of this key first, and take no bundle.
        record: of the stage.
        start_from: a bundle to begin with, if the folder of this key is empty.

    Raises:
        DraftflowError: a device failed, the bundle is not for this, or a fresh process missed something after all.
    """
    devices = work.devices
    _, plan = plan_of_run(work.settings, work.target, devices.kind, devices.count)
    held = key.contents(json.loads(work.fingerprint.read_text(encoding="utf-8"))["compile"], plan)
    folder = cache / key.cache_key(held)
    record["key"], record["holds"] = folder.name, held
    with location.held(folder, alone=True) as hold:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        record["found"] = _found(folder)
        record["bundle"] = None
        if start_from is not None and not fresh and not folder.exists():
            with record.part("bundle"):
                unpacked = bundle.unpack(start_from, folder, held)
            record["bundle"] = {"path": str(start_from), "sha256": unpacked["sha256"]}
            say(f"compile cache {folder.name} from the bundle {start_from}: {unpacked['files']} files, verified")
        environment = location.prepare(folder)
        record["file_system"] = location.filesystem(folder)
        record["devices"] = list(_walk(work, environment, record, hold, folder))
        with record.part("proof"):
            proof, *others = [work.prove(rank, environment, folder, hold) for rank in _one_of_each(record["devices"])]
        record["artefacts"] = {"files": len(manifest.write(folder)["files"]), "bytes": location.size_bytes(folder)}
    record["proof"] = proof
    if others:
        record["proofs_of_other_kinds"] = others
    first = record["devices"][0]
    record["cold_seconds"] = first["first_pass_seconds"] if first["cold"] else None
    record["warm_seconds"] = proof["first_pass_seconds"]
    record["memory"] = _memory(proof, dense_scores_bytes(plan))


@contextmanager
def in_use(work: WarmUp, warm_record: Path, held: Mapping[str, Any], record: Record) -> Iterator[CacheInUse]:
    """The warm cache for what `held` says, verified and in hand; what is damaged is compiled anew, by one process after
    the other.

    The folder is held alone until it is verified, and from then on with other readers.

    Args:
        work: what is compiled.
        warm_record: `warm.json`.
        held: `key.contents` of the run.
        record: told under `cache`: files that were verified, and what was wrong with which.

    Raises:
        DraftflowError: the cache is not warm for this, or could not be mended.
    """
    folder = key.require_warm(warm_record, held)
    with location.held(folder, alone=True) as hold:
        key.require_folder(folder)
        environment = location.prepare(folder)
        with record.part("verify"):
            found = manifest.clean(folder)
            told: dict[str, Any] = {"files": found.files, "damaged": found.damaged, "foreign": found.foreign}
            for path in found.foreign:
                say(f"warning: removed {path} from the compile cache, which warm-up had not put there")
            if found.damaged:
                path, words = next(iter(found.damaged.items()))
                more = f" and {len(found.damaged) - 1} more" if len(found.damaged) > 1 else ""
                say(f"warning: the compile cache is damaged ({path}: {words}{more}); compiling anew")
                shutil.rmtree(folder)
                environment = location.prepare(folder)
                ranks = _one_of_each(json.loads(warm_record.read_text(encoding="utf-8"))["devices"])
                mended = [work.on(rank, environment, hold)["first_pass_seconds"] for rank in ranks]
                for rank in ranks:
                    work.prove(rank, environment, folder, hold)
                manifest.write(folder)
                told["recompiled_seconds"] = round(sum(mended), 3)
        record["cache"] = told
        hold.share()
        yield CacheInUse(environment, hold)


@contextmanager
def all_in_use(kinds: Sequence[Kind], record: Record) -> Iterator[CacheInUse]:
    """The warm caches of several kinds of devices, each verified and in hand, as `in_use`; nothing is compiled.

    Args:
        kinds: of the run.
        record: told under `cache`: of each kind, files that were verified and what did not belong there.

    Raises:
        DraftflowError: one is not warm for this, or damaged: what is mended, is mended on a device of its kind.
    """
    with ExitStack() as stack:
        caches, told = {}, {}
        for kind in kinds:
            with record.part("verify"):
                variables, hold, found = stack.enter_context(verified(key.require_warm(kind.warm, kind.holds)))
            caches[kind.name] = CacheInUse(variables, hold)
            told[kind.name] = {"files": found.files, "damaged": {}, "foreign": found.foreign}
        record["cache"] = told
        yield together(caches)


def together(caches: Mapping[str, CacheInUse]) -> CacheInUse:
    """The caches of several kinds, by name, as one; of a single kind, its own."""
    if len(caches) == 1:
        return next(iter(caches.values()))
    folders = {name: str(Path(cache.environment["TORCHINDUCTOR_CACHE_DIR"]).parent) for name, cache in caches.items()}
    return CacheInUse(dict(location.SETTINGS), location.all_of([cache.hold for cache in caches.values()]), folders)


def _found(folder: Path) -> dict[str, Any]:
    """What an earlier warm-up left, and whether it can be used; what cannot is removed."""
    if not folder.exists():
        return {"state": "empty"}
    found = manifest.clean(folder)
    if found.sound:
        return {"state": "whole", "files": found.files}
    if found.damaged:
        path, words = next(iter(found.damaged.items()))
        interrupted = path == manifest.NAME and words == "missing"
        reason = "an earlier warm-up was not finished" if interrupted else f"{path}: {words}"
        say(f"the compile cache {folder.name} is not whole ({reason}); starting from an empty one")
        shutil.rmtree(folder)
    return {
        "state": "damaged" if found.damaged else "with foreign files",
        "damaged": found.damaged,
        "foreign": found.foreign,
    }


def _walk(
    work: WarmUp, environment: dict[str, str], record: Record, hold: location.Hold, folder: Path
) -> Iterator[dict[str, Any]]:
    """One device after the other, first those that train."""
    devices = work.devices
    for rank in range(devices.per_node):
        name, role = devices.name(rank), devices.role(rank) if devices.split else None
        begins = rank in (0, devices.count)
        what = "the target's layers" if role == "target" else "the step"
        say(f"{name}: compiling {what}" if begins else f"{name}: loading, or compiling for another kind of device")
        with record.part(f"{name}, target" if role == "target" else name):
            found = work.on(rank, environment, hold)
        cold = found["caches"]["fx_graph"]["misses"] > 0
        say(f"{name}: {'cold' if cold else 'warm'}, {found['first_pass_seconds']:.1f} s, {_hits(found)}")
        yield {"device": name, "role": role, "cold": cold, "size_bytes": location.size_bytes(folder), **found}
        if devices.kind == "cpu":
            return  # processes on CPUs are all alike


def _one_of_each(devices: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ranks of the first devices of each kind, and of each role, among those that were walked."""
    kinds = [(device["kind"], device.get("role")) for device in devices]
    return [kinds.index(kind) for kind in dict.fromkeys(kinds)]


def _memory(proof: dict[str, Any], dense_scores: int) -> dict[str, Any]:
    """The step's peak beside what it may take, and beside the scores of one layer's dense attention."""
    bound = proof["memory_bound_bytes"]
    return {
        "peak_bytes": proof["peak_memory_bytes"],
        "bound_bytes": bound and bound["total"],
        "bound_by_part": bound,
        "dense_scores_of_a_layer_bytes": dense_scores,
    }


def _hits(found: dict[str, Any]) -> str:
    hits, misses = (sum(cache[what] for cache in found["caches"].values()) for what in ("hits", "misses"))
    return f"{hits} hits, {misses} misses"


def _failed(device: str, done: "subprocess.CompletedProcess[str]") -> DraftflowError:
    sys.stderr.write(done.stderr)
    if done.returncode < 0:
        cause = ", perhaps for want of memory" if done.returncode == -signal.SIGKILL else ""
        return DraftflowError(
            f"The process that compiles was ended by signal {-done.returncode}{cause}.", "See `dmesg`.", device
        )
    # of a chain of errors, the cause at the beginning
    lines = [line for line in done.stderr.splitlines() if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Hit)\b", line)]
    last = lines[-1] if lines else f"it ended with status {done.returncode}"
    return DraftflowError(f"Compiling failed: {last}.", "The whole message is above.", device)


def main() -> None:
    """Warm the compile cache of a run."""
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--fingerprint", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--target", type=Path, required=True, help="folder of the prepared target")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the compile caches of this device kind")
    parser.add_argument("--fresh", action="store_true", help="start from an empty folder of this key")
    parser.add_argument("--bundle", type=Path, help="a bundle to start from")
    parser.add_argument("--record", type=Path, required=True, help="warm.json")
    arguments = parser.parse_args()
    record = Record("warm_cache", settings=arguments.settings)
    arguments.record.unlink(missing_ok=True)  # an interrupted warm-up must not look like the one before
    work = WarmUp(arguments.settings, arguments.fingerprint, arguments.target)
    warm(work, arguments.cache, arguments.fresh, record, arguments.bundle)
    # relative, so that the project folder can be moved with its warm cache
    record["folder"] = os.path.relpath(arguments.cache / record["key"], arguments.record.parent)
    record.write(arguments.record)
    cold = f"cold {record['cold_seconds']:.1f} s, " if record["cold_seconds"] is not None else ""
    say(f"compile cache {record['key']}: {cold}warm {record['warm_seconds']:.1f} s")


if __name__ == "__main__":
    run_stage(main)
