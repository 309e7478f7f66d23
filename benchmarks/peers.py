"""The other trainers of DFlash drafters, from PyPI: fetched by hash, and imported without what they do not use.

    uv run python benchmarks/peers.py FOLDER --python 3.12

Their wheels go into FOLDER without their dependencies, which are an inference engine and gigabytes more. What their
DFlash model and loss import beside torch and transformers is pydantic; it comes along for interpreters that have none.
FOLDER can be carried to a machine without a network. Nothing here needs torch before `load`.
"""

import argparse
import importlib
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from draftflow.environment.builds import PYTHONS
from draftflow.environment.install import fill
from draftflow.environment.lock import requirements
from draftflow.environment.uv import sources
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage, say

ROOT = Path(__file__).parents[1]
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

WHEELS = (
    "specforge==0.2.0 --hash=sha256:fbc79517adf483c6a8beea52561b1a8c8c8a99a54c820b47d2033a73966b55b0",
    "speculators==0.9.0 --hash=sha256:f0de7571274ce996d769ce81240379728dcb38701f77d2d34cfd0d670d1b4481",
)
# What they need and a training environment has anyway, in the versions of this lock; the last is built for one Python.
SUPPORT_LOCK = ROOT / "envs" / "locks" / "train-2.11.0-cu130-pypi.txt"
SUPPORT = ("annotated-types", "pydantic", "typing-extensions", "typing-inspection", "pydantic-core")

# Modules of theirs that stand empty in our process, with the names that others import from them, and why.
STAND_INS: dict[str, dict[str, Any]] = {
    # speculators imports all its models at once, and two take the name of a type for their annotations from its data
    # loader; that imports openai, datasets and its connectors to inference engines.
    "speculators.train.data": {"BatchType": dict},
}

# Where each name that we use is defined.
NAMES = {
    "specforge.modeling.auto": ("AutoDraftModel",),
    "specforge.algorithms.common.dflash_family_model": ("OnlineDFlashModel",),
    "specforge.optimizer": ("BF16Optimizer",),
    "speculators.models.dflash.config": ("DFlashSpeculatorConfig",),
    "speculators.models.dflash.core": ("DFlashDraftModel", "select_anchors"),
    "speculators.losses": ("resolve_loss_config",),
}


def fetch(folder: Path, pythons: Sequence[str] = (THIS_PYTHON,)) -> Path:
    """Bring the wheels into `folder`; returns it.

    Args:
        folder: made if it does not exist.
        pythons: versions of Python that shall import them, as "3.12".

    Raises:
        DraftflowError: the index is not reachable, or a file has another hash.
    """
    support = [line for line in requirements(SUPPORT_LOCK) if line.partition("==")[0] in SUPPORT]
    built = [line for line in support if line.startswith(f"{SUPPORT[-1]}==")]
    pure = [line for line in support if line not in built]
    _install(folder / "site", pythons[0], [*WHEELS, *pure])
    for python in pythons:
        _install(folder / f"python{python}", python, built)
    return folder


def _install(into: Path, python: str, lines: Sequence[str]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        fill(["--target", str(into), "--python-version", python], Path(file.name), None, sources())


def load(folder: Path) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Import what `fetch` brought: SpecForge's and speculators' names of `NAMES`.

    What the interpreter has itself comes before what the folder has.

    Raises:
        DraftflowError: nothing was fetched into `folder`, or not for this Python.
    """
    places = [folder / "site", folder / f"python{THIS_PYTHON}"]
    if missing := [place for place in places if not place.is_dir()]:
        raise DraftflowError(
            f"The peers are not there: {missing[0].name} is missing.",
            f"Run `uv run python benchmarks/peers.py {folder} --python {THIS_PYTHON}`.",
            str(folder),
        )
    sys.path += [str(place) for place in places if str(place) not in sys.path]
    for name, attributes in STAND_INS.items():
        stand_in = ModuleType(name, "Stands empty for a benchmark that does not use it.")
        vars(stand_in).update(attributes)
        sys.modules.setdefault(name, stand_in)
    specforge, speculators = SimpleNamespace(), SimpleNamespace()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flash_attn is not found")  # for another of SpecForge's models
        for module, names in NAMES.items():
            into = specforge if module.startswith("specforge.") else speculators
            for name in names:
                setattr(into, name, getattr(importlib.import_module(module), name))
    speculators.core = sys.modules["speculators.models.dflash.core"]
    return specforge, speculators


def main() -> None:
    """Fetch the peers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", choices=PYTHONS, help=f"for which Python; default {THIS_PYTHON}")
    arguments = parser.parse_args()
    fetch(arguments.folder, arguments.python or (THIS_PYTHON,))
    size = sum(file.stat().st_size for file in arguments.folder.rglob("*") if file.is_file())
    say(f"{arguments.folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_stage(main)
