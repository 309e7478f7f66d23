"""Who holds something: a process, known again on its own host, through Slurm, or not at all. Standard library only."""

import os
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from draftflow import scheduler

State = Literal["alive", "ending", "dead", "unknown"]


@dataclass(frozen=True)
class Process:
    """A process of some host.

    Attributes:
        host: name of the host.
        machine: what its process numbers hold for: one boot of one kernel, and one container.
        pid: process number.
        started: when it was started, in ticks since the boot: another process of the same number has another.
        job: Slurm's job that it belongs to.
        restarts: how often Slurm had started that job again.
    """

    host: str
    machine: str
    pid: int
    started: int
    job: str | None
    restarts: int

    @classmethod
    def here(cls) -> "Process":
        """This process."""
        job, restarts = scheduler.own_job() or (None, 0)
        started = started_at(os.getpid())
        assert started is not None
        return cls(socket.gethostname(), _machine(), os.getpid(), started, job, restarts)

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Process":
        """The process that `facts` told."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    def facts(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)

    def state(self) -> State:
        """Whether it still lives; `ending` if Slurm is taking its job down, `unknown` where this host cannot tell."""
        if self.machine == _machine():
            if started_at(self.pid) != self.started:
                return "dead"
            return "ending" if self.job and _ending(scheduler.state_of(self.job)) else "alive"
        if self.job is None:
            return "unknown"
        mine = scheduler.own_job()
        if mine is not None and mine[0] == self.job and mine[1] > self.restarts:
            return "dead"  # this very job, before Slurm started it again
        state = scheduler.state_of(self.job)
        if state is None:
            return "unknown"
        if _ending(state):
            return "ending"
        return "dead" if state == "" or state in scheduler.ENDED else "alive"

    def __str__(self) -> str:
        job = f"Slurm job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}"


def _ending(state: str | None) -> bool:
    return state == "COMPLETING"


@cache
def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (the text of the link is not a path)


def started_at(pid: int) -> int | None:
    """When the process of this number started, None if there is none or only its exit status is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
