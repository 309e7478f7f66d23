"""The copy of an environment on the local disk of a node, made by whichever process comes first.

    <environment.node_local>/<env_id>-<digest of the archive>/    venv/ copy.json

`venv/bin/draftflow-python` of the shared environment runs this before each stage that runs on nodes, and then the
interpreter of the copy. A copy that is there is used if every file has the size and the time that it was made with.
Standard library only.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from draftflow.compile_cache.location import NETWORK, filesystem
from draftflow.environment import archive as archives
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage, say, write_json

KEY = "config key environment.node_local"
CHOOSE = "Name a folder on a local disk of the nodes that you may write to, or set null."

LISTING = "copy.json"

# After waiting this long for another process, the wait is said.
PATIENCE_SECONDS = 2.0


def local_folder(setting: str) -> Path:
    """The folder `environment.node_local` of this node, made if need be and seen to be writable.

    Args:
        setting: an absolute path, in which variables stand for what they are on this node.

    Raises:
        DraftflowError: a variable is not set here, the path is not absolute, or it cannot be written to.
    """
    expanded, host = os.path.expandvars(setting), socket.gethostname()
    unset = re.search(r"\$(\w+|\{[^}]*\})", expanded)
    if unset or not Path(expanded).is_absolute():
        what = f"{unset[0]} is not set" if unset else f"{expanded!r} is not an absolute path"
        raise DraftflowError(f"{setting}: {what} on {host}.", CHOOSE, KEY)
    folder = Path(expanded)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DraftflowError(f"{folder} on {host} cannot be written to: {error.strerror}.", CHOOSE, KEY) from None
    kind = filesystem(folder)
    if kind in NETWORK:
        say(f"warning: {folder} on {host} is on a network file system ({kind}), from which nothing is gained")
    return folder


def require_room(folder: Path, needed: int, what: str) -> None:
    """See that the disk of `folder` has room.

    Args:
        folder: on the node's disk.
        needed: bytes.
        what: is to be put there, for the message.

    Raises:
        DraftflowError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise _no_room(folder, needed, what, f"{free / 2**20:,.0f} MiB are free")


@contextlib.contextmanager
def room_kept(folder: Path, needed: int, what: str) -> Iterator[None]:
    """`require_room`, and the same refusal if the disk fills, or the user's share of it, before the block is done."""
    require_room(folder, needed, what)
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _no_room(folder, needed, what, os.strerror(error.errno).lower()) from None


def _no_room(folder: Path, needed: int, what: str, found: str) -> DraftflowError:
    return DraftflowError(
        f"{what} needs {needed / 2**20:,.0f} MiB on {socket.gethostname()}, and {found}.",
        "Remove older copies there, or name a folder on a larger disk (config key environment.node_local).",
        str(folder),
    )


def local_copy(environment: Path, setting: str) -> Path:
    """The venv of this node's copy of an environment. One process makes it, and others wait for that.

    Args:
        environment: `results/environments/<env_id>`, packed.
        setting: as of `local_folder`.

    Raises:
        DraftflowError: as `local_folder`; the archive is damaged, or the disk full.
    """
    archive = environment / archives.NAME
    value = archives.checksum(archive)
    folder = local_folder(setting)
    copy = folder / f"{environment.name}-{value[:12]}"
    with _alone(copy):
        words = _examine(copy)
        if words is not None:
            if copy.exists():
                say(f"warning: the copy {copy} is damaged ({words}); making it anew")
            _make(copy, archive, value)
    return copy / "venv"


def _make(copy: Path, archive: Path, value: str) -> None:
    """Make the folder `copy`, whole or not at all. What killed processes left is removed first; `copy` is held."""
    for left in [*copy.parent.glob(f".{copy.name}.*.tmp"), copy]:
        shutil.rmtree(left, ignore_errors=True)
    needed = archives.needed_bytes(archive)
    temporary = copy.with_name(f".{copy.name}.{os.getpid()}.tmp")
    start = time.perf_counter()
    try:
        with room_kept(copy.parent, needed, "The copy of the environment"):
            temporary.mkdir()
            listing = archives.unpack(archive, value, temporary / "venv")
            write_json(temporary / LISTING, listing)
        temporary.rename(copy)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    seconds = time.perf_counter() - start
    say(f"environment on {socket.gethostname()}: {copy}, {len(listing)} files, verified, in {seconds:.1f} s")


def _examine(copy: Path) -> str | None:
    """What is wrong with a copy, in words; None if it is as it was made. Bytecode may have been added since."""
    try:
        listing = json.loads((copy / LISTING).read_text(encoding="utf-8"))
        for path, recorded in listing.items():
            status = (copy / "venv" / path).lstat()
            if isinstance(recorded, str):
                same = stat.S_ISLNK(status.st_mode) and str((copy / "venv" / path).readlink()) == recorded
            else:
                same = stat.S_ISREG(status.st_mode) and [status.st_size, int(status.st_mtime)] == recorded
            if not same:
                return f"{path}: changed"
    except OSError as error:
        return f"{Path(error.filename or copy).name}: {error.strerror}"
    except (ValueError, AttributeError):
        return f"{LISTING}: changed"
    return None


@contextlib.contextmanager
def _alone(copy: Path) -> Iterator[None]:
    """Wait until no other process of this node makes or examines the copy. The kernel lets go of who is killed."""
    path = copy.with_name(f".{copy.name}.lock")
    try:
        with path.open("a") as stream:
            start = time.monotonic()
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - start > PATIENCE_SECONDS:
                        say(f"waiting for {copy.name}, which another process of this node is making")
                        fcntl.flock(stream, fcntl.LOCK_EX)
                        break
                    time.sleep(0.1)
            yield
    except OSError as error:
        if error.filename != str(path) and error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            raise
        raise DraftflowError(f"{path} cannot be locked: {error.strerror}.", CHOOSE, KEY) from None


def main() -> None:
    """Print the venv that the stages of the environment in the argument run from on this node."""
    environment = Path(sys.argv[1]).resolve()
    with contextlib.redirect_stdout(sys.stderr):
        venv = local_copy(environment, os.environ["DRAFTFLOW_NODE_LOCAL"])
    print(venv)


if __name__ == "__main__":
    run_stage(main)
