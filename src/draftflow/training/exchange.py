"""Notes that the processes of a run leave one another in a folder of a shared file system. Standard library only.

A note is a file that is written over in place and opened anew to be read: of such a file a network file system shows
what is new, whereas names that appear or are replaced can stay unseen for a minute. Nobody compares clocks: whoever
lives counts in its note, and others see by their own clock for how long that number has stood still.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Notes:
    """The notes in `folder`."""

    folder: Path
    _last: dict[str, tuple[Any, float]] = field(default_factory=dict)

    def write(self, name: str, facts: dict[str, Any]) -> None:
        """Write the note `name`, of which there is one writer.

        Raises:
            OSError: the folder is gone, or cannot be written to.
        """
        data = json.dumps(facts).encode()
        handle = self._open(name)
        try:
            os.pwrite(handle, data.ljust(os.fstat(handle).st_size), 0)
        finally:
            os.close(handle)

    def read(self, name: str) -> dict[str, Any]:
        """The note `name`; empty if nobody wrote it yet, or is just writing it.

        Raises:
            OSError: the folder is gone.
        """
        handle = self._open(name)
        try:
            data = os.pread(handle, os.fstat(handle).st_size, 0)
        finally:
            os.close(handle)
        try:
            return json.loads(data)
        except ValueError:
            return {}

    def silence(self, name: str, beat: Any) -> float:
        """Seconds since `beat`, as read from the note `name`, was another one; 0 at the first call."""
        now = time.monotonic()
        if name not in self._last or self._last[name][0] != beat:
            self._last[name] = (beat, now)
        return now - self._last[name][1]

    def _open(self, name: str) -> int:
        # to be created if need be: that a file was not there is something that NFS remembers for a while
        return os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o600)


def take_number(folder: Path, count: int, first: int = 0) -> int | None:
    """A number below `count` that no other process takes; `first` if it is one and free. None if all are taken."""
    for number in [*range(first, count)[:1], *range(count)]:
        try:
            os.close(os.open(folder / f"node-{number}.taken", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        return number
    return None
