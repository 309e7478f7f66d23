"""The manifest of a warmed cache folder: every artefact with its size and SHA-256, and what no longer agrees with it.

Inductor and Triton load what lies in their folders without asking whether it is what they wrote: a shared object that
lost its end kills the process, and an FX graph is unpickled from any file in the folder of its key. So a folder is
compared with the manifest that its warm-up left before anything is loaded from it.

One kind of artefact holds the path of the folder: Triton's `triton/<hash>/__grp__<kernel>.json` lists the files of a
kernel by absolute path. After a move Triton compiles the kernel again, or, where the old folder still lies, loads what
is in it. The manifest knows these files by their content without the path, and `relocate` makes them name the place
where they lie.
Standard library only.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftflow.stage import sha256, write_json

NAME = "manifest.json"


@dataclass(frozen=True)
class Examination:
    """What a cache folder holds beside what its manifest says.

    Attributes:
        damaged: relative path -> what is wrong with it, for what the manifest names, for the manifest itself
            (`manifest.json`) and for folders that cannot be listed. Words are `missing`, `changed`, `not a file`,
            `truncated, 12 of 400 bytes`, `unreadable: Permission denied`, `names another folder`.
        foreign: relative paths that the manifest does not name, sorted; symbolic links among them.
        files: artefacts that are as the manifest says.
        bytes: of those.
    """

    damaged: dict[str, str]
    foreign: list[str]
    files: int
    bytes: int

    @property
    def sound(self) -> bool:
        """Whether the folder holds what the manifest says, and nothing else."""
        return not self.damaged and not self.foreign


def write(folder: Path) -> dict[str, Any]:
    """Hash every artefact below `folder` and write `manifest.json` there, whole or not at all.

    No process may compile into the folder meanwhile. Symbolic links are no artefacts: no compiler writes them.

    Returns:
        files: relative path -> [size in bytes, SHA-256 in hexadecimal], of the group files of Triton without their
            path (see `portable`). digest: of these entries.

    Raises:
        OSError: an artefact cannot be read, or the manifest not be written.
    """
    found = _walk(folder)
    for error in found.errors.values():
        raise error
    paths = sorted(path for path, status in found.entries.items() if stat.S_ISREG(status.st_mode))
    files = {path: list(_measure(folder, path, found.entries[path].st_size)) for path in paths}
    manifest = {"files": files, "digest": digest(files)}
    write_json(folder / NAME, manifest)
    return manifest


def clean(folder: Path) -> Examination:
    """Put the folder right as far as that needs no compiling, and examine it; who calls this holds the folder alone.

    Group files of Triton are relocated; locks, half-written and foreign files are removed: Inductor would unpickle
    whatever lies beside an FX graph.

    Raises:
        OSError: such a file cannot be removed or written.
    """
    for parent, folders, names in os.walk(folder):
        for name in [*filter(_passing, folders)]:
            shutil.rmtree(Path(parent) / name)
            folders.remove(name)
        for name in filter(_passing, names):
            (Path(parent) / name).unlink()
    relocate(folder)
    found = examine(folder)
    if NAME not in found.damaged:
        for path in found.foreign:
            (folder / path).unlink()
    return found


def examine(folder: Path) -> Examination:
    """Compare a cache folder with its manifest, every byte of it. Nothing that lies in the folder makes this raise.

    A folder that was moved since is damaged (`names another folder`) until `relocate` was called.
    """
    try:
        files = read(folder)
    except ValueError as error:
        return Examination({NAME: str(error)}, [], 0, 0)
    found = _walk(folder)
    damaged = {path: _words(error) for path, error in found.errors.items()}
    for path, (size, value) in files.items():
        status = found.entries.get(path)
        if status is None:
            damaged[path] = next((damaged[above] for above in _above(path) if above in found.errors), "missing")
        elif not stat.S_ISREG(status.st_mode):
            damaged[path] = "not a file"
        elif not is_group(path) and status.st_size < size:
            damaged[path] = f"truncated, {status.st_size} of {size} bytes"
        elif words := _compare(folder, path, status.st_size, (size, value)):
            damaged[path] = words
    sound = [path for path in files if path not in damaged]
    foreign = sorted(path for path in found.entries if path not in files)
    return Examination(dict(sorted(damaged.items())), foreign, len(sound), sum(files[path][0] for path in sound))


def read(folder: Path) -> dict[str, tuple[int, str]]:
    """The entries of the manifest in `folder`: relative path -> size in bytes, SHA-256.

    Raises:
        ValueError: what is wrong with the manifest, in words: `missing`, `truncated, or not JSON`, `not a manifest`,
            `changed`, `not a file`, `unreadable: Permission denied`.
    """
    path = folder / NAME
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError("not a file")
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError("missing") from None
    except OSError as error:
        raise ValueError(_words(error)) from None
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("truncated, or not JSON") from None
    return entries(manifest)


def entries(manifest: Any) -> dict[str, tuple[int, str]]:
    """The entries of a manifest as it was parsed.

    Raises:
        ValueError: `not a manifest`, or `changed`: its digest is not that of its entries.
    """
    try:
        files = {path: (size, value) for path, (size, value) in manifest["files"].items()}
        recorded = manifest["digest"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError("not a manifest") from None
    if not all(isinstance(size, int) and isinstance(value, str) for size, value in files.values()):
        raise ValueError("not a manifest")
    if recorded != digest(files):
        raise ValueError("changed")
    return files


def digest(files: dict[str, Any]) -> str:
    """SHA-256 over the entries of a manifest, in the order of their paths."""
    ordered = [[path, size, value] for path, (size, value) in sorted(files.items())]
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


def relocate(folder: Path) -> int:
    """Make Triton's group files name `folder`, resolved as the compilers are given it, as the place of their files.

    To be called before processes start on a folder that may have been moved, and before `examine`. Several may do so
    at once. What is damaged is left for `examine` to find.

    Returns:
        How many files named another place and were written anew.

    Raises:
        OSError: such a file cannot be written.
    """
    try:
        files = read(folder)
    except ValueError:
        return 0
    place, count = folder.resolve(), 0
    for path in filter(is_group, files):
        try:
            content = (place / path).read_bytes()
        except OSError:
            continue
        bare = portable(content)
        moved = located(bare, (place / path).parent)
        if moved != content and (len(bare), hashlib.sha256(bare).hexdigest()) == files[path]:
            temporary = (place / path).with_name(f".{os.getpid()}.relocated.tmp")
            temporary.write_bytes(moved)
            temporary.replace(place / path)
            count += 1
    return count


def is_group(path: str) -> bool:
    """Whether a relative path is that of a group file of Triton."""
    parts = path.split("/")
    return len(parts) == 3 and parts[0] == "triton" and parts[2].startswith("__grp__") and path.endswith(".json")


def portable(content: bytes) -> bytes:
    """A group file with the names of its files in place of their paths; anything else as it is."""
    return _with_paths(content, "")


def located(content: bytes, folder: Path) -> bytes:
    """A group file, portable or not, with paths in `folder`; anything else as it is."""
    return _with_paths(content, f"{folder}/")


def _with_paths(content: bytes, prefix: str) -> bytes:
    try:
        group = json.loads(content)
        names = list(group["child_paths"])
        plain = set(group) == {"child_paths"} and all(
            path.rpartition("/")[2] == name for name, path in group["child_paths"].items()
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return content
    # as Triton writes it
    return json.dumps({"child_paths": {name: prefix + name for name in names}}).encode() if plain else content


@dataclass
class _Found:
    entries: dict[str, os.stat_result]
    errors: dict[str, OSError]


def _walk(folder: Path) -> _Found:
    """Everything below `folder` that is not a folder, not followed, without what only passes through."""
    found = _Found({}, {})
    prefixes = [""]
    while prefixes:
        prefix = prefixes.pop()
        try:
            listing = list(os.scandir(folder / prefix))
        except OSError as error:
            found.errors[prefix.rstrip("/") or "."] = error
            continue
        for entry in listing:
            path = prefix + entry.name
            if path == NAME or _passing(entry.name):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # gone since, such as a lock
            if stat.S_ISDIR(status.st_mode):
                prefixes.append(f"{path}/")
            else:
                found.entries[path] = status
    return found


def _passing(name: str) -> bool:
    """Whether a file or folder is a lock or half written: what a compiler leaves when it is killed."""
    return (
        name.endswith((".lock", ".tmp", "_CxxBuild"))  # of both; Inductor's .<pid>.<thread>.tmp; its C++ builder
        or name == "locks"  # a folder of Inductor
        or name.startswith(("tmp.", ".writable-", f".{NAME}."))  # Triton's and its bundler's; location.py; write_json
    )


def _measure(folder: Path, path: str, size: int) -> tuple[int, str]:
    """Size and SHA-256 of an artefact as they stand in the manifest."""
    if not is_group(path):
        return size, sha256(folder / path)
    content = portable((folder / path).read_bytes())
    return len(content), hashlib.sha256(content).hexdigest()


def _compare(folder: Path, path: str, size: int, recorded: tuple[int, str]) -> str | None:
    try:
        if _measure(folder, path, size) != recorded:
            return "changed"
        if is_group(path):
            content = (folder / path).read_bytes()
            if content != located(content, (folder.resolve() / path).parent):
                return "names another folder"
    except OSError as error:
        return _words(error)
    return None


def _words(error: OSError) -> str:
    return f"unreadable: {error.strerror}"


def _above(path: str) -> Iterator[str]:
    """The folders that hold a relative path, the nearest first, `.` at last."""
    return (str(parent) for parent in Path(path).parents)
