"""The training processes of one node: torchrun and its workers, from their start to what is known of their end.

With one node `draftflow.training.train` runs them itself. With several, this is the entry point that the launcher
starts once on each (see launch.py). Every node process then has a note (see exchange.py) in the folder of the run:

    beat       counts on, twice a second, as long as it lives
    host       where it is
    stop       whether a stop was asked for here; all nodes then ask their workers for one
    stepped    whether its workers have taken their first step
    ending     how its processes ended: an `Ending`

It ends its workers when another node failed or is lost. No torch in this process.
"""

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from draftflow.compile_cache import location
from draftflow.compile_cache.kinds import Kind
from draftflow.compile_cache.local import local_caches
from draftflow.compile_cache.warm import CacheInUse
from draftflow.errors import DraftflowError
from draftflow.processes import started_at
from draftflow.stage import Record, as_refusal, end_with_parent, say
from draftflow.training.devices import Devices, from_settings, threads_per_process
from draftflow.training.exchange import Notes, take_number
from draftflow.training.network import address_among
from draftflow.training.worker import read_job

# What asks for a stop; the last is what many schedulers send before a job's time is over
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

JOB, LAUNCH = "job.json", "launch.json"

LAUNCHER = "launcher"  # the note of the process that started the launcher

TICK_SECONDS = 0.5

# A worker in torchrun's last words, of which the root cause comes last: time, place, exit status, process
TOLD = r"time +: (\S+)\n(?: +host[^\n]*\n)? +rank +: (\d+)[^\n]*\n +exitcode +: (-?\d+) +\(pid: (\d+)\)"

# Between failures that torchrun, which looks several times a second, notices at once; by its clock of whole seconds
AT_ONCE = timedelta(seconds=5)

# Timeouts for which a node waits for others that copy environment and cache to their disks before they are heard of
COPYING = 10

# What the system says when who made the folder has removed it: the run is over
GONE = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True)
class Ending:
    """How the processes of a node ended.

    Attributes:
        status: of torchrun; 0 if all of its workers came to their end, or were stopped.
        outcome: what rank 0 wrote, if it was here.
        error: of the rank that failed first: `rank`, `at` (time of its file), and a refusal (`what`, `remedy`, `where`)
            or a `traceback`.
        killed: the rank of the first worker that a signal ended, and the signal; not what `Workers.cut` killed.
        stopping: whether a stop was asked for.
        cut_short: whether the workers were ended because of another node.
        lost: another node that gave no sign of life.
        log: what torchrun said.
    """

    status: int
    outcome: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    killed: tuple[int, int] | None = None
    stopping: bool = False
    cut_short: bool = False
    lost: int | None = None
    log: str = ""


@dataclass
class Workers:
    """What runs on a node.

    Attributes:
        exchange: the folder through which they talk.
        torchrun: the process that started the workers.
        stopping: whether a stop was asked for.
        cut_short: whether they were ended because of another node.
        cut_down: the processes of those that were alive then.
    """

    exchange: Path
    ranks: range
    torchrun: "subprocess.Popen[bytes]"
    stopping: bool = False
    cut_short: bool = False
    cut_down: set[int] | None = None

    def stop(self) -> None:
        """Ask for a checkpoint and an end after this step. Workers that are not ready yet are ended."""
        self.stopping = True
        for process in self._ready() or [self.torchrun.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        if 0 in self.ranks:
            say("stopping after this step")

    def cut(self) -> None:
        """End them: they wait for ranks that are gone. To be called again as long as they run."""
        if self.cut_down is not None:
            return
        ready, first, self.cut_short = self._ready(), not self.cut_short, True
        alive = {process for process in ready if started_at(process) is not None}
        if first and len(alive) < len(ready):
            # That another node was noticed first is no proof that it failed first. Torchrun is about to notice that one
            # died here, and to say which: all the rest then end of it.
            return
        self.cut_down = alive
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.torchrun.terminate()  # which ends those that are not ready

    @property
    def stepped(self) -> bool:
        """Whether all of them have taken a step, with everything compiled in their memory."""
        return all((self.exchange / f"{rank}.stepped").exists() for rank in self.ranks)

    def _ready(self) -> list[int]:
        files = [self.exchange / f"{rank}.pid" for rank in self.ranks]
        return [int(file.read_text()) for file in files if file.exists()]


def run_node(
    exchange: Path,
    devices: Devices,
    cache: CacheInUse,
    node: int = 0,
    address: str = "127.0.0.1",
    watch: Callable[[Workers], None] = lambda workers: None,
) -> Ending:
    """Run the workers of a node, pass a stop on to them, and tell how they ended.

    Args:
        exchange: the folder with `job.json`.
        devices: of the run.
        cache: the compile cache; let go once all workers of this node have taken a step.
        node: the number of the node.
        address: at which other nodes reach this one.
        watch: called twice a second.
    """
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "1", "--nproc-per-node", str(devices.per_node)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command += ["--max-restarts", "0", "-m", "draftflow.training.worker"]
    command += ["--job", str(exchange / JOB), "--exchange", str(exchange), "--on-node", str(node), "--address", address]
    command += ["--caches", json.dumps(cache.folders)]
    log = exchange / f"torchrun-{node}.log"
    with log.open("wb") as stream:
        # A session of its own: a signal to the terminal's processes must not make torchrun kill the workers.
        # But not an outliving one: when this process is killed, torchrun is told to stop, and it tells the workers.
        torchrun = subprocess.Popen(
            command,
            env={**os.environ, **cache.environment, **threads_per_process(devices)},
            stderr=stream,
            start_new_session=True,
            preexec_fn=_as_torchrun,
            pass_fds=cache.hold.descriptors,
        )
        workers = Workers(exchange, range(node * devices.per_node, (node + 1) * devices.per_node), torchrun)
        with on_stop(workers.stop):
            loading = True
            while torchrun.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    torchrun.wait(timeout=TICK_SECONDS)
                if loading and workers.stepped:
                    cache.hold.release()
                    loading = False
                watch(workers)
    return _ending(workers, log.read_text(encoding="utf-8", errors="replace"))


@contextlib.contextmanager
def on_stop(then: Callable[[], None]) -> Iterator[None]:
    """Call `then` for every signal that asks for a stop, while in the block."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    for number in STOPPING:
        signal.signal(number, lambda *_: then())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _as_torchrun() -> None:
    """What torchrun is from its start: it ends with this process, and a scheduler's warning is for the workers."""
    end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _ending(workers: Workers, log: str) -> Ending:
    """What the processes left behind."""
    exchange, errors = workers.exchange, []
    for rank in workers.ranks:
        file = exchange / f"{rank}.error"
        if file.exists():
            told = json.loads(file.read_text(encoding="utf-8"))
            errors.append({"rank": rank, "at": file.stat().st_mtime, **told})
    # the others failed of the first; a refusal is the better news
    errors.sort(key=lambda error: ("what" not in error, error["at"]))
    killed = killed_worker(log, workers.cut_down or ())
    outcome = exchange / "outcome.json"
    return Ending(
        status=workers.torchrun.returncode,
        outcome=json.loads(outcome.read_text(encoding="utf-8")) if 0 in workers.ranks and outcome.exists() else None,
        error=errors[0] if errors else None,
        killed=(workers.ranks[killed[0]], killed[1]) if killed else None,
        stopping=workers.stopping,
        cut_short=workers.cut_short,
        log=log,
    )


def killed_worker(log: str, cut_down: Collection[int] = ()) -> tuple[int, int] | None:
    """The worker that was killed, as torchrun's last words tell it: its place on the node, and the signal.

    The others then lose their connection to it, and fail or abort. Where torchrun notices both at once, it takes the
    lower place for the root cause. It also tells how those ended that it then ended itself, which is no cause: with
    SIGTERM, and those that are left half a minute later with SIGKILL.

    Args:
        log: of torchrun.
        cut_down: process ids of workers that were ended on purpose.
    """
    told = [
        (datetime.strptime(time, "%Y-%m-%d_%H:%M:%S"), int(place), -int(status), int(process))
        for time, place, status, process in re.findall(TOLD, log)
    ]
    if not told:
        return None
    *others, root = told
    at_once = [one for one in others if one[2] == signal.SIGKILL and abs(one[0] - root[0]) <= AT_ONCE]
    found = [
        (place, number) for _, place, number, process in [root, *at_once] if number > 0 and process not in cut_down
    ]
    return min(found, key=lambda one: one[1] == signal.SIGABRT, default=None)


@dataclass
class Member:
    """One node among those of a run: what it tells the others, and what it makes of what they tell.

    Args:
        notes: of the run.
        node: the number of this node.
        nodes: how many there are.
        timeout: seconds without a sign of life after which another is lost.
    """

    notes: Notes
    node: int
    nodes: int
    timeout: float
    facts: dict[str, Any] = field(default_factory=lambda: {"host": socket.gethostname(), "stop": False})
    beats: int = 0
    lost: int | None = None
    parent: int = field(default_factory=os.getppid)

    def tell(self, **facts: Any) -> None:
        """Write the note of this node, with facts that others shall know from now on."""
        self.facts |= facts
        self.beats += 1
        self.notes.write(note(self.node), {"beat": self.beats, **self.facts})

    def others(self) -> dict[int, dict[str, Any]]:
        """The notes of the other nodes."""
        return {node: self.notes.read(note(node)) for node in range(self.nodes) if node != self.node}

    def asked_to_stop(self, others: dict[int, dict[str, Any]]) -> bool:
        """Whether a stop was asked for anywhere, or who would ask for one is gone."""
        launcher = self.notes.read(LAUNCHER)
        silent = self.notes.silence(LAUNCHER, launcher.get("beat")) > self.timeout
        asked = any(told.get("stop") for told in [launcher, *others.values()])
        return self.facts["stop"] or asked or silent or os.getppid() != self.parent

    def alone(self, others: dict[int, dict[str, Any]]) -> bool:
        """Whether another node failed or is lost, so that there is nothing left to wait for."""
        for node, told in others.items():
            ending = told.get("ending")
            if ending is None and self.notes.silence(note(node), told.get("beat")) > self.timeout:
                self.lost = node
                return True
            if ending is not None and ending["status"] != 0:
                return True
        return False

    def watch(self, workers: Workers) -> None:
        """To be called while the workers run."""
        try:
            self.tell(stop=self.facts["stop"] or workers.stopping, stepped=workers.stepped)
            others = self.others()
            if not workers.stopping and self.asked_to_stop(others):
                workers.stop()
            if self.alone(others):
                workers.cut()
        except OSError as error:  # others will think that this node is lost if it stays so
            if error.errno in GONE:
                workers.cut()

    def meet(self, patience: float = 1) -> list[str]:
        """Wait until all nodes are there, for so many timeouts; the name of the host of each.

        Raises:
            DraftflowError: some did not come.
        """
        start = time.monotonic()
        while True:
            self.tell()
            others = self.others()
            there = {**others, self.node: self.facts}
            if all("host" in told for told in there.values()):
                return [there[node]["host"] for node in range(self.nodes)]
            if self.asked_to_stop(others):
                raise Stopped
            if time.monotonic() - start > self.timeout * patience:
                missing = sum("host" not in told for told in there.values())
                raise DraftflowError(
                    f"{missing} of {self.nodes} nodes did not start within {self.timeout * patience:g} s.",
                    "See that the launcher starts its arguments once on each node, and that all see this folder.",
                    str(self.notes.folder),
                )
            time.sleep(TICK_SECONDS / 2)


class Stopped(BaseException):
    """A stop was asked for before there were any workers."""


def note(node: int) -> str:
    """Name of the note of a node."""
    return f"node-{node}"


def main() -> None:
    """Run the workers of this node, among the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exchange", type=Path, required=True, help="folder of the run, seen by all nodes")
    exchange: Path = parser.parse_args().exchange
    job = read_job(exchange / JOB)
    devices = from_settings(job.settings)
    launch = json.loads((exchange / LAUNCH).read_text(encoding="utf-8"))
    # a scheduler may number the nodes
    node = take_number(exchange, devices.nodes, int(os.environ.get("SLURM_NODEID", 0)))
    if node is None:
        sys.exit(f"draftflow: the launcher starts more than {devices.nodes} processes; this one is not needed")
    member = Member(Notes(exchange), node, devices.nodes, launch["node_timeout"])
    with on_stop(lambda: member.facts.update(stop=True)):
        try:
            ending = _run(exchange, devices, job.kinds, launch, member)
        except Stopped:
            ending = Ending(status=1, stopping=True)
        except Exception as error:
            if not exchange.exists():
                sys.exit("draftflow: the run is over")
            refusal = as_refusal(error)
            told = {"traceback": traceback.format_exc()} if refusal is None else refusal.parts()
            ending = Ending(status=1, error={"rank": node * devices.per_node, "at": time.time(), **told})
        stop = member.facts["stop"] or ending.stopping
        member.tell(ending={**asdict(ending), "lost": member.lost, "stopping": stop}, stop=stop)
    sys.exit(0 if ending.status == 0 else 1)


def _run(exchange: Path, devices: Devices, kinds: Sequence[Kind], launch: dict[str, Any], member: Member) -> Ending:
    """Meet the others, and run the workers."""
    with _cache(kinds, launch) as cache:
        hosts = member.meet(COPYING if launch["node_local"] else 1)
        address, interface = address_among(hosts, member.node)
        cache = replace(cache, environment={**cache.environment, **interface})
        return run_node(exchange, devices, cache, member.node, address, member.watch)


@contextlib.contextmanager
def _cache(kinds: Sequence[Kind], launch: dict[str, Any]) -> Iterator[CacheInUse]:
    """The compile cache as this node reads it: on its own disk, or where it was verified for all."""
    variables, folders = launch["environment"], launch["folders"]
    with contextlib.ExitStack() as stack:
        if launch["node_local"] is not None:
            yield stack.enter_context(local_caches(kinds, launch["node_local"], Record("node")))
            return
        shared = folders.values() or [Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent]
        holds = [stack.enter_context(location.held(Path(folder), alone=False)) for folder in shared]
        yield CacheInUse(variables, location.all_of(holds), folders)


if __name__ == "__main__":
    main()
