"""The warmed cache on the local disk of a node: unpacked once from the bundle, and read by that node's processes alone.

    <environment.node_local>/compile-cache/<key>-<digest of the bundle>/

So the shared cache is read by one process a node and written by none of them. No torch in this process.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from draftflow.compile_cache import bundle, key, location, manifest
from draftflow.compile_cache.kinds import Kind
from draftflow.compile_cache.warm import CacheInUse, together
from draftflow.environment.node_local import local_folder, room_kept
from draftflow.stage import Record, say


@contextmanager
def local_cache(packed: Path, setting: str, held: Mapping[str, Any], record: Record) -> Iterator[CacheInUse]:
    """The cache of a bundle on this node, verified and in hand; as `warm.in_use`, for the processes of this node.

    One process makes it, others wait for that; all of them then read it at the same time. What is damaged is unpacked
    anew, once nobody reads it.

    Args:
        packed: the bundle.
        setting: as of `local_folder`.
        held: `key.contents` of the run.
        record: told under `cache`: the folder, files that were verified, and what was wrong with which.

    Raises:
        DraftflowError: the folder cannot be written to, the disk is full, the bundle is damaged or was warmed for
            something else.
    """
    folder = local_folder(setting) / "compile-cache"
    cache = folder / f"{key.cache_key(held)}-{bundle.checked_sha256(packed)[:12]}"
    with ExitStack() as reading:
        with location.held(cache.with_name(f"{cache.name}.making"), alone=True), record.part("verify"):
            told = _make_whole(cache, packed, held)
            hold = reading.enter_context(location.held(cache, alone=False))
        environment = location.prepare(cache)
        record["cache"] = {"folder": str(cache), **told}
        yield CacheInUse(environment, hold)


@contextmanager
def local_caches(kinds: Sequence[Kind], setting: str, record: Record) -> Iterator[CacheInUse]:
    """The caches of all kinds of devices of a run on this node, as `local_cache`: which it has, its processes find out.

    Args:
        kinds: each with its bundle.
        setting: as of `local_folder`.
        record: told under `cache`, of several by their names.

    Raises:
        DraftflowError: as `local_cache`.
    """
    with ExitStack() as stack:
        caches, told = {}, {}
        for kind in kinds:
            assert kind.bundle is not None
            caches[kind.name] = stack.enter_context(local_cache(kind.bundle, setting, kind.holds, record))
            told[kind.name] = record["cache"]
        if len(kinds) > 1:
            record["cache"] = told
        yield together(caches)


def _make_whole(cache: Path, packed: Path, held: Mapping[str, Any]) -> dict[str, Any]:
    """Have the folder `cache` hold what the bundle does, and nothing else."""
    found = manifest.examine(cache)
    if found.sound:
        return {"files": found.files, "damaged": {}, "foreign": []}
    there = cache.exists()
    with location.held(cache, alone=True):
        if there:
            found = manifest.clean(cache)
            for path in found.foreign:
                say(f"warning: removed {path} from the compile cache, which was not in its bundle")
            if not found.damaged:
                return {"files": found.files, "damaged": {}, "foreign": found.foreign}
            path, words = next(iter(found.damaged.items()))
            say(f"warning: the compile cache {cache} is damaged ({path}: {words}); unpacking it anew")
            shutil.rmtree(cache)
        with room_kept(cache.parent, location.LEAST_FREE_BYTES, "The compile cache"):
            unpacked = bundle.unpack(packed, cache, held)
    say(f"compile cache {cache} from the bundle: {unpacked['files']} files, verified")
    return {"files": unpacked["files"], "damaged": found.damaged if there else {}, "foreign": found.foreign}
