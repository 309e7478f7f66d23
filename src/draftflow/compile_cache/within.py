"""Run a module of this package on the warm cache: `python -m draftflow.compile_cache.within WARM MODULE ARGUMENTS`.

The compiler's settings are variables that must be there before torch is imported; which folder they name is known from
the record of the warm-up alone. Standard library only.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from draftflow.compile_cache import location
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage


def enter(warm_record: Path) -> None:
    """Set this process's variables to the warmed cache.

    Raises:
        DraftflowError: it is gone, or the environment contradicts it.
    """
    record = json.loads(warm_record.read_text(encoding="utf-8"))
    folder = warm_record.parent / record["folder"]
    if not folder.is_dir():
        raise DraftflowError(
            f"The warmed compile cache {folder} is gone.", "Run `snakemake --forcerun warm_cache`.", str(warm_record)
        )
    os.environ.update(location.prepare(folder))


def main() -> None:
    """Enter, and become the module."""
    warm_record, module, *arguments = sys.argv[1:]
    enter(Path(warm_record))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_stage(main)
