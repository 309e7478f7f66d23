"""What one check found, and the file that a stage writes its findings to."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftflow.errors import DraftflowError
from draftflow.stage import Record

Figure = float | int | str | None


@dataclass(frozen=True)
class Check:
    """One finding.

    Args:
        check: name, unique in a run.
        passed: None when the check could not be run; `explanation` then begins with "not run:".
        figure: what was measured, a number or a short text.
        limit: what the figure must satisfy, as a short text with its unit.
        explanation: one sentence of what was measured and how.
        look_at: where to begin when it fails.
        warning: set when the limit is missed but the configuration says that this is only a warning.
    """

    check: str
    passed: bool | None
    figure: Figure
    limit: str
    explanation: str
    look_at: str
    warning: str | None = None


def not_run(check: str, reason: str, limit: str, look_at: str) -> Check:
    """A finding that is neither pass nor fail; the verdict counts it where the user sees it."""
    return Check(check, None, None, limit, f"not run: {reason}", look_at)


def add_checks(record: Record, checks: list[Check]) -> None:
    """Put the findings into a stage's record, where `read_checks` finds them; JSON has no NaN and no infinity."""
    record["checks"] = [
        asdict(check if _is_json(check.figure) else replace(check, figure=str(check.figure))) for check in checks
    ]


def _is_json(figure: Figure) -> bool:
    return not isinstance(figure, float) or math.isfinite(figure)


def read_checks(path: str | Path) -> list[Check]:
    """The findings of a stage's record.

    Raises:
        DraftflowError: the file has no list of findings in this form.
    """
    facts = read_json(path)
    try:
        return [Check(**finding) for finding in facts["checks"]]
    except (KeyError, TypeError):
        raise DraftflowError(
            "This is not a record of checks.", "Remove it and run snakemake again to make it anew.", str(path)
        ) from None


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file that an earlier stage wrote.

    Raises:
        DraftflowError: the file is missing or is no JSON object.
    """
    remedy = "Remove it and run snakemake again to make it anew."
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise DraftflowError(f"A record cannot be read ({error}).", remedy, str(path)) from None
    if not isinstance(value, dict):
        raise DraftflowError("A record is no JSON object.", remedy, str(path))
    return value
