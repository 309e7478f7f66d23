"""Stage: train the drafter. Starts one worker per device and role under torchrun, waits, and writes the record.

On one node torchrun is this process's own (node.py); on several a launcher starts it on each (launch.py).
A run is known by what decides its weights; its checkpoints lie in a folder of that name. A run that was stopped goes on
from its newest whole checkpoint, and one that is finished only has its outputs written again. No torch in this process.
"""

import hashlib
import json
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftflow import sources
from draftflow.compile_cache import key
from draftflow.compile_cache.kinds import kinds_of_run
from draftflow.compile_cache.local import local_caches
from draftflow.compile_cache.warm import CacheInUse, WarmUp, all_in_use, in_use
from draftflow.errors import DraftflowError
from draftflow.stage import Record, run_stage, say, sha256, stage_parser, write_text
from draftflow.training import checkpoint, run_lock
from draftflow.training.devices import Devices, from_settings
from draftflow.training.launch import Cluster, Nodes, run_nodes
from draftflow.training.node import JOB, run_node
from draftflow.training.plan import plan_of_run
from draftflow.training.worker import Job

STOPPED = 143  # what a shell gives for SIGTERM


def run_digest(settings: dict[str, Any], rows: Path, target: Path) -> str:
    """12 hexadecimal digits over what decides the weights of a run: settings, data, target, code; not the devices."""
    shape, plan = plan_of_run(settings, target, settings["devices"]["kind"], 1)
    whenever = ("evaluate_every", "checkpoint_every", "feature_cache_gb", "stream_depth")
    training = {name: value for name, value in settings["training"].items() if name not in whenever}
    description = json.loads((target / "target.json").read_text(encoding="utf-8"))
    code = sources.digest("draftflow.training.worker")
    # of the target's code only the compiled form depends on more than its description
    facts = [vars(shape), vars(replace(plan, target={})), training, sha256(rows), description, code]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def train(
    job: Job, devices: Devices, cluster: Cluster, record: Record, node_local: str | None = None
) -> checkpoint.Checkpoint:
    """Train to the end, or go on with that; returns the last checkpoint.

    Args:
        job: of the workers.
        devices: of the run.
        cluster: how it starts on several nodes.
        record: of the stage.
        node_local: the folder on each node's disk that the bundle of the cache is unpacked to; None to use the cache
            where it was warmed.

    Raises:
        DraftflowError: the compile cache is not warm for this run, or a worker refused or failed.
        SystemExit: with status 143 when a signal stopped the run; a checkpoint was written.
    """
    found = checkpoint.latest(job.checkpoints)
    if found is not None and found.step == job.steps:
        say(f"training is finished: {found.folder}")
        return found
    with _exchange(job, devices) as folder, _cache(job, node_local, record) as cache:
        features = f", features from {len(devices.target_ids)} x {devices.slug}" if devices.split else ""
        nodes = f"{devices.nodes} nodes of " if devices.nodes > 1 else ""
        say(f"training on {nodes}{len(devices.ids)} x {devices.slug}{features}, {job.steps} steps")
        started = time.time()
        outcome = _run(job, devices, cluster, cache, node_local, Path(folder))
    record.seconds["start"] = outcome["ready_at"] - started
    record["seconds_to_first_step"] = round(outcome["first_step_at"] - started, 3)
    record.seconds["first_step"] = outcome["first_step_at"] - outcome["ready_at"]
    record.seconds["training"] = time.time() - outcome["first_step_at"]
    record["waited_seconds"], record["target_guard"] = outcome["waited_seconds"], outcome["target_guard"]
    if not outcome["finished"]:
        say(f"stopped after step {outcome['step']}; resume by running the same command")
        raise SystemExit(STOPPED)
    found = checkpoint.latest(job.checkpoints)
    assert found is not None
    return found


def _exchange(job: Job, devices: Devices) -> "tempfile.TemporaryDirectory[str]":
    """A folder through which the processes talk: one that all nodes see, where there are several."""
    for remains in job.checkpoints.glob(".nodes-*"):
        shutil.rmtree(remains, ignore_errors=True)  # of a run that was killed; its nodes end, if any lives, without it
    if devices.nodes == 1:
        return tempfile.TemporaryDirectory(prefix="draftflow-")
    job.checkpoints.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".nodes-", dir=job.checkpoints, ignore_cleanup_errors=True)


def _cache(job: Job, node_local: str | None, record: Record) -> AbstractContextManager[CacheInUse]:
    """The compile cache as this host reads it; what is damaged is mended where it may be of the kind that compiles."""
    if node_local is not None:
        return local_caches(job.kinds, node_local, record)
    if len(job.kinds) > 1:
        return all_in_use(job.kinds, record)
    (kind,) = job.kinds
    return in_use(WarmUp(job.settings, kind.fingerprint, job.target), kind.warm, kind.holds, record)


def _run(
    job: Job, devices: Devices, cluster: Cluster, cache: CacheInUse, node_local: str | None, exchange: Path
) -> dict[str, Any]:
    """Run the workers, and return the outcome that rank 0 wrote."""
    job.write(exchange / JOB)
    if devices.nodes > 1:
        nodes = run_nodes(exchange, devices, cluster, cache, node_local)
    else:
        nodes = Nodes([socket.gethostname()], [run_node(exchange, devices, cache)])
    first, endings = nodes.endings[0], [ending for ending in nodes.endings if ending is not None]
    stopping = any(ending.stopping for ending in endings)
    ended = len(endings) == devices.nodes and not any(ending.status for ending in endings)
    if first is not None and first.outcome is not None and (ended or stopping):
        told = {"waited_seconds": _waited(exchange, devices), "target_guard": _target_guards(exchange, devices)}
        return {**first.outcome, **told}
    raise _failure(nodes, devices, stopping)


def _waited(exchange: Path, devices: Devices) -> dict[str, list[float]] | None:
    """Seconds for which the ranks of each role waited for the other; None where there is one role, or one was ended."""
    files = [exchange / f"{rank}.waited" for rank in range(devices.processes)]
    if not devices.split or not all(file.exists() for file in files):
        return None
    seconds: dict[str, list[float]] = {"drafter": [], "target": []}
    for rank, file in enumerate(files):
        seconds[devices.role(rank)].append(round(json.loads(file.read_text(encoding="utf-8")), 3))
    return seconds


def _target_guards(exchange: Path, devices: Devices) -> list[dict[str, Any]]:
    """What the guards of those target ranks counted that came to their end."""
    files = [exchange / f"{rank}.guard" for rank in range(devices.processes)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def _failure(nodes: Nodes, devices: Devices, stopping: bool) -> BaseException:
    """What a failed run raises: the refusal of a worker, or what is known of a crash."""
    resumes = "checkpoints are kept, and the same command resumes."
    several = devices.nodes > 1
    endings = [ending for ending in nodes.endings if ending is not None]
    errors = sorted((ending.error for ending in endings if ending.error is not None), key=lambda error: error["at"])
    for error in errors:
        if "what" in error:
            if devices.split:
                say(f"{devices.process(error['rank'])} refuses to go on")
            node = f"Node {nodes.name(devices.node(error['rank']))}: " if several else ""
            return DraftflowError(f"{node}{error['what']}", error["remedy"], error["where"])
    # a process that loses its connection to another node may abort
    killed = sorted((e.killed for e in endings if e.killed is not None), key=lambda found: found[1] == signal.SIGABRT)
    if killed and not stopping:
        rank, number = killed[0]
        if not (several and errors and number == signal.SIGABRT):
            cause = ", perhaps for want of memory" if number == signal.SIGKILL else ""
            return DraftflowError(
                f"{_process(nodes, devices, rank)} was killed by signal {number}{cause}.",
                f"See `dmesg`; {resumes}",
            )
    lost = [ending.lost for ending in endings if ending.lost is not None]
    silent = [*sorted(nodes.silent), *lost]
    gone = [*silent, *(node for node, ending in enumerate(nodes.endings) if ending is None)]
    if gone:
        how = "gave no sign of life for too long" if silent else "ended without a word"
        return DraftflowError(
            f"Node {nodes.name(gone[0])} is lost: it {how}.",
            f"See that host and its scheduler's log; {resumes}",
        )
    if errors:
        trace = errors[0]["traceback"]
        sys.stderr.write(trace)
        return DraftflowError(
            f"{_process(nodes, devices, errors[0]['rank'])} failed: {trace.strip().splitlines()[-1].rstrip('.')}.",
            f"The traceback is above; {resumes}",
        )
    if stopping:
        say("stopped before the first step; start again by running the same command")
        return SystemExit(STOPPED)
    sys.stderr.write("".join(ending.log for ending in endings if not ending.cut_short))
    return DraftflowError("The training processes ended without a word.", "What torchrun said is above.")


def _process(nodes: Nodes, devices: Devices, rank: int) -> str:
    """The process of `rank`, in words."""
    return devices.process(rank) + (f" on node {nodes.name(devices.node(rank))}" if devices.nodes > 1 else "")


def losses(metrics: str) -> dict[str, Any]:
    """First and last losses, from the lines of metrics.jsonl."""
    lines = [json.loads(line) for line in metrics.splitlines()]
    training = [line["loss"] for line in lines if "loss" in line]
    held_out = [line for line in lines if "held_out_loss" in line]
    return {
        "first_loss": training[0],
        "last_loss": training[-1],
        "first_held_out_loss": held_out[0]["held_out_loss"],
        "last_held_out_loss": held_out[-1]["held_out_loss"],
        "held_out_accuracy": held_out[-1]["held_out_accuracy"],
        "expected_acceptance_length": held_out[-1]["expected_acceptance_length"],
    }


def main() -> None:
    """Train, and write train.json and metrics.jsonl."""
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--fingerprint", type=Path, nargs="+", required=True, help="fingerprint.json, of each kind")
    parser.add_argument("--rows", type=Path, required=True, help="rows.safetensors")
    parser.add_argument("--target", type=Path, required=True, help="folder of the prepared target")
    parser.add_argument("--warm", type=Path, nargs="+", required=True, help="warm.json, of each kind")
    parser.add_argument("--kinds", nargs="+", help="names of the kinds of devices, if there are several")
    parser.add_argument("--bundle", type=Path, nargs="+", help="the bundles of these caches, for --node-local")
    parser.add_argument("--node-local", help="folder on the node's own disk, from which the cache is then read")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl")
    parser.add_argument("--tensorboard", type=Path, required=True, help="folder of TensorBoard files")
    parser.add_argument("--cluster", type=json.loads, default={}, help="cluster.launcher and node_timeout, as JSON")
    parser.add_argument("--again", action="store_true", help="train again what is finished; a stopped run goes on")
    parser.add_argument("--record", type=Path, required=True, help="train.json")
    arguments = parser.parse_args()
    settings, devices = arguments.settings, from_settings(arguments.settings)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(STOPPED))  # a scheduler's warning, at first with nothing to save
    record = Record("train", settings=settings)
    digest = run_digest(settings, arguments.rows, arguments.target)
    names = arguments.kinds or [devices.slug]
    bundles = arguments.bundle if arguments.node_local else []
    _, plan = plan_of_run(settings, arguments.target, devices.kind, devices.count)
    job = Job(
        settings=settings,
        kinds=kinds_of_run(names, arguments.fingerprint, arguments.warm, bundles, plan),
        rows=arguments.rows.resolve(),
        target=arguments.target.resolve(),
        checkpoints=(arguments.checkpoints / digest).resolve(),
        metrics=arguments.metrics.resolve(),
        tensorboard=arguments.tensorboard.resolve(),
    )
    cluster = Cluster(**arguments.cluster)
    with run_lock.held(job.checkpoints):
        if arguments.again and (finished := checkpoint.latest(job.checkpoints)) and finished.step == job.steps:
            say(f"training again, in place of {finished.folder}")
            shutil.rmtree(job.checkpoints)
        found = train(job, devices, cluster, record, arguments.node_local)
    write_text(arguments.metrics, found.metrics())
    fingerprint = json.loads(job.kinds[0].fingerprint.read_text(encoding="utf-8"))
    record["run_digest"] = digest
    record["checkpoint"] = str(found.folder.relative_to(arguments.checkpoints.resolve()))
    record["steps"] = found.step
    record["resumed_from"] = found.state["resumed_from"]
    record["topology"] = found.state["topology"]
    for name, value in {**losses(found.metrics()), **found.state["run"]}.items():
        record[name] = value
    record["environment"] = {part: fingerprint[part]["digest"] for part in ("compile", "numbers")}
    record["versions"] = fingerprint["compile"]["fields"]
    if len(job.kinds) > 1:
        record["kinds"] = {
            kind.name: {"key": key.cache_key(kind.holds), "compile": kind.holds["fingerprint"]["digest"]}
            for kind in job.kinds
        }
    record.write(arguments.record)


if __name__ == "__main__":
    run_stage(main)
