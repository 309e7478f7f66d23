"""Hits and misses of the caches of compiled code, one after the other, of what a process did.

FX graph and AOT autograd count by themselves. Kernels are built in other processes, where nothing counts them; they are
counted by the files that came: a kernel of Triton is a folder with its binary, one of C++ a library, a tuned choice a
`.best_config`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
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
            elif name.endswith(".so"):
                cpp.add(path)
            elif name.endswith(".best_config"):
                autotune.add(path)
    return Artefacts(frozenset(triton), frozenset(cpp), frozenset(autotune))


def hits_and_misses(
    folder: Path, before: Artefacts, counts: Mapping[str, int], requested: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """By cache: how often what was asked for was there.

    Args:
        folder: the cache folder.
        before: what it held when the process began.
        counts: of `Guard.counts`.
        requested: kernels that the loaded graphs call, by `triton` and `cpp`, and `tuned`: those of them that came
            with a tuned choice.
    """
    now = artefacts(folder)
    built = {name: len(getattr(now, name) - getattr(before, name)) for name in ("triton", "cpp", "autotune")}

    def kernels(name: str) -> dict[str, int]:
        return {"hits": max(0, requested[name] - built[name]), "misses": built[name]}

    return {
        "fx_graph": {"hits": counts["fx_graph_hits"], "misses": counts["fx_graph_misses"]},
        "aot_autograd": {"hits": counts["autograd_hits"], "misses": counts["autograd_misses"]},
        "triton": kernels("triton"),
        "cpp": kernels("cpp"),
        "autotune": {"hits": max(0, requested["tuned"] - built["autotune"]), "misses": built["autotune"]},
    }


def loaded_libraries(folder: Path) -> int:
    """Libraries from below the folder that this process has loaded."""
    root = str(folder.resolve()) + os.sep
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({path for line in lines if (path := line.split(maxsplit=5)[-1]).startswith(root) and ".so" in path})


def requested_kernels(folder: Path) -> dict[str, Any]:
    """Kernels that the graphs of this process call."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return {
        # counted at every request, found or not, whatever its name says
        "triton": inductor["async_compile_cache_miss"],
        "cpp": loaded_libraries(folder),
        "tuned": inductor["triton_bundler_load_static_autotuner"],
    }
