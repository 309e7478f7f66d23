"""Stage: the findings of all check stages in one file, checks.json, with what they are findings about."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftflow.checks.result import Check, read_checks, read_json
from draftflow.errors import DraftflowError
from draftflow.stage import Record, run_stage, say, stage_parser


def merge(records: list[Path]) -> list[Check]:
    """The findings of all records, in order.

    Raises:
        DraftflowError: two findings have one name, so one would hide the other.
    """
    found: dict[str, Check] = {}
    for path in records:
        for check in read_checks(path):
            if check.check in found:
                raise DraftflowError(f"Check {check.check} is found twice.", "Give it a name of its own.", str(path))
            found[check.check] = check
    return list(found.values())


def collect(records: list[Path], env_id: str, fingerprint: Path) -> dict[str, Any]:
    """The facts of checks.json.

    Args:
        records: records of the check stages; one of them holds acceptance figures.
        env_id: environment that the drafter was trained and checked in.
        fingerprint: fingerprint.json of that environment.
    """
    checks = merge(records)
    failed = [check.check for check in checks if check.passed is False]
    parts = read_json(fingerprint)
    acceptance = [facts["acceptance"] for facts in map(read_json, records) if "acceptance" in facts]
    return {
        "passed": not failed,
        "failed": failed,
        "not_run": [check.check for check in checks if check.passed is None],
        "warnings": [check.check for check in checks if check.warning],
        "checks": [asdict(check) for check in checks],
        "acceptance": acceptance[0] if acceptance else None,
        "env_id": env_id,
        "fingerprint": {name: parts[name]["digest"] for name in ("compile", "numbers", "information") if name in parts},
    }


def main() -> None:
    parser = stage_parser(__doc__ or "", settings=False)
    parser.add_argument("--env-id", required=True, help="environment that the drafter was trained in")
    parser.add_argument("--fingerprint", type=Path, required=True, help="fingerprint.json of that environment")
    parser.add_argument("--output", type=Path, required=True, help="checks.json, to write")
    parser.add_argument("records", type=Path, nargs="+", help="records of the check stages")
    arguments = parser.parse_args()
    record = Record("collect_checks")
    record.facts |= collect(arguments.records, arguments.env_id, arguments.fingerprint)
    record.write(arguments.output)
    say(f"{len(record['checks'])} checks, {len(record['failed'])} failed, {len(record['not_run'])} not run")


if __name__ == "__main__":
    run_stage(main)
