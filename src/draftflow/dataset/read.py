"""Stage: read the sources into one canonical JSONL file."""

from pathlib import Path

from draftflow.dataset import formats
from draftflow.stage import Record, run_stage, say, stage_parser


def main() -> None:
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--output", type=Path, required=True, help="conversations to write")
    parser.add_argument("--record", type=Path, required=True, help="record to write")
    parser.add_argument("sources", type=Path, nargs="+", help="JSONL files")
    arguments = parser.parse_args()
    record = Record(
        "read_conversations", settings=arguments.settings, sources=[str(path) for path in arguments.sources]
    )
    with record.part("read"):
        conversations = formats.read(arguments.sources, arguments.settings["responses"])
    formats.write(arguments.output, conversations)
    record["conversations"] = len(conversations)
    record["prompts"] = len({conversation.id for conversation in conversations})
    record["messages"] = sum(len(conversation.messages) for conversation in conversations)
    say(f"{len(conversations)} conversations, {record['prompts']} different prompts")
    record.write(arguments.record)


if __name__ == "__main__":
    run_stage(main)
