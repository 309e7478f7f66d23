"""Stage: train the drafter. Starts one worker per device and role under torchrun, waits, and writes the record.

A run is known by what decides its weights; its checkpoints lie in a folder of that name. A run that was stopped goes on
from its newest whole checkpoint, and one that is finished only has its outputs written again. No torch in this process.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from draftflow import sources
from draftflow.compile_cache import key
from draftflow.compile_cache.local import local_cache
from draftflow.compile_cache.warm import CacheInUse, WarmUp, in_use
from draftflow.errors import DraftflowError
from draftflow.stage import Record, end_with_parent, run_stage, say, sha256, stage_parser, write_text
from draftflow.training import checkpoint, run_lock
from draftflow.training.devices import Devices, from_settings, threads_per_process
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
    facts = [vars(shape), vars(plan), training, sha256(rows), description, code]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def train(
    job: Job, warm: Path, devices: Devices, record: Record, local: tuple[Path, str] | None = None
) -> checkpoint.Checkpoint:
    """Train to the end, or go on with that; returns the last checkpoint.

    Args:
        job: of the workers.
        warm: `warm.json`.
        devices: of the run.
        record: of the stage.
        local: the bundle of the cache, and the folder on the node's disk that it is unpacked to; None to use the
            cache where it was warmed.

    Raises:
        DraftflowError: the compile cache is not warm for this run, or a worker refused or failed.
        SystemExit: with status 143 when a signal stopped the run; a checkpoint was written.
    """
    found = checkpoint.latest(job.checkpoints)
    if found is not None and found.step == job.steps:
        say(f"training is finished: {found.folder}")
        return found
    _, plan = plan_of_run(job.settings, job.target, devices.kind, devices.count)
    compile_part = json.loads(job.fingerprint.read_text(encoding="utf-8"))["compile"]
    work, held = WarmUp(job.settings, job.fingerprint, job.target), key.contents(compile_part, plan)
    with (
        tempfile.TemporaryDirectory(prefix="draftflow-") as folder,
        local_cache(*local, held, record) if local else in_use(work, warm, held, record) as cache,
    ):
        features = f", features from {len(devices.target_ids)} x {devices.slug}" if devices.split else ""
        say(f"training on {devices.count} x {devices.slug}{features}, {job.steps} steps")
        started = time.time()
        outcome = _torchrun(job, devices, cache, Path(folder))
    record.seconds["start"] = outcome["ready_at"] - started
    record["seconds_to_first_step"] = round(outcome["first_step_at"] - started, 3)
    record.seconds["first_step"] = outcome["first_step_at"] - outcome["ready_at"]
    record.seconds["training"] = time.time() - outcome["first_step_at"]
    record["waited_seconds"] = outcome["waited_seconds"]
    if not outcome["finished"]:
        say(f"stopped after step {outcome['step']}; resume by running the same command")
        raise SystemExit(STOPPED)
    found = checkpoint.latest(job.checkpoints)
    assert found is not None
    return found


def _torchrun(job: Job, devices: Devices, cache: CacheInUse, exchange: Path) -> dict[str, Any]:
    """Run the workers, pass a stop on to them, and return the outcome that rank 0 wrote.

    The cache is let go once all of them have taken a step, with everything compiled in their memory.
    """
    job.write(exchange / "job.json")
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "1", "--nproc-per-node", str(devices.processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command += ["--max-restarts", "0", "-m", "draftflow.training.worker"]
    command += ["--job", str(exchange / "job.json"), "--exchange", str(exchange)]
    environment = {**os.environ, **cache.environment, **threads_per_process(devices)}
    log = exchange / "torchrun.log"
    with log.open("wb") as stream:
        # A session of its own: a signal to the terminal's processes must not make torchrun kill the workers.
        # But not an outliving one: when this process is killed, torchrun is told to stop, and it tells the workers.
        torchrun = subprocess.Popen(
            command,
            env=environment,
            stderr=stream,
            start_new_session=True,
            preexec_fn=end_with_parent,
            pass_fds=(cache.hold.descriptor,),
        )
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        stopping: list[int] = []

        def pass_on(number: int, _: Any) -> None:
            stopping.append(number)
            workers = [int(path.read_text()) for path in exchange.glob("*.pid")]
            for process in workers or [torchrun.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)
            say("stopping after this step")

        for number in before:
            signal.signal(number, pass_on)
        try:
            loading = True
            while (status := torchrun.poll()) is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    torchrun.wait(timeout=1)
                if loading and len(list(exchange.glob("*.stepped"))) == devices.processes:
                    cache.hold.release()
                    loading = False
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    outcome = exchange / "outcome.json"
    if status == 0 and outcome.exists():
        return {**json.loads(outcome.read_text(encoding="utf-8")), "waited_seconds": _waited(exchange, devices)}
    raise _failure(exchange, log.read_text(encoding="utf-8", errors="replace"), devices, bool(stopping))


def _waited(exchange: Path, devices: Devices) -> dict[str, list[float]] | None:
    """Seconds for which the ranks of each role waited for the other; None where there is one role."""
    if not devices.split:
        return None
    seconds: dict[str, list[float]] = {"drafter": [], "target": []}
    for rank in range(devices.processes):
        text = (exchange / f"{rank}.waited").read_text(encoding="utf-8")
        seconds[devices.role(rank)].append(round(json.loads(text), 3))
    return seconds


def _failure(exchange: Path, log: str, devices: Devices, stopping: bool) -> BaseException:
    """What a failed run raises: the refusal of a worker, or what is known of a crash."""
    files = sorted(exchange.glob("*.error"), key=lambda path: path.stat().st_mtime)  # the others failed of the first
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    for file, error in zip(files, errors, strict=True):
        if "what" in error:
            if devices.split:
                say(f"{devices.process(int(file.stem))} refuses to go on")
            return DraftflowError(**error)
    # the others then lose their connection
    killed = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: -(\d+)", log, re.DOTALL)
    if killed and not stopping:
        cause = ", perhaps for want of memory" if killed[2] == "9" else ""
        return DraftflowError(
            f"{devices.process(int(killed[1]))} was killed by signal {killed[2]}{cause}.",
            "See `dmesg`; checkpoints are kept, and the same command resumes.",
        )
    if errors:
        trace = errors[0]["traceback"]
        sys.stderr.write(trace)
        return DraftflowError(
            f"{devices.process(int(files[0].stem))} failed: {trace.strip().splitlines()[-1].rstrip('.')}.",
            "The traceback is above; checkpoints are kept, and the same command resumes.",
        )
    if stopping:
        say("stopped before the first step; start again by running the same command")
        return SystemExit(STOPPED)
    sys.stderr.write(log)
    return DraftflowError("The training processes ended without a word.", "What torchrun said is above.")


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
    parser.add_argument("--fingerprint", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--rows", type=Path, required=True, help="rows.safetensors")
    parser.add_argument("--target", type=Path, required=True, help="folder of the prepared target")
    parser.add_argument("--warm", type=Path, required=True, help="warm.json")
    parser.add_argument("--bundle", type=Path, help="the bundle of that cache, for --node-local")
    parser.add_argument("--node-local", help="folder on the node's own disk, from which the cache is then read")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl")
    parser.add_argument("--tensorboard", type=Path, required=True, help="folder of TensorBoard files")
    parser.add_argument("--again", action="store_true", help="train again what is finished; a stopped run goes on")
    parser.add_argument("--record", type=Path, required=True, help="train.json")
    arguments = parser.parse_args()
    settings, devices = arguments.settings, from_settings(arguments.settings)
    record = Record("train", settings=settings)
    digest = run_digest(settings, arguments.rows, arguments.target)
    job = Job(
        settings=settings,
        fingerprint=arguments.fingerprint.resolve(),
        rows=arguments.rows.resolve(),
        target=arguments.target.resolve(),
        checkpoints=(arguments.checkpoints / digest).resolve(),
        metrics=arguments.metrics.resolve(),
        tensorboard=arguments.tensorboard.resolve(),
    )
    local = (arguments.bundle, arguments.node_local) if arguments.node_local else None
    with run_lock.held(job.checkpoints):
        if arguments.again and (finished := checkpoint.latest(job.checkpoints)) and finished.step == job.steps:
            say(f"training again, in place of {finished.folder}")
            shutil.rmtree(job.checkpoints)
        found = train(job, arguments.warm, devices, record, local)
    write_text(arguments.metrics, found.metrics())
    fingerprint = json.loads(arguments.fingerprint.read_text(encoding="utf-8"))
    record["run_digest"] = digest
    record["checkpoint"] = str(found.folder.relative_to(arguments.checkpoints.resolve()))
    record["steps"] = found.step
    record["resumed_from"] = found.state["resumed_from"]
    record["topology"] = found.state["topology"]
    for name, value in {**losses(found.metrics()), **found.state["run"]}.items():
        record[name] = value
    record["environment"] = {part: fingerprint[part]["digest"] for part in ("compile", "numbers")}
    record["versions"] = fingerprint["compile"]["fields"]
    record.write(arguments.record)


if __name__ == "__main__":
    run_stage(main)
