"""Hits and misses of the caches of compiled code, one after the other, of what a process did.

FX graph and AOT autograd count by themselves. Kernels are built in other processes, where nothing counts them; they are
counted by the files that came: a kernel of Triton is a folder with its binary, one of C++ a library, a tuned choice a
`.best_config`.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The binary that Triton keeps of a kernel: NVIDIA's, AMD's
_BINARIES = (".cubin", ".hsaco")


@dataclass(frozen=True)
class Artefacts:
    """What a cache folder holds, by relative path: Triton kernels, C++ libraries, tuned choices."""

    triton: frozenset[str]
    cpp: frozenset[str]
    autotune: frozenset[str]


def artefacts(folder: Path) -> Artefacts:
    """What lies below the cache folder now."""
    triton, cpp, autotune = set(), set(), set()
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith("tmp.")]  # what Triton has not finished
        for name in files:
            path = os.path.relpath(os.path.join(parent, name), folder)  # noqa: PTH118 (quick, of thousands)
            if name.endswith(_BINARIES):
                triton.add(path)
            elif name.endswith(".so") and not path.startswith("triton"):  # Triton's launchers are C++ too
                cpp.add(path)
            elif name.endswith(".best_config"):
                autotune.add(path)
    return Artefacts(frozenset(triton), frozenset(cpp), frozenset(autotune))


@dataclass
class Requests:
    """What the graphs of this process asked for.

    Attributes:
        kernels: Triton kernels that they call, by source.
        choices: tuned choices that were found, by file.
    """

    kernels: set[str] = field(default_factory=set)
    choices: set[str] = field(default_factory=set)


@contextmanager
def requests() -> Iterator[Requests]:
    """Note, while this holds, what graphs ask the caches of kernels for."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    found = Requests()
    triton, read_best = AsyncCompile.triton, AutotuneCache.read_best

    def noted_triton(self: Any, kernel_name: str, source_code: str, *args: Any, **kwargs: Any) -> Any:
        found.kernels.add(source_code)
        return triton(self, kernel_name, source_code, *args, **kwargs)

    def noted_read_best(self: Any, *args: Any, **kwargs: Any) -> Any:
        best = read_best(self, *args, **kwargs)
        if best is not None and self.local_cache is not None:
            found.choices.add(str(self.local_cache[1]))
        return best

    AsyncCompile.triton, AutotuneCache.read_best = noted_triton, noted_read_best  # type: ignore[method-assign]
    try:
        yield found
    finally:
        AsyncCompile.triton, AutotuneCache.read_best = triton, read_best  # type: ignore[method-assign]


def hits_and_misses(
    folder: Path, before: Artefacts, counts: Mapping[str, int], asked: Requests, libraries: int
) -> dict[str, dict[str, int]]:
    """By cache: how often what was asked for was there.

    A miss of a Triton kernel is a binary that was built, those that only a choice was made among included; a hit is a
    kernel of which no binary was built.

    Args:
        folder: the cache folder.
        before: what it held when the process began.
        counts: of `Guard.counts`.
        asked: what the graphs asked for.
        libraries: C++ libraries that the process has loaded.
    """
    now = artefacts(folder)
    built = {name: len(getattr(now, name) - getattr(before, name)) for name in ("triton", "cpp", "autotune")}
    # our own kernels, named draftflow_, are asked for by no graph
    names = {name for path in now.triton - before.triton if not (name := Path(path).name).startswith("draftflow_")}
    hits = {"triton": max(0, len(asked.kernels) - len(names)), "cpp": max(0, libraries - built["cpp"])}

    def kernels(name: str) -> dict[str, int]:
        return {"hits": hits[name], "misses": built[name]}

    return {
        "fx_graph": {"hits": counts["fx_graph_hits"], "misses": counts["fx_graph_misses"]},
        "aot_autograd": {"hits": counts["autograd_hits"], "misses": counts["autograd_misses"]},
        "triton": kernels("triton"),
        "cpp": kernels("cpp"),
        "autotune": {"hits": len(asked.choices), "misses": built["autotune"]},
    }


def loaded_libraries(folder: Path) -> int:
    """Libraries from below the folder that this process has loaded."""
    root = str(folder.resolve() / "inductor") + os.sep
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({path for line in lines if (path := line.split(maxsplit=5)[-1]).startswith(root) and ".so" in path})
