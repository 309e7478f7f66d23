"""Stage: an installed environment as one file, from which each node of a cluster makes a copy on its own disk.

    environment.tar           environment.json    kind, format, and the bytes that a copy takes
                              bin/... lib/...     the venv, in the order of its paths, its bytecode included
    environment.tar.sha256    of that file, for `sha256sum --check`

One large file is read from a shared file system at its full speed, and thousands of small ones are not. Uncompressed:
docs/node-local.md compares. Times of files are kept, to the second: bytecode holds those of its sources.
Standard library only.
"""

import compileall
import hashlib
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from io import BufferedIOBase, BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any

from draftflow.environment import record as records
from draftflow.errors import DraftflowError
from draftflow.stage import beside, put_in_place, run_stage, say, stage_parser

NAME = "environment.tar"
HEADER = "environment.json"
KIND = "draftflow environment"
FORMAT = 1

AGAIN = "Run `snakemake --forcerun pack_environment`."

# what starts the shared environment's stages, and would look for an archive beside a copy
_LEFT_OUT = "bin/draftflow-python"

# that make bytecode: the host of a workflow is often shared
_WORKERS = 8

# of local file systems
_BLOCK = 4096
_MEBIBYTE = 2**20

# What a copy holds: relative path -> size in bytes and time in seconds of a file, or what a link says.
Listing = dict[str, list[int] | str]


def pack(venv: Path, output: Path) -> dict[str, Any]:
    """Write an environment as one file, whole or not at all, and its SHA-256 beside it.

    The bytecode of every module is made first, in the environment itself. The same environment makes the same bytes.

    Args:
        venv: installed by `install`.
        output: the archive. `<output>.sha256` is written too.

    Returns:
        files, bytes, sha256: of what was written.

    Raises:
        DraftflowError: a file is not what its package recorded.
        OSError: the archive cannot be written.
    """
    site = site_packages(venv)
    # some packages ship files that are no Python of this version: left without
    compileall.compile_dir(site, quiet=2, workers=min(_WORKERS, len(os.sched_getaffinity(0))))
    records.require_whole(records.inspect(site), str(venv))
    paths = sorted(str(path.relative_to(venv)) for path in _walk(venv))
    sizes = [(venv / path).lstat().st_size for path in paths if not (venv / path).is_symlink()]
    # a file fills its last block, a folder or a link takes one
    needed = sum(-(-size // _BLOCK) for size in sizes) + len(paths) - len(sizes) + sum(1 for _ in _folders(venv))
    header = {"kind": KIND, "format": FORMAT, "needed_bytes": needed * _BLOCK}
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
            content = json.dumps(header).encode()
            archive.addfile(_member(HEADER, len(content)), BytesIO(content))
            for path in paths:
                _add(archive, venv, path)
        value = put_in_place(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return {"files": len(paths), "bytes": output.stat().st_size, "sha256": value}


def unpack(archive: Path, expected: str, venv: Path) -> Listing:
    """Make the folder `venv` from an archive and see that every byte of it is what was packed.

    What is in `venv` after an exception is not to be used.

    Args:
        archive: made by `pack`.
        expected: its SHA-256, of `checksum`.
        venv: a folder that is not there yet.

    Raises:
        DraftflowError: the archive is damaged, or does not hold a whole environment.
        OSError: `venv` cannot be written.
    """
    listing: Listing = {}
    folders: set[Path] = set()
    with archive.open("rb") as stream:
        hashing = _Hashing(stream)
        try:
            with tarfile.open(fileobj=hashing, mode="r|", bufsize=_MEBIBYTE) as members:
                _read_header(members, archive)
                while (member := members.next()) is not None:
                    if not _is_safe(member.name) or not (member.isreg() or member.issym()):
                        raise ValueError(f"{member.name!r} is not a file within it")
                    if member.name in listing:
                        raise ValueError(f"{member.name} is there twice")
                    path = venv / member.name
                    if path.parent not in folders:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        folders.add(path.parent)
                    listing[member.name] = _extract(members, member, path)
        except (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
            raise DraftflowError(f"The archive is damaged: {error}.", AGAIN, str(archive)) from None
        while hashing.read(_MEBIBYTE):
            pass
    value = hashing.sha256.hexdigest()
    if value != expected:
        raise DraftflowError(
            f"The archive is damaged: its SHA-256 is {value[:12]}, and {beside(archive).name} says {expected[:12]}.",
            AGAIN,
            str(archive),
        )
    records.require_whole(records.inspect(site_packages(venv)), str(archive))
    return listing


def checksum(archive: Path) -> str:
    """The SHA-256 that an archive was packed with.

    Raises:
        DraftflowError: it was not packed, or its checksum cannot be read.
    """
    try:
        value = beside(archive).read_text(encoding="utf-8", errors="replace").split(" ")[0]
    except FileNotFoundError:
        raise DraftflowError("The environment was not packed for nodes.", AGAIN, str(archive)) from None
    if len(value) != 64 or not archive.is_file():
        raise DraftflowError("The archive or its checksum is not whole.", AGAIN, str(archive))
    return value


def needed_bytes(archive: Path) -> int:
    """Bytes that a copy takes on a disk.

    Raises:
        DraftflowError: the file is no such archive.
    """
    try:
        with tarfile.open(archive, "r:") as members:
            return int(_read_header(members, archive)["needed_bytes"])
    except (tarfile.TarError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DraftflowError(f"The archive is damaged: {error}.", AGAIN, str(archive)) from None


def site_packages(venv: Path) -> Path:
    """The folder of a venv's packages.

    Raises:
        DraftflowError: there is none.
    """
    found = next(venv.glob("lib/python3*/site-packages"), None)
    if found is None:
        raise DraftflowError("The environment has no packages.", "Run `snakemake --forcerun install`.", str(venv))
    return found


class _Hashing(BufferedIOBase):
    """A file that is read once, from its beginning, and hashed on the way."""

    def __init__(self, stream: IO[bytes]):
        self.stream, self.sha256 = stream, hashlib.sha256()

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes."""
        content = self.stream.read(-1 if size is None else size)
        self.sha256.update(content)
        return content


def _walk(venv: Path) -> Iterator[Path]:
    """Files and links of a venv, links to folders not followed."""
    for folder in (venv, *_folders(venv)):
        for entry in os.scandir(folder):
            path = Path(entry.path)
            # half-written bytecode ends with a number
            if not entry.is_dir(follow_symlinks=False) and ".pyc." not in entry.name and path != venv / _LEFT_OUT:
                yield path


def _folders(venv: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(venv):
        yield from (Path(folder) / name for name in names if not (Path(folder) / name).is_symlink())


def _member(name: str, size: int, mode: int = 0o644, seconds: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)  # its owner is the same everywhere
    member.size, member.mode, member.mtime = size, mode, seconds
    return member


def _add(archive: tarfile.TarFile, venv: Path, name: str) -> None:
    path = venv / name
    if path.is_symlink():
        member = _member(name, 0)
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)  # noqa: PTH115 (as it is written)
        archive.addfile(member)
        return
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        member = _member(name, status.st_size, stat.S_IMODE(status.st_mode) & 0o755, int(status.st_mtime))
        archive.addfile(member, stream)


def _read_header(members: tarfile.TarFile, archive: Path) -> dict[str, Any]:
    member = members.next()
    content = None if member is None or member.name != HEADER else members.extractfile(member)
    header = None if content is None else json.loads(content.read())
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise ValueError(f"it does not begin with {HEADER}")
    if header.get("format") != FORMAT:
        raise DraftflowError(
            f"The archive has format {header.get('format')}, and this draftflow reads {FORMAT}.", AGAIN, str(archive)
        )
    return header


def _extract(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> list[int] | str:
    if member.issym():
        path.symlink_to(member.linkname)
        return member.linkname
    content = members.extractfile(member)
    assert content is not None
    seconds = int(member.mtime)
    with path.open("xb") as stream:
        shutil.copyfileobj(content, stream, _MEBIBYTE)
    path.chmod(member.mode & 0o755)
    os.utime(path, (seconds, seconds))
    return [member.size, seconds]


def _is_safe(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return "/".join(parts) == path and not {"..", "/"} & set(parts)


def main() -> None:
    """Pack an environment."""
    parser = stage_parser(__doc__ or "", settings=False)
    parser.add_argument("--venv", type=Path, required=True, help="results/environments/<environment>/venv")
    parser.add_argument("--output", type=Path, required=True, help=f"the archive, {NAME}")
    arguments = parser.parse_args()
    packed = pack(arguments.venv, arguments.output)
    say(f"{arguments.output}: {packed['files']} files, {packed['bytes']:,} bytes, SHA-256 {packed['sha256'][:12]}")


if __name__ == "__main__":
    run_stage(main)
