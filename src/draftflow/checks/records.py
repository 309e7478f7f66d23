"""Stage: what the records of a run say: did the loss fall, and was all code compiled before? No torch needed."""

from pathlib import Path

from draftflow.checks.compiled import compile_checks
from draftflow.checks.loss_curve import loss_checks, read_metrics
from draftflow.checks.result import add_checks, read_json
from draftflow.stage import Record, run_stage, stage_parser


def main() -> None:
    """Check the records of training and warm-up, and write the findings."""
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--train", type=Path, required=True, help="train.json")
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl")
    parser.add_argument("--warm", type=Path, required=True, help="warm.json")
    parser.add_argument("--record", type=Path, required=True, help="record to write")
    arguments = parser.parse_args()
    record = Record("check_records")
    trained, warmed = read_json(arguments.train), read_json(arguments.warm)
    vocab_size = warmed["holds"]["plan"]["drafter"]["vocab_size"]
    checks = loss_checks(read_metrics(arguments.metrics), vocab_size)
    checks += compile_checks(trained, warmed, arguments.settings["compile"])
    add_checks(record, checks)
    record.write(arguments.record)


if __name__ == "__main__":
    run_stage(main)
