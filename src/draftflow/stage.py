"""What every stage entry point shares: arguments, the record of what was done, errors without a traceback."""

import argparse
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from draftflow.errors import DraftflowError


class Record:
    """The JSON record of one stage: what it did and how long each part took.

    `record["key"] = value` adds a fact; `with record.part("name"):` adds the seconds of a part.
    """

    def __init__(self, stage: str, **facts: Any):
        self.facts: dict[str, Any] = {"stage": stage, **facts}
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def __setitem__(self, key: str, value: Any) -> None:
        self.facts[key] = value

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the wall-clock seconds of the enclosed block to part `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def write(self, path: str | Path) -> None:
        """Write facts and seconds (rounded to a millisecond) to `path`, whole or not at all."""
        seconds = {name: round(value, 3) for name, value in self.seconds.items()}
        seconds["total"] = round(time.perf_counter() - self._start, 3)
        write_json(path, {**self.facts, "seconds": seconds})


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON to `path`, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` through a temporary name, so that a killed process leaves no half file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def beside(file: Path) -> Path:
    """Where the SHA-256 of a file stands, for `sha256sum --check`."""
    return file.with_name(file.name + ".sha256")


def put_in_place(temporary: Path, file: Path) -> str:
    """Give what was written to `temporary` its name, with its SHA-256 beside it, and return that.

    Killed in between, the checksum is missing; it is never that of another file.
    """
    value = sha256(temporary)
    beside(file).unlink(missing_ok=True)
    temporary.replace(file)
    write_text(beside(file), f"{value}  {file.name}\n")
    return value


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies; for `preexec_fn`."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def say(message: str) -> None:
    """Print one line of progress, at once. That nobody reads it any more is no reason to stop."""
    with contextlib.suppress(BrokenPipeError):
        print(f"draftflow: {message}", flush=True)


def stage_parser(description: str, settings: bool = True) -> argparse.ArgumentParser:
    """An argument parser of a stage; `--settings` takes the stage's settings as a JSON object."""
    parser = argparse.ArgumentParser(description=description)
    if settings:
        parser.add_argument("--settings", type=json.loads, required=True, help="the stage's settings as a JSON object")
    return parser


def as_refusal(error: BaseException) -> DraftflowError | None:
    """The refusal that an exception amounts to: one that is one, or the disk's; None for a fault of ours."""
    if isinstance(error, DraftflowError):
        return error
    number, place = None, None
    if isinstance(error, OSError):
        number, place = error.errno, error.filename
    elif type(error).__name__ == "SafetensorError" and (match := re.search(r"os error (\d+)", str(error))):
        number = int(match[1])  # safetensors has the system's error as a text only
    if number not in (errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EDQUOT):
        # the compiler wraps what befell it
        return None if error.__cause__ is None else as_refusal(error.__cause__)
    return DraftflowError(f"{os.strerror(number)}.", "Free or allow it, then run the same command again.", place)


def run_stage(main: Callable[[], None]) -> None:
    """Run a stage's `main`; print a refusal as one line and exit with status 1."""
    try:
        main()
    except Exception as error:
        refusal = as_refusal(error)
        if refusal is None:
            raise
        print(f"draftflow: error: {refusal}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
