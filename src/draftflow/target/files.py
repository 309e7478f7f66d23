"""Files and folders that are whole or not there."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the block ends well, and vanishes when it does not."""
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        temporary.chmod(0o755)
        yield temporary
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all, readable by whoever may read the folder.

    The bytes are the same each time only with a single key of metadata: safetensors writes several in any order.

    Raises:
        OSError: as the system gave it (no space, quota), where safetensors only has a text.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        save_file(tensors, temporary, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    temporary.chmod(0o644)
    temporary.replace(path)
