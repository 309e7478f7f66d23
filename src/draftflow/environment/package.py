"""Stage: install a locked package that ships a model into a folder, without what it depends on."""

import sys
from pathlib import Path

from draftflow.environment import record as records
from draftflow.environment.install import fill, fresh, verify
from draftflow.environment.uv import sources
from draftflow.stage import Record, run_stage, say, stage_parser


def install_package(folder: Path, lock: Path, record: Record) -> None:
    """Make `folder`, which holds the package as site-packages would.

    Raises:
        DraftflowError: index not reachable, hash mismatch, or a changed file.
    """
    where = sources()
    with fresh(folder) as new:
        into = ["--python", sys.executable, "--target", str(new)]
        with record.part("copy"):
            fill(into, lock, None, where)
        (new / ".lock").unlink(missing_ok=True)  # uv's own
        verified = verify(into, new, lock, None, where, record)
        record["packages"] = records.packages(site=new)
    record["files"], record["bytes"] = verified.files, verified.bytes
    say(f"{lock.stem}: {verified.files} files, {verified.bytes / 1e6:.0f} MB")


def main() -> None:
    """Install the package of a target lock."""
    parser = stage_parser(__doc__ or "", settings=False)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="results/targets/<target>/package")
    parser.add_argument("--record", type=Path, required=True, help="the JSON record of what was done")
    arguments = parser.parse_args()
    record = Record("package", lock=str(arguments.lock))
    install_package(arguments.output, arguments.lock, record)
    record.write(arguments.record)


if __name__ == "__main__":
    run_stage(main)
