"""What Slurm knows of jobs, asked through its commands. Standard library only."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# States after which a job has no process any more; REQUEUED jobs are PENDING again.
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}

# Of the executor plugin: the longest time between two looks at its jobs, in seconds.
LONGEST_PAUSE = 180


@dataclass(frozen=True)
class Job:
    """A job in the queue: Slurm's id and state, name, comment and working directory as they were submitted."""

    id: str
    state: str
    name: str
    comment: str
    folder: str


def queued_jobs() -> list[Job]:
    """The jobs of this user that wait or run; [] where Slurm does not answer."""
    answer = _ask("squeue", "--noheader", f"--user={os.getuid()}", "--format=%i|%T|%j|%Z|%k")
    return [] if answer is None else read_jobs(answer.stdout)


def read_jobs(listing: str) -> list[Job]:
    """Jobs from lines of `squeue --format=%i|%T|%j|%Z|%k`; the comment is last since it may hold anything."""
    jobs = []
    for line in listing.splitlines():
        fields = line.split("|", 4)
        if len(fields) == 5:
            number, state, name, folder, comment = fields
            jobs.append(Job(number, state, name, comment, folder))
    return jobs


def state_of(job: str) -> str | None:
    """State of a job; "" if Slurm does not know it any more, None where Slurm does not answer."""
    answer = _ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
    if answer is None:
        return None
    if answer.returncode:
        return "" if "Invalid job id" in answer.stderr else None
    return next(iter(answer.stdout.split()), "")


def own_job() -> tuple[str, int] | None:
    """Id of the Slurm job that this process belongs to, and how often Slurm has started it again; None outside."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    restarts = os.environ.get("SLURM_RESTART_COUNT")
    if restarts is None:  # the executor plugin drops it on the way into a job's step
        answer = _ask("squeue", "--noheader", f"--jobs={job}", "--Format=RestartCnt")
        restarts = "" if answer is None else answer.stdout.strip()
    return job, int(restarts) if restarts.isdigit() else 0


@dataclass(frozen=True)
class Bookkeeping:
    """How the state of a job that is over can be learned: whether there is accounting, and how long squeue knows it."""

    accounting: bool
    remembered_seconds: int


def bookkeeping() -> Bookkeeping | None:
    """Of this cluster; None where Slurm does not answer."""
    answer = _ask("scontrol", "show", "config")
    return None if answer is None or answer.returncode else read_bookkeeping(answer.stdout)


def read_bookkeeping(listing: str) -> Bookkeeping:
    """From what `scontrol show config` prints."""
    values = dict(re.findall(r"^(\w+) += (.*?) *$", listing, re.MULTILINE))
    age = re.match(r"\d+", values.get("MinJobAge", ""))
    storage = values.get("AccountingStorageType", "")
    return Bookkeeping(storage not in ("", "(null)", "accounting_storage/none"), int(age[0]) if age else 300)


def make_jobs_visible(settings: Any) -> str | None:
    """Set the Slurm executor's way to learn that a job is over, where there is no accounting.

    Left alone it asks sacct, which then knows nothing, and waits for ever.

    Args:
        settings: of the executor plugin; changed.

    Returns:
        a warning, if there is reason for one.
    """
    found = bookkeeping()
    if found is None or found.accounting:
        return None
    settings.status_command = "squeue"
    # the plugin goes back to sacct if squeue forgets within three pauses
    age = found.remembered_seconds
    settings.init_seconds_before_status_checks = max(1, min(settings.init_seconds_before_status_checks, age // 3))
    if age >= LONGEST_PAUSE:
        return None
    return (
        f"this cluster has no accounting and forgets a job {age} s after its end (MinJobAge); Snakemake looks every "
        f"{LONGEST_PAUSE} s when nothing changes, and may wait for a job that is over"
    )


def same_folder(job: Job, folder: Path) -> bool:
    """Whether a job was submitted from this folder."""
    return os.path.realpath(job.folder) == os.path.realpath(folder)


def _ask(*command: str) -> "subprocess.CompletedProcess[str] | None":
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return None
