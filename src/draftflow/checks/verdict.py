"""Stage: print what the checks found, and fail if one of them failed.

Apart from `collect`, because a failed job loses its outputs: checks.json and the drafter stay, only this stage fails.
"""

from pathlib import Path

from draftflow.checks.result import Check, Figure, read_checks, read_json
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage, say, stage_parser, write_text


def short(figure: Figure) -> str:
    """A figure as people read it: four significant digits."""
    if figure is None:
        return "-"
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)


def outcome(check: Check) -> str:
    """One word for a finding."""
    if check.passed is None:
        return "not run"
    if not check.passed:
        return "FAILED"
    return "warning" if check.warning else "passed"


def table(checks: list[Check]) -> list[str]:
    """Lines of a table: check, figure, limit, outcome; reasons of warnings and of checks not run below it."""
    rows = [("check", "figure", "limit", "outcome")]
    rows += [(check.check, short(check.figure), check.limit, outcome(check)) for check in checks]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += [f"{check.check}: {check.explanation}" for check in checks if check.passed is None]
    lines += [f"{check.check}: {check.warning}" for check in checks if check.warning]
    return lines


def judge(checks: list[Check], folder: Path) -> str:
    """One line that says that all checks passed.

    Raises:
        DraftflowError: a check failed, or none was run; names each failed one with figure, limit and what to look at.
    """
    failed = [check for check in checks if check.passed is False]
    passed = [check for check in checks if check.passed]
    if not passed and not failed:
        raise DraftflowError("No check was run.", "Run `snakemake check` again.", str(folder / "checks.json"))
    if failed:
        figures = [f"{check.check} is {short(check.figure)}, must be {check.limit}" for check in failed]
        hints = [f"  {check.check}: {check.explanation} Look at {check.look_at}." for check in failed]
        raise DraftflowError(
            f"{len(failed)} of {len(checks)} checks failed: {'; '.join(figures)}.",
            "\n".join(["Everything is kept.", *hints]),
            str(folder / "checks.json"),
        )
    skipped = len(checks) - len(passed)
    return f"{len(passed)} checks passed" + (f", {skipped} not run" if skipped else "")


def main() -> None:
    parser = stage_parser(__doc__ or "", settings=False)
    parser.add_argument("--checks", type=Path, required=True, help="checks.json")
    parser.add_argument("--output", type=Path, required=True, help="written if every check passed")
    arguments = parser.parse_args()
    checks = read_checks(arguments.checks)
    for line in table(checks):
        print(f"  {line}")
    if acceptance := read_json(arguments.checks)["acceptance"]:
        lower, upper = acceptance["interval"]
        say(
            f"acceptance length {acceptance['length']:.3f} tokens per target forward on {acceptance['prompts']} "
            f"held-out prompts, 95 % interval {lower:.3f} to {upper:.3f}"
        )
    folder = arguments.checks.parent
    say(
        f"drafter in {folder / 'drafter'}, acceptance by position in {folder / 'acceptance.tsv'}, "
        f"checks in {arguments.checks}"
    )
    line = judge(checks, folder)
    write_text(arguments.output, line + "\n")
    say(line)


if __name__ == "__main__":
    run_stage(main)
