"""Run a module of this package on the warm cache: `python -m draftflow.compile_cache.within WARM MODULE ARGUMENTS`.

The compiler's settings are variables that must be there before torch is imported; which folder they name is known from
the record of the warm-up alone. Standard library only.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftflow.compile_cache import key, location, manifest
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage


@contextmanager
def entered(warm_record: Path) -> Iterator[None]:
    """Set this process's variables to the warmed cache, verified, which it holds meanwhile.

    Raises:
        DraftflowError: it is gone or damaged, or the environment contradicts it.
    """
    _, folder = key.read_warm(warm_record)
    with verified(folder) as (variables, _, _):
        os.environ.update(variables)
        yield


@contextmanager
def verified(folder: Path) -> Iterator[tuple[dict[str, str], location.Hold, manifest.Examination]]:
    """A warmed cache folder, verified and held together with other readers: its variables, the hold, what was found.

    Raises:
        DraftflowError: it is gone or damaged, or the environment contradicts it.
    """
    with location.held(folder, alone=True) as hold:
        key.require_folder(folder)
        variables = location.prepare(folder)
        found = manifest.clean(folder)
        for path, words in found.damaged.items():
            raise DraftflowError(f"The compile cache is damaged: {path} is {words}.", key.REMEDY, str(folder))
        hold.share()
        yield variables, hold, found


def main() -> None:
    """Enter, and become the module."""
    warm_record, module, *arguments = sys.argv[1:]
    with entered(Path(warm_record)):
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_stage(main)
