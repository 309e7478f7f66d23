"""The process of one rank, started by torchrun for `draftflow.training.train`: set up, train, say how it ended.

It is given a job (what the launcher wrote) and an exchange folder, into which it writes

    <rank>.pid       once a signal makes it stop in an orderly way
    <rank>.stepped   after the first step, of a target the first batch: nothing more is read from the compile cache
    <rank>.waited    at the end, in the split topology: seconds of waiting for the other role
    <rank>.guard     at the end, of a target: what its guard counted
    <rank>.error     a refusal (JSON: what, remedy, where) or a traceback; the launcher shows it
    outcome.json     from rank 0: how far it came, and the facts for the record
    meeting          from rank 0, with several nodes: where the ranks meet
"""

import argparse
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftflow.compile_cache.kinds import Kind, kind_of_this_process, read_kind
from draftflow.stage import as_refusal, say, write_json, write_text
from draftflow.training.devices import Devices, from_settings, process_environment
from draftflow.training.exchange import Notes

if TYPE_CHECKING:
    from draftflow.compile_cache.guard import Guard

# A rank may wait for another that loads a large target, or writes a checkpoint to a slow disk; one that died is noticed
# by its connection and by torchrun.
PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Job:
    """What a worker works on: the stage's settings, its paths, the name of the run's checkpoint folder, and the kinds
    of devices that were warmed."""

    settings: dict[str, Any]
    rows: Path
    target: Path
    checkpoints: Path
    metrics: Path
    tensorboard: Path
    kinds: list[Kind] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.settings["training"]["steps"]

    def write(self, path: Path) -> None:
        """Write to `path`, for `read_job`."""
        paths = {name: str(value) for name, value in vars(self).items() if isinstance(value, Path)}
        write_json(path, {"settings": self.settings, **paths, "kinds": [kind.written() for kind in self.kinds]})


def read_job(path: Path) -> Job:
    """The job that `Job.write` wrote."""
    values = json.loads(path.read_text(encoding="utf-8"))
    settings, kinds = values.pop("settings"), [read_kind(written) for written in values.pop("kinds")]
    return Job(settings, **{name: Path(value) for name, value in values.items()}, kinds=kinds)


def main() -> None:
    """Run the worker of this rank; a failure is written to the exchange folder and ends the process with status 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--exchange", type=Path, required=True)
    parser.add_argument("--on-node", type=int, required=True, help="number of the node")
    parser.add_argument("--address", required=True, help="of this node")
    parser.add_argument("--caches", type=json.loads, required=True, help="folders by kind of device, if of several")
    arguments = parser.parse_args()
    place, exchange = int(os.environ["LOCAL_RANK"]), arguments.exchange
    rank = place
    os.dup2(1, 2)  # what torchrun writes to its own error stream then is torchrun's alone
    try:
        job = read_job(arguments.job)
        devices = from_settings(job.settings)
        rank += arguments.on_node * devices.per_node  # torchrun knows one node
        os.environ.update(process_environment(devices, place))
        outcome = _work(job, devices, rank, exchange, arguments.address, arguments.caches)
        if rank == 0:
            write_json(exchange / "outcome.json", outcome)
    except BaseException as error:
        refusal = as_refusal(error)
        told = {"traceback": traceback.format_exc()} if refusal is None else refusal.parts()
        write_json(exchange / f"{rank}.error", told)
        os._exit(1)  # at once: to end in good order may take an answer of ranks that wait for this one


def _work(
    job: Job, devices: Devices, rank: int, exchange: Path, address: str, caches: dict[str, str]
) -> dict[str, Any] | None:
    """Train as the job says, and what came of it; or run the target for those that train, and None."""
    # Only now, when the process sees its one device
    import torch
    import torch.distributed as dist

    from draftflow.compile_cache.guard import Guard
    from draftflow.compile_cache.location import folder_variables
    from draftflow.drafter.attention import forbid_dense
    from draftflow.training import checkpoint
    from draftflow.training.data import read_rows
    from draftflow.training.loop import Loop, Stop
    from draftflow.training.metrics import Metrics
    from draftflow.training.plan import plan_of_run
    from draftflow.training.process import load_source, make_batches, make_process, use_device
    from draftflow.training.stream import Schedule, Streamed, connect, serve

    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    write_text(exchange / f"{rank}.pid", str(os.getpid()))
    kind = kind_of_this_process(job.kinds, devices.nodes)
    if caches:
        os.environ.update(folder_variables(Path(caches[kind.name])))
    if devices.split:  # a message that NCCL waits for keeps a part of the GPU busy, less with fewer channels
        os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", "4")
    if devices.processes > 1:
        # No device_id: receives that are posted early would then block one another in the one communicator.
        backend = "cpu:gloo,cuda:nccl" if devices.kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE, **_meeting(devices, rank, exchange, address))
    training = job.settings["training"]
    guard = Guard(job.settings["checks"]["compile"])
    shape, plan = plan_of_run(job.settings, job.target, devices.kind, devices.count)
    hyper = hyperparameters(job.settings)
    rows = read_rows(job.rows, plan.row_length)
    cache_gb = training["feature_cache_gb"]
    found = checkpoint.latest(job.checkpoints)
    first = 0 if found is None else found.step
    stepped = (exchange / f"{rank}.stepped").touch
    streamed = None
    if devices.split:
        stop.group = dist.new_group(list(range(devices.count)), timeout=PATIENCE)
        device = use_device(plan)
        wire = torch.device("cpu") if devices.shared else device
        batches = [make_batches(plan, hyper, rows, drafter, devices.count) for drafter in range(devices.count)]
        schedule = Schedule(
            drafters=devices.count,
            targets=len(devices.target_ids),
            depth=training["stream_depth"],
            first=first,
            steps=hyper.steps,
            evaluate_every=training["evaluate_every"],
            held_out=len(batches[0].held_out()),
        )
        connect(schedule, rank, wire)
        if devices.role(rank) == "target":
            _, source = load_source(plan, rows, job.target, cache_gb, device)
            served = watched(guard, stepped)
            with forbid_dense():
                waited = serve(schedule, rank, source, batches, device, wire, lambda: stop.asked, served)
            write_json(exchange / f"{rank}.guard", guard.counts())
            write_json(exchange / f"{rank}.waited", waited)
            dist.destroy_process_group()
            return None
        streamed = Streamed(schedule, rank, plan, device, wire, stop)
    process = make_process(shape, plan, hyper, rows, job.target, cache_gb, rank, devices.count, streamed)
    process.step.group = stop.group
    if found is not None and rank == 0:
        say(f"resuming from step {found.step} ({found.folder})")
    metrics = None
    if rank == 0:
        before = "" if found is None else found.metrics()
        metrics = Metrics(job.metrics, job.tensorboard, before, first, hyper.steps)
    topology = devices.topology(_of_ranks(devices, socket.gethostname())[:: devices.per_node])
    if caches:
        for told, name in zip(topology["ranks"], _of_ranks(devices, kind.name), strict=True):
            told["kind"] = name
    loop = Loop(
        process,
        hyper,
        guard,
        stop,
        evaluate_every=training["evaluate_every"],
        checkpoint_every=training["checkpoint_every"],
        checkpoints=job.checkpoints,
        facts={"resumed_from": None if found is None else found.step, "topology": topology},
        earlier_guards=[] if found is None else found.state["run"]["guard"],
        metrics=metrics,
        on_first_step=stepped,
    )
    if found is not None:
        loop.resume(found)
    ready = time.time()
    with forbid_dense():
        finished = loop.run()
    if streamed is not None:
        streamed.close()
        write_json(exchange / f"{rank}.waited", streamed.waiting.seconds())
    if metrics is not None:
        metrics.close()
    if devices.nodes > 1:
        stop.requested()  # rank 0, where all met, does not leave before the others have come so far
    if devices.processes > 1:
        dist.destroy_process_group()
    return {
        "finished": finished,
        "step": loop.step,
        "ready_at": ready,
        "first_step_at": loop.first_step_at,
    }


def watched(guard: "Guard", on_first: Callable[[], None]) -> Callable[[int], None]:
    """What a target rank does after each batch, of which it is told the number; after the first nothing may compile."""

    def served(count: int) -> None:
        if count == 1:
            on_first()
            guard.seal()
        guard.check(files=count == 1)

    return served


def _meeting(devices: Devices, rank: int, exchange: Path, address: str) -> dict[str, Any]:
    """Where the ranks meet: on one node torchrun sees to it; else at rank 0, which says in a note where that is."""
    if devices.nodes == 1:
        return {}
    from torch.distributed import TCPStore

    notes, name = Notes(exchange), "meeting"
    if rank == 0:
        store = TCPStore(address, 0, is_master=True, timeout=PATIENCE, wait_for_workers=False)
        notes.write(name, {"address": address, "port": store.port})
    else:
        while not (told := notes.read(name)):
            time.sleep(0.1)  # a node process ends this one if the first node does not come
        store = TCPStore(told["address"], told["port"], is_master=False, timeout=PATIENCE)
    return {"store": store, "rank": rank, "world_size": devices.processes}


def _of_ranks(devices: Devices, value: str) -> list[Any]:
    """What every rank says; on one node all are taken to say the same."""
    if devices.nodes == 1:
        return [value] * devices.processes
    import torch.distributed as dist

    values: list[Any] = [None] * devices.processes
    dist.all_gather_object(values, value)
    return values


def hyperparameters(settings: dict[str, Any]) -> Any:
    """The hyperparameters that the settings of the training stage give."""
    from draftflow.drafter.loss import Objective, default_gamma
    from draftflow.training.optimizer import Hyperparameters

    training = settings["training"]
    decay = training["loss_decay"]
    return Hyperparameters(
        steps=training["steps"],
        objective=Objective(
            training["loss"],
            default_gamma(settings["drafter"]["block_size"]) if decay == "auto" else decay,
            training["dpace_alpha"],
        ),
        optimizer=training["optimizer"],
        anchors_per_document=training["anchors_per_document"],
        learning_rate=training["learning_rate"],
        warmup=training["warmup"],
        min_learning_rate=training["min_learning_rate"],
        weight_decay=training["weight_decay"],
        betas=tuple(training["betas"]),
        clip_norm=training["clip_norm"],
        seed=training["seed"],
    )


if __name__ == "__main__":
    main()
