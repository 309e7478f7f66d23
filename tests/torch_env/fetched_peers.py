"""The other trainers, fetched once for all tests of the benchmarks; importing this makes `benchmarks/` importable."""

import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
_temporary = tempfile.TemporaryDirectory(prefix="draftflow-peers-")  # until the process ends


@lru_cache(maxsize=1)
def folder() -> Path:
    """Where they are: DRAFTFLOW_PEERS, or else a new folder that the driver's uv fills. Skips where it cannot."""
    if given := os.environ.get("DRAFTFLOW_PEERS"):
        return Path(given)
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip(
            "no uv to fetch SpecForge and speculators; DRAFTFLOW_PEERS may name a folder of benchmarks/peers.py"
        )
    made = Path(_temporary.name)
    command = [uv, "run", "--frozen", "python", ROOT / "benchmarks/peers.py", made]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [*command, "--python", python], cwd=ROOT, env=plain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        pytest.skip(f"SpecForge and speculators cannot be fetched: {done.stdout[-300:]}")
    return made


@lru_cache(maxsize=1)
def both() -> tuple[SimpleNamespace, SimpleNamespace]:
    """SpecForge and speculators, imported."""
    import peers

    return peers.load(folder())
