"""Where compiled code is kept, and every setting that is part of its key: one place, for warm-up and training alike.

All of it goes through environment variables that are set before the process starts, since a setting made through
torch's config in one thread is not seen by another, and changes the key.
Standard library only.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftflow.errors import DraftflowError
from draftflow.stage import say

SETTINGS = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    # A cache elsewhere would make a miss here look like a hit.
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    # flex_attention's backward needs Triton among the backends, or fails.
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN,TRITON",
    # A configuration that is made while a kernel is loaded, from the registers it takes, is not among those that the
    # cache holds: where it is the fastest, the kernel would be timed anew in every process.
    "TORCHINDUCTOR_DYNAMIC_SCALE_RBLOCK": "0",
    # C++ kernels for any number of threads. They would be built for the number at hand, which is not in their key.
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
    # Inductor would build four libraries with torch's headers to see that torch and the compiler agree on AVX2 and
    # AVX512 (20 s); they do for every torch wheel and compiler of today. Newer instructions are still tried one by one.
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}

FOOT_GUNS = {
    "TORCH_COMPILE_DISABLE": "switches compilation off, which makes attention dense",
    "TORCHDYNAMO_DISABLE": "switches compilation off, which makes attention dense",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "hides a failed compile and runs dense attention in its place",
    "TORCH_COMPILE_OVERRIDE_BACKENDS": "puts another compiler in the place of the one that was warmed",
    "TORCH_COMPILE_OVERRIDE_DYNAMO_CONFIGS": "changes the compiler's settings behind warm-up and training",
    "TORCH_COMPILE_OVERRIDE_INDUCTOR_CONFIGS": "changes the compiler's settings behind warm-up and training",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "switches the compile cache off",
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": "switches the compile cache off",
    "TRITON_CACHE_MANAGER": "keeps Triton's kernels elsewhere",
}

# What torch reads as no
OFF = ("", "0", "false", "False")

# Less than this is refused before work starts; the cache of a large drafter takes a tenth of it.
LEAST_FREE_BYTES = 512 * 2**20

# With less than this left after compiling, what was compiled may not have been kept: Inductor does not say so.
FULL_BYTES = 8 * 2**20

# After waiting for a lock this long without seeing a name in it, the wait is said without one.
UNNAMED_SECONDS = 2.0

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "afs", "9p"}
NETWORK |= {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.s3fs"}


def prepare(folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Make the cache folder and return the variables that processes which compile must be started with.

    Args:
        folder: of one cache key.
        environment: the variables that are set already.

    Raises:
        DraftflowError: the environment switches the compiler or its cache off, keeps the cache elsewhere, or sets
            what is set here; or the disk is full.
        OSError: the folder cannot be made or written to.
    """
    folder = folder.resolve()
    variables = {**folder_variables(folder), **SETTINGS}
    for name, effect in FOOT_GUNS.items():
        # of these, the setting alone counts for torch, whatever it says
        off = ("",) if name == "TORCHDYNAMO_SUPPRESS_ERRORS" else OFF
        if environment.get(name, "") not in off:
            raise DraftflowError(f"{name}={environment[name]} {effect}.", f"Run `unset {name}`.", "environment")
    for name, value in variables.items():
        if environment.get(name, value) != value:
            raise DraftflowError(
                f"{name}={environment[name]} is set, but warm-up and training must agree on {value}.",
                f"Run `unset {name}`.",
                "environment",
            )
    for name in ("inductor", "triton"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _require_disk(folder)
    return variables


def folder_variables(folder: Path) -> dict[str, str]:
    """The variables that name the cache folder, which compilers read each time they look for something."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def _require_disk(folder: Path) -> None:
    """See that compiled code can be written below `folder`, and say where that will be slow."""
    probe = folder / f".writable-{os.getpid()}"
    probe.touch()
    probe.unlink()
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        raise DraftflowError(
            f"{free / 2**20:.0f} MiB are free for the compile cache, and it may need {LEAST_FREE_BYTES / 2**20:.0f}.",
            "Free some space, then run the same command again.",
            str(folder),
        )
    kind = filesystem(folder)
    if kind in NETWORK:
        say(
            f"warning: the compile cache {folder} is on a network file system ({kind}): starts are slower, and locks "
            "may not be seen by other hosts; a bundle (docs/bundle.md) brings it to a local disk"
        )


def require_not_full(folder: Path) -> None:
    """See that the disk did not fill while code was compiled below `folder`.

    Raises:
        DraftflowError: it is as good as full.
    """
    free = shutil.disk_usage(folder).free
    if free < FULL_BYTES:
        raise DraftflowError(
            f"The disk filled while code was compiled: {free / 2**20:.1f} MiB are left.",
            "Free some space, then run the same command again.",
            str(folder),
        )


def filesystem(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Kind of the file system that holds `folder`, as the kernel calls it; None where it does not tell."""
    try:
        lines = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return None
    # later mounts hide earlier ones; octal escapes stand for blanks in a path
    points = [(Path(_unescaped(line[1])), line[2]) for line in lines if len(line) > 2]
    resolved = folder.resolve()
    holding = [(len(point.parts), kind) for point, kind in points if resolved.is_relative_to(point)]
    return max(enumerate(holding), key=lambda item: (item[1][0], item[0]))[1][1] if holding else None


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


@dataclass(frozen=True)
class Hold:
    """Cache folders that are held, by this process and by those that were given `descriptors`."""

    descriptors: tuple[int, ...]

    def share(self) -> None:
        """From now on others may read beside."""
        for descriptor in self.descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let go, for all that have the descriptors."""
        for descriptor in self.descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def all_of(holds: Sequence[Hold]) -> Hold:
    """Several holds as one."""
    return Hold(tuple(descriptor for hold in holds for descriptor in hold.descriptors))


@contextlib.contextmanager
def held(folder: Path, alone: bool) -> Iterator[Hold]:
    """Hold the cache `folder` while it is filled or changed (`alone`), or while processes read it; wait for others.

    The kernel lets go when the last process that has the descriptor ends, however it ends: a process that compiles is
    given it (`pass_fds`), and holds the folder when whoever started it was killed. Who holds it alone is written into
    the lock file.

    Raises:
        DraftflowError: the file system has no locks.
    """
    path = folder.with_name(f"{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with path.open("a+", encoding="utf-8") as stream:
        said, start = False, time.monotonic()
        while True:
            try:
                fcntl.flock(stream, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stream.seek(0)
                holder = _holder(stream.read())
                # who has just taken the lock writes its name next
                if not said and (holder or time.monotonic() - start > UNNAMED_SECONDS):
                    say(f"waiting for the compile cache {folder.name}: {holder or 'another process'} uses it")
                    said = True
                time.sleep(0.2)
            except OSError as error:
                raise DraftflowError(
                    f"The compile cache cannot be locked: {error.strerror}.",
                    "Put the project on a file system with locks, or allow them (NFS: mount without `nolock`).",
                    str(path),
                ) from None
        if alone:
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}\n")
            stream.flush()
        yield Hold((stream.fileno(),))


def _holder(text: str) -> str | None:
    """Who the lock file says holds the folder, if that process still lives as far as can be seen from here."""
    found = re.match(r"process (\d+) on (\S+),", text)
    if found is None or (found[2] == socket.gethostname() and not Path(f"/proc/{found[1]}").exists()):
        return None
    return text.strip()


def folder_in_use() -> Path | None:
    """The cache folder that this process was started with (`prepare`); None if it was started without."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if Path(folder).name != "inductor" or os.environ.get("TRITON_CACHE_DIR") != str(Path(folder).with_name("triton")):
        return None  # torch sets the variable in its own process too
    return Path(folder).parent


@contextlib.contextmanager
def as_fingerprinted(recorded: Mapping[str, str]) -> Iterator[None]:
    """Hide the variables that `prepare` added from a comparison with a fingerprint, which was taken without them.

    Args:
        recorded: the fields of the fingerprint's compile part; a variable of the user's own is among them.
    """
    added = {name: os.environ.pop(name) for name in SETTINGS if name in os.environ and name not in recorded}
    try:
        yield
    finally:
        os.environ.update(added)


def size_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
