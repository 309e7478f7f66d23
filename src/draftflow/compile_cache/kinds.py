"""Devices of several kinds in one run: which of the warmed caches is that of the device of this process.

Kinds are what the compile part of the fingerprint tells apart, as models of GPUs and drivers, and on CPUs instructions.
Each has a fingerprint, a warm-up and a cache folder of its own. No torch until a process is compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftflow.compile_cache import key
from draftflow.compile_cache.location import as_fingerprinted
from draftflow.errors import DraftflowError
from draftflow.training.plan import Plan

KEY = "config key cluster.kinds"


@dataclass(frozen=True)
class Kind:
    """A kind of device that was warmed.

    Attributes:
        name: in the configuration; that of the devices' folder where all are of one kind.
        fingerprint: its `fingerprint.json`; `install.json` lies beside it.
        warm: its `warm.json`.
        bundle: of its cache, where nodes read it from their own disks.
        holds: `key.contents` of the run on such a device.
    """

    name: str
    fingerprint: Path
    warm: Path
    bundle: Path | None
    holds: dict[str, Any]

    def written(self) -> dict[str, Any]:
        """As JSON, for `read_kind`."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}


def read_kind(written: Mapping[str, Any]) -> Kind:
    """What `Kind.written` wrote."""
    paths = {name: Path(written[name]) for name in ("fingerprint", "warm", "bundle") if written[name] is not None}
    return Kind(**{**written, **paths})


def kinds_of_run(
    names: Sequence[str], fingerprints: Sequence[Path], warm: Sequence[Path], bundles: Sequence[Path], plan: Plan
) -> list[Kind]:
    """The kinds of a run; two names of one kind are one.

    Args:
        names: of the kinds.
        fingerprints, warm: of each.
        bundles: of each, or none.
        plan: of the run.

    Raises:
        DraftflowError: one of several was not warmed.
    """
    kinds: dict[str, Kind] = {}
    packed: list[Path | None] = [bundle.resolve() for bundle in bundles]
    packed = packed or [None] * len(names)
    for name, fingerprint, record, bundle in zip(names, fingerprints, warm, packed, strict=True):
        holds = key.contents(json.loads(fingerprint.read_text(encoding="utf-8"))["compile"], plan)
        if len(names) > 1:  # this host may be of another kind
            holds["CPU"] = key.read_warm(record)[0]["holds"]["CPU"]
        kind = Kind(name, fingerprint.resolve(), record.resolve(), bundle, holds)
        kinds.setdefault(key.cache_key(holds), kind)
    return list(kinds.values())


def kind_of_this_process(kinds: Sequence[Kind], nodes: int) -> Kind:
    """The kind of the device that this process sees.

    Args:
        kinds: that were warmed.
        nodes: of the run.

    Raises:
        DraftflowError: it is none of them.
    """
    from draftflow.environment.fingerprint import require_same, take

    if nodes == 1 and len(kinds) == 1:
        with as_fingerprinted(kinds[0].holds["fingerprint"]["fields"]):
            require_same(kinds[0].fingerprint)
        return kinds[0]
    install_record = json.loads(kinds[0].fingerprint.with_name("install.json").read_text(encoding="utf-8"))
    told = []
    for kind in kinds:
        with as_fingerprinted(kind.holds["fingerprint"]["fields"]):
            current = take(install_record)["compile"]
        found = unlike(kind, current)
        if not found:
            return kind
        told.append(f"{kind.name} (key {key.cache_key(kind.holds)}) differs in {', '.join(found)}")
    raise DraftflowError(
        f"The compile cache was not warmed for this kind of device. Of what was warmed, {'; '.join(told)}.",
        "Name each kind of node there and run the same command again, which warms it; where a node was changed since, "
        "run `snakemake --forcerun fingerprint`.",
        KEY,
    )


def unlike(kind: Kind, compile_part: Mapping[str, Any]) -> list[str]:
    """What differs between a kind and a device here, in words; nothing if it is of that kind.

    Args:
        kind: that was warmed.
        compile_part: of the fingerprint of a process that sees the device.
    """
    from draftflow.environment.fingerprint import differences

    found = differences({"compile": kind.holds["fingerprint"]}, {"compile": compile_part}, "compile")
    if kind.holds["plan"]["device_kind"] == "cpu":
        found += key.cpu_differences(kind.holds["CPU"], key.cpu_instructions())
    return found
