"""One driver at a time trains a run: a lock beside its checkpoints that knows its holder, on any file system.

    checkpoints/<settings digest>.lock-0001    JSON: who holds it; its time is renewed while the holder lives

Locks of the operating system do not reach over every network file system. A file that is linked to a name that must
not exist does. Locks are numbered, and a lock whose holder is dead is succeeded, never removed before it is: of two
that succeed it at once, one gets the number.
"""

import contextlib
import errno
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from draftflow.errors import DraftflowError
from draftflow.processes import Process
from draftflow.stage import say

# How often the holder says that it lives, and how long it may be silent where nothing else can tell, in seconds.
RENEWED_EVERY = 30.0
SILENT_AT_MOST = 300.0

# Seconds for which a job that Slurm is taking down is waited for.
PATIENCE = 120.0


@contextlib.contextmanager
def held(checkpoints: Path) -> Iterator[None]:
    """Hold the run whose checkpoints lie in this folder.

    Raises:
        DraftflowError: another process holds it, and lives as far as can be known.
    """
    me = Process.here()
    lock = _acquire(checkpoints, me)
    released = threading.Event()
    renewing = threading.Thread(target=_renew, args=(lock, released), daemon=True)
    renewing.start()
    try:
        yield
    finally:
        released.set()
        renewing.join()
        lock.unlink(missing_ok=True)


def _renew(lock: Path, released: threading.Event) -> None:
    while not released.wait(RENEWED_EVERY):
        with contextlib.suppress(OSError):  # a server that is away for a moment
            try:
                os.utime(lock)
            except FileNotFoundError:
                if not any(lock.parent.glob(f"{lock.name.rpartition('-')[0]}-*")):
                    continue
                say("another process has taken over this run, having heard nothing of this one; stopping")
                os.kill(os.getpid(), signal.SIGTERM)
                return


def _acquire(checkpoints: Path, me: Process) -> Path:
    checkpoints.parent.mkdir(parents=True, exist_ok=True)
    claim = checkpoints.with_name(f".{checkpoints.name}.claim-{uuid.uuid4().hex}")
    claim.write_text(json.dumps(me.facts()), encoding="utf-8")
    end = time.monotonic() + PATIENCE
    seen: dict[Path, float] = {}
    try:
        while True:
            os.utime(claim)  # the time of the file's server, which the holder renews by as well
            left = _locks(checkpoints)  # before any is judged, which may take as long as Slurm takes to answer
            words = None
            for lock in left:
                words = _left_by(lock, claim.stat().st_mtime, seen, wait=time.monotonic() < end)
                if words is None:
                    break
            if left and words is None:
                time.sleep(1)
                continue
            number = 1 + max((int(lock.name.rpartition("-")[2]) for lock in left), default=0)
            mine = checkpoints.with_name(f"{checkpoints.name}.lock-{number:04}")
            try:
                _link(claim, mine)
            except FileExistsError:
                continue
            # somebody came and went, and another came, since `left`, maybe by the same number
            if any(left.get(lock) != holder for lock, holder in _locks(checkpoints).items() if lock != mine):
                mine.unlink()
                continue
            if words:
                say(words)
            for lock in left:
                lock.unlink(missing_ok=True)
            return mine
    finally:
        claim.unlink(missing_ok=True)


def _link(claim: Path, mine: Path) -> None:
    """Give the claim a name that must not exist.

    Raises:
        FileExistsError: it does.
    """
    try:
        os.link(claim, mine)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        with mine.open("x", encoding="utf-8") as lock:  # no links here, as on FAT, and through some servers
            lock.write(claim.read_text(encoding="utf-8"))


def _locks(checkpoints: Path) -> dict[Path, str]:
    """The locks that are there, and what they hold."""
    found = {}
    for lock in sorted(checkpoints.parent.glob(f"{checkpoints.name}.lock-*")):
        with contextlib.suppress(FileNotFoundError):
            found[lock] = lock.read_text(encoding="utf-8", errors="replace")
    return found


def _left_by(lock: Path, now: float, seen: dict[Path, float], wait: bool) -> str | None:
    """Words on a lock that a dead holder left behind; None if that is not certain yet, or the lock is gone already.

    Args:
        lock: of some holder.
        now: by the clock of the lock's server.
        seen: when each lock was renewed last, as the first look found it. Who cannot be asked is heard of if it renews
            the lock after that, and silent if it does not.
        wait: whether a job that is being taken down is still waited for.

    Raises:
        DraftflowError: the holder lives as far as can be known.
    """
    try:
        holder = Process.read(json.loads(lock.read_text(encoding="utf-8")))
        renewed = lock.stat().st_mtime
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise DraftflowError("This is not a lock.", "Remove it.", str(lock)) from None
    state, silent = holder.state(), now - renewed
    if state == "ending" and wait:
        return None
    if state == "dead" or (state == "unknown" and silent > SILENT_AT_MOST):
        why = "is over" if state == "dead" else f"has not been heard of for {silent:.0f} s"
        return f"taking over this run: {holder} held it and {why}"
    if state == "unknown":
        if lock not in seen:
            say(f"{holder} held this run; waiting until it is heard of, or silent for {SILENT_AT_MOST:.0f} s")
        if seen.setdefault(lock, renewed) == renewed:
            return None
    advice = f"Wait for it, or end it: scancel {holder.job}" if holder.job else "Wait for it, or end it."
    raise DraftflowError(f"{holder} is training this run.", advice, str(lock))
