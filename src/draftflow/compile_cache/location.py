"""Where compiled code is kept, and every setting that is part of its key: one place, for warm-up and training alike.

All of it goes through environment variables that are set before the process starts, since a setting made through
torch's config in one thread is not seen by another, and changes the key.
Standard library only.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from draftflow.errors import DraftflowError

SETTINGS = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    # A cache elsewhere would make a miss here look like a hit.
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    # flex_attention's backward needs Triton among the backends, or fails.
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN,TRITON",
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
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "switches the compile cache off",
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": "switches the compile cache off",
}


def prepare(folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Make the cache folder and return the variables that processes which compile must be started with.

    Args:
        folder: of one cache key.
        environment: the variables that are set already.

    Raises:
        DraftflowError: the environment switches the compiler or its cache off, keeps the cache elsewhere, or sets
            what is set here.
        OSError: the folder cannot be made or written to.
    """
    folder = folder.resolve()
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        **SETTINGS,
    }
    for name, effect in FOOT_GUNS.items():
        if environment.get(name):
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
    probe = folder / f".writable-{os.getpid()}"
    probe.touch()
    probe.unlink()
    return variables


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
