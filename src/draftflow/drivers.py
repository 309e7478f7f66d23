"""The Snakemake processes that drive a project folder: what a killed one leaves behind is seen by the next.

Every driver writes `.snakemake/draftflow/<name>.json` before its first job: who it is, and which outputs each of its
jobs makes. Killed, it leaves that file, Snakemake's lock of the folder, and on a cluster its jobs, which go on.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from draftflow import scheduler
from draftflow.errors import DraftflowError
from draftflow.processes import Process
from draftflow.stage import write_json

RECORDS = Path(".snakemake/draftflow")
LOCKS = Path(".snakemake/locks")

# What the executor plugin puts before the name of a rule, or of a group of rules.
COMMENT = "rule_"


def register(driver: Process, name: str, outputs: Mapping[str, Sequence[str]]) -> None:
    """Write who drives the folder and what its jobs make; records of those that are over go, but for queued jobs.

    Args:
        driver: this Snakemake, which holds the lock of the folder.
        name: of this driver's jobs in the queue.
        outputs: what each job makes, by the name of its rule or group.
    """
    RECORDS.mkdir(parents=True, exist_ok=True)
    known = {job.name for job in scheduler.queued_jobs()}
    # with no lock beside that of this driver, those of which nothing is known (other host, earlier boot) are over
    over = {"dead"} if len(list(LOCKS.glob("*.output.lock"))) > 1 else {"dead", "unknown"}
    for path, earlier, _ in _records():
        if path.stem not in known and earlier.state() in over:
            path.unlink(missing_ok=True)
    write_json(RECORDS / f"{name}.json", {**driver.facts(), "jobs": outputs})


def remove_stale_locks() -> str | None:
    """Remove Snakemake's locks of this folder if a driver that is dead has left them.

    Locks of a driver that lives, of one on another host, and of one that was killed before it wrote its record stay;
    they are for the user to judge (`snakemake --unlock`).

    Returns:
        what was done, in a line.
    """
    locks = list(LOCKS.glob("*.lock"))
    records = _records()
    if not locks or not records or any(driver.state() != "dead" for _, driver, _ in records):
        return None
    path, driver, _ = max(records, key=lambda record: record[0].stat().st_mtime)
    written = path.stat().st_mtime
    if any(lock.stat().st_mtime > written for lock in locks):
        return None
    for lock in locks:
        lock.unlink(missing_ok=True)
    return f"the Snakemake that drove this folder was killed ({driver}); its lock is removed"


def require_not_submitted(outputs: Mapping[str, Sequence[str]], queued: Sequence[scheduler.Job]) -> None:
    """Refuse to submit what a job in the queue already makes.

    Args:
        outputs: what is about to be made, by the name of its rule or group.
        queued: this user's jobs.

    Raises:
        DraftflowError: such a job waits or runs.
    """
    drivers = {path.stem: jobs for path, _, jobs in _records()}
    wanted = {output for made in outputs.values() for output in made}
    for job in queued:
        if not (job.comment.startswith(COMMENT) and scheduler.same_folder(job, Path.cwd())):
            continue
        name = job.comment.removeprefix(COMMENT).partition("_wildcards_")[0]
        makes = drivers.get(job.name, {}).get(name)
        # what a driver without a record makes is known by the rule alone
        if name in outputs if makes is None else not wanted.isdisjoint(makes):
            raise DraftflowError(
                f"Job {job.id} ({job.state.lower()}), which an earlier Snakemake submitted, already does {name}.",
                f"Wait until it is over and run the same command again, or end it: scancel {job.id}",
                "squeue",
            )


def _records() -> list[tuple[Path, Process, dict[str, list[str]]]]:
    """Of all drivers: file, process, outputs by job."""
    found = []
    for path in RECORDS.glob("*.json"):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found.append((path, Process.read(values), values["jobs"]))
        except (OSError, ValueError, KeyError):
            continue  # removed meanwhile, or nothing of ours
    return found
