"""The part of a document that a benchmark writes, between two markers. Standard library only."""

from pathlib import Path

from draftflow.errors import DraftflowError
from draftflow.stage import write_text


def replace_between(file: Path, begin: str, end: str, text: str) -> None:
    """Put `text` between the two markers of a document.

    Raises:
        DraftflowError: it has no such markers.
    """
    before, begins, rest = file.read_text(encoding="utf-8").partition(begin)
    _, ends, after = rest.partition(end)
    if not begins or not ends:
        raise DraftflowError("There is no place for the tables.", f"Put `{begin}` and `{end}` there.", str(file))
    write_text(file, f"{before}{begin}\n\n{text}\n\n{end}{after}")
