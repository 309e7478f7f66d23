"""Stage: the warmed cache as one file, to be brought to another machine, and the way back.

    bundle.tar.xz           bundle.json     format, key and what it is made of, devices, manifest
                            inductor/...    the artefacts, in the order of their paths
                            triton/...
    bundle.tar.xz.sha256    of that file, for `sha256sum --check`

The same cache gives the same bytes. benchmarks/bundle.py compares this form with that of torch, and the compressions.

What a bundle holds is code that training will run. Its checksums show that it arrived as it was made; they do not show
who made it.
Standard library only.
"""

import contextlib
import errno
import hashlib
import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any

from draftflow.compile_cache import key, location, manifest
from draftflow.errors import DraftflowError
from draftflow.stage import beside, put_in_place, run_stage, say, sha256, stage_parser, write_json

SUFFIX = ".tar.xz"
HEADER = "bundle.json"
KIND = "draftflow compile cache"
FORMAT = 1
# of xz: much smaller than gzip in the same time, and the levels above it take several times as long
LEVEL = 1

MAGIC = b"\xfd7zXZ\x00"
MEBIBYTE = 2**20
AGAIN = "Copy it again, or make it again with `snakemake bundle_cache` where it comes from."


def pack(record: Path, output: Path) -> dict[str, Any]:
    """Write the cache that a warm-up recorded as one file, whole or not at all, and its SHA-256 beside it.

    Args:
        record: `warm.json`; its `folder` is relative to where it lies.
        output: the bundle. `<output>.sha256` is written too.

    Returns:
        key, files, unpacked_bytes, bytes, sha256: of what was written.

    Raises:
        DraftflowError: there is no such cache, or it is not as its manifest says.
        OSError: the bundle cannot be written.
    """
    warm, folder = key.read_warm(record)
    with location.held(folder, alone=True):
        return _pack(warm, folder, output)


def _pack(warm: dict[str, Any], folder: Path, output: Path) -> dict[str, Any]:
    key.require_folder(folder)
    examined = manifest.clean(folder)
    for path, words in examined.damaged.items():
        raise DraftflowError(f"The compile cache is not packed: {path} is {words}.", key.REMEDY, str(folder))
    files = manifest.read(folder)
    header = {
        "kind": KIND,
        "format": FORMAT,
        **warm,
        "manifest": {"files": files, "digest": manifest.digest(files)},
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with (
            lzma.open(temporary, "wb", preset=LEVEL) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            _add(archive, HEADER, json.dumps(header, sort_keys=True).encode())
            for path in sorted(files):
                content = (folder / path).read_bytes()
                _add(archive, path, manifest.portable(content) if manifest.is_group(path) else content)
        value = put_in_place(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    size = output.stat().st_size
    return {"key": warm["key"], "files": len(files), "unpacked_bytes": examined.bytes, "bytes": size, "sha256": value}


def unpack(bundle: Path, folder: Path, held: Mapping[str, Any] | None) -> dict[str, Any]:
    """Verify a bundle and make the cache folder `folder` from it, whole or not at all, its manifest included.

    The checksum beside the bundle is compared if there is one, and every file with the manifest inside. Files
    go to a temporary folder beside `folder`, which is renamed at last. A `folder` that holds no file is replaced; any
    other is refused and not touched.

    Args:
        bundle: made by `pack`, here or elsewhere.
        folder: named by the cache key. Triton's group files will name it.
        held: `key.contents` of the run that is about to use it; None takes the bundle whatever it was warmed for.

    Returns:
        key, holds, devices: as recorded where it was warmed. files, unpacked_bytes. sha256: of the bundle.

    Raises:
        DraftflowError: it is no bundle, of a newer format, damaged, or warmed for something else, or `folder` holds
            something.
        OSError: `folder` cannot be written.
    """
    folder = folder.resolve()
    value = checked_sha256(bundle)
    inside = list(folder.rglob("*"))
    if any(path.is_symlink() or not path.is_dir() for path in inside):
        raise DraftflowError(
            f"The folder that {bundle.name} would become is not empty.", "Remove it, or use what it holds.", str(folder)
        )
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # of processes that were killed; the folder is held
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with (
            _damage(bundle, "is not a bundle of a compile cache"),
            lzma.open(bundle) as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            header = _read_header(archive, bundle)
            with _damage(bundle, "is damaged"):
                _require_fit(header, held, bundle)
                files = manifest.entries(header["manifest"])
                _extract(archive, files, temporary, folder)
                while stream.read(MEBIBYTE):  # to the end, so that a truncation there is seen
                    pass
        write_json(temporary / manifest.NAME, {"files": files, "digest": manifest.digest(files)})
        for path in sorted(inside, reverse=True):
            path.rmdir()
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    size = sum(size for size, _ in files.values())
    facts = {name: header[name] for name in ("key", "holds", "devices")}
    return {**facts, "files": len(files), "unpacked_bytes": size, "sha256": value}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its owner, its mode and its time are the same everywhere
    member.size = len(content)
    archive.addfile(member, BytesIO(content))


def checked_sha256(bundle: Path) -> str:
    """SHA-256 of what is at least called a bundle, compared with the one beside it."""
    if not bundle.is_file():
        remedy = "Make it with `snakemake bundle_cache` where the cache is warm, and copy it here."
        raise DraftflowError("There is no such bundle.", remedy, str(bundle))
    with bundle.open("rb") as stream:
        if not MAGIC.startswith(stream.read(len(MAGIC))):
            raise DraftflowError("The file is not a bundle of a compile cache.", AGAIN, str(bundle))
    value = sha256(bundle)
    if beside(bundle).exists():
        recorded = beside(bundle).read_text(encoding="utf-8", errors="replace").split(" ")[0]
        if recorded != value:
            raise DraftflowError(
                f"The bundle is damaged: its SHA-256 is {value[:12]}, and {beside(bundle).name} says {recorded[:12]}.",
                AGAIN,
                str(bundle),
            )
    return value


@contextlib.contextmanager
def _damage(bundle: Path, what: str) -> Iterator[None]:
    """Make a refusal of what reading a broken archive raises. The disk's errors pass."""
    try:
        yield
    except EOFError:
        raise DraftflowError("The bundle is truncated.", AGAIN, str(bundle)) from None
    except lzma.LZMAError as error:
        raise DraftflowError(f"The file is damaged: {error}.", AGAIN, str(bundle)) from None
    except (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DraftflowError(f"The file {what}: {error}.", AGAIN, str(bundle)) from None
    except OSError as error:
        # the folder is new: only names in the archive that exclude one another, or that no folder can have, do this
        if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
            raise
        raise DraftflowError(f"The file {what}: {error.strerror}.", AGAIN, str(bundle)) from None


def _read_header(archive: tarfile.TarFile, bundle: Path) -> dict[str, Any]:
    member = archive.next()
    if member is None or member.name != HEADER or not member.isreg() or member.size > 64 * MEBIBYTE:
        raise ValueError(f"it does not begin with {HEADER}")
    header = json.loads(_file(archive, member).read())
    if not isinstance(header, dict) or header.get("kind") != KIND or not isinstance(header.get("format"), int):
        raise ValueError(f"its {HEADER} is of something else")
    if header["format"] != FORMAT:
        raise DraftflowError(
            f"The bundle has format {header['format']}, and this draftflow reads {FORMAT}.",
            "Make it with the draftflow that is to use it.",
            str(bundle),
        )
    return header


def _require_fit(header: dict[str, Any], held: Mapping[str, Any] | None, bundle: Path) -> None:
    for name in ("key", "holds", "devices", "manifest"):
        if name not in header:
            raise ValueError(f"its {HEADER} has no {name}")
    if header["key"] != key.cache_key(header["holds"]):
        raise ValueError(f"its key {header['key']} is not that of what it says it was warmed for")
    if held is None or header["key"] == key.cache_key(held):
        return
    found = key.differences(header["holds"], held) or [f"key {header['key']} -> {key.cache_key(held)}"]
    raise DraftflowError(
        f"The bundle was warmed for something else: {', '.join(found)}.",
        "Make one where these are the same, or set `compile_cache.bundle: null` to compile here.",
        str(bundle),
    )


def _extract(archive: tarfile.TarFile, files: dict[str, tuple[int, str]], temporary: Path, folder: Path) -> None:
    """Write the members to `temporary`, each verified, as they shall lie in `folder`."""
    missing = dict(files)
    while (member := archive.next()) is not None:
        path = member.name
        if not _is_safe(path) or not member.isfile() or member.issparse():
            raise ValueError(f"{path!r} is not a file within it")
        if path not in missing:
            raise ValueError(f"{path} is there twice, or not in its manifest")
        size, value = missing.pop(path)
        if member.size != size:
            raise ValueError(f"{path} has {member.size} bytes, not {size}")
        content = _file(archive, member).read()
        if hashlib.sha256(content).hexdigest() != value:
            raise ValueError(f"{path} is changed")
        if manifest.is_group(path):
            content = manifest.located(content, (folder / path).parent)
        (temporary / path).parent.mkdir(parents=True, exist_ok=True)
        (temporary / path).write_bytes(content)
    if missing:
        raise ValueError(f"{min(missing)} is missing")


def _is_safe(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return "/".join(parts) == path and not {"..", "/", manifest.NAME} & set(parts)


def _file(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = archive.extractfile(member)
    if stream is None:
        raise ValueError(f"{member.name!r} is not a file")
    return stream


def main() -> None:
    """Pack the warmed cache of a run."""
    parser = stage_parser(__doc__ or "", settings=False)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="make a bundle of a warmed cache")
    packing.add_argument("--record", type=Path, required=True, help="warm.json")
    packing.add_argument("--output", type=Path, required=True, help=f"the bundle, named *{SUFFIX}")
    arguments = parser.parse_args()
    packed = pack(arguments.record, arguments.output)
    say(f"compile cache {packed['key']}: {packed['files']} files, {packed['unpacked_bytes']:,} bytes")
    say(f"{arguments.output}: {packed['bytes']:,} bytes, SHA-256 {packed['sha256']}")


if __name__ == "__main__":
    run_stage(main)
