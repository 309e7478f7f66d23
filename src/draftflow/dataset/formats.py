"""Conversations in JSONL: three forms that are read, and the canonical one that the pipeline writes.

Read: `messages` (role, content), ShareGPT `conversations` (from, value), `prompt` and `response`. Other columns are
left alone, except those that change what the target would see, which are refused. Written, and readable again:

    {"id": "0123456789abcdef", "messages": [{"content": "...", "role": "user"}, ...], "where": "prompts.jsonl:1"}

An assistant message with `"complete": false` was cut at the longest response, so it has no end of turn to learn from.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftflow.errors import DraftflowError
from draftflow.stage import write_text

Message = dict[str, Any]
Fault = tuple[str, str]  # file:line, and what is wrong there
Responses = Literal["given", "regenerate"]

REPORTED = 10
ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}

# Columns and message fields that would be part of what the target reads or writes.
MEANINGFUL_COLUMNS = ("tools", "functions", "system", "images", "videos", "audios", "documents")
MEANINGFUL_FIELDS = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Args:
        messages: role and content of each, and `complete: False` of an assistant message that was cut.
        where: `file:line` that it came from.
    """

    messages: list[Message]
    where: str

    @property
    def id(self) -> str:
        """16 hexadecimal digits that name the prompt turns: equal prompts have equal ids, whatever the responses."""
        return prompt_id(self.messages)

    @property
    def first_prompt(self) -> list[Message]:
        """The messages before the first response."""
        roles = [message["role"] for message in self.messages]
        return self.messages[: roles.index("assistant") if "assistant" in roles else None]


def prompt_id(messages: Iterable[Message]) -> str:
    """16 hexadecimal digits of the SHA-256 of all turns but the assistant's."""
    turns = [[message["role"], message["content"]] for message in messages if message["role"] != "assistant"]
    return hashlib.sha256(json.dumps(turns, ensure_ascii=False).encode()).hexdigest()[:16]


class _LineError(Exception):
    """What is wrong with one line: the field, and why."""


def read(paths: Sequence[Path], responses: Responses) -> list[Conversation]:
    """Conversations of JSONL files, in order.

    Args:
        paths: the files.
        responses: `given` keeps the assistant's messages, and each user message must have one. `regenerate` drops
            them, and several user messages may follow each other: the target answers each.

    Raises:
        DraftflowError: a file cannot be read, holds no conversation, or has lines that cannot be used; up to ten of
            those are named with file, line and field.
    """
    conversations: list[Conversation] = []
    faults: list[Fault] = []
    for path in paths:
        before = len(conversations) + len(faults)
        try:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    if not line.strip():
                        continue
                    where = f"{path}:{number}"
                    try:
                        conversations.append(Conversation(_messages(_parse(line), responses), where))
                    except _LineError as error:
                        faults.append((where, str(error)))
        except OSError as error:
            raise DraftflowError(f"{error.strerror}.", "Correct dataset.sources.", str(path)) from None
        if before == len(conversations) + len(faults):
            raise DraftflowError("The file holds no conversation.", "Correct dataset.sources.", str(path))
    refuse(faults, len(conversations) + len(faults), "Correct or remove such lines; a file has one JSON object a line.")
    return conversations


def refuse(faults: Sequence[Fault], total: int, remedy: str) -> None:
    """Raise if there are faults, naming up to ten of them.

    Raises:
        DraftflowError: there are.
    """
    if len(faults) == 1:
        where, why = faults[0]
        raise DraftflowError(f"{why}.", remedy, where)
    if faults:
        lines = "".join(f"\n  {where}: {why}" for where, why in faults[:REPORTED])
        more = f"\n  and {len(faults) - REPORTED} more" if len(faults) > REPORTED else ""
        raise DraftflowError(
            f"{len(faults)} of {total} lines cannot be used:{lines}{more}\n", remedy, "dataset.sources"
        )


def write(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write conversations in the canonical form, whole or not at all."""
    lines = (
        json.dumps(
            {"id": conversation.id, "messages": conversation.messages, "where": conversation.where},
            ensure_ascii=False,
            sort_keys=True,
        )
        for conversation in conversations
    )
    write_text(path, "".join(line + "\n" for line in lines))


def read_canonical(path: Path) -> list[Conversation]:
    """Conversations that a stage wrote with `write`; `where` still names the line of the source."""
    with path.open(encoding="utf-8") as stream:
        return [Conversation(value["messages"], value["where"]) for value in map(json.loads, stream)]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _LineError(f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except json.JSONDecodeError as error:
        raise _LineError(f"broken JSON, {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise _LineError(f"broken JSON, {error}") from None
    if not isinstance(value, dict):
        raise _LineError(f"a JSON object is needed, this is {type(value).__name__}")
    return value


def _messages(row: dict[str, Any], responses: Responses) -> list[Message]:
    """The messages of one line, checked.

    Raises:
        _LineError: the line cannot be used.
    """
    for column in MEANINGFUL_COLUMNS:
        if row.get(column):
            raise _LineError(f"{column}: the column would change the prompt and is not supported")
    if "messages" in row:
        messages = _turns(row["messages"], "messages", "role", "content", {role: role for role in ROLES})
    elif "conversations" in row:
        messages = _turns(row["conversations"], "conversations", "from", "value", SHAREGPT_ROLES)
    elif "prompt" in row:
        messages = [_turn("user", row["prompt"], "prompt")]
        if responses == "given":
            messages.append(_turn("assistant", row.get("response"), "response"))
    else:
        columns = ", ".join(row) or "none"
        raise _LineError(f"no `messages`, `conversations`, or `prompt` and `response` (columns: {columns})")
    _check_order(messages, responses)
    if responses == "regenerate":
        messages = [message for message in messages if message["role"] != "assistant"]
    for index, message in enumerate(messages):
        if not message["content"].strip():
            kind = "response" if message["role"] == "assistant" else "prompt"
            raise _LineError(f"message {index + 1} ({message['role']}): empty {kind}")
    return messages


def _turns(value: Any, column: str, role_key: str, text_key: str, roles: dict[str, str]) -> list[Message]:
    if not isinstance(value, list):
        raise _LineError(f"{column}: a list is needed, this is {type(value).__name__}")
    messages = []
    for index, turn in enumerate(value):
        field = f"{column}[{index}]"
        if not isinstance(turn, dict):
            raise _LineError(f"{field}: an object is needed, this is {type(turn).__name__}")
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise _LineError(f"{field}.{role_key}: unknown role {role!r}, known are {', '.join(roles)}")
        for name in MEANINGFUL_FIELDS:
            if turn.get(name):
                raise _LineError(f"{field}.{name}: not supported; it would be left out of the text")
        message = _turn(roles[role], turn.get(text_key), f"{field}.{text_key}")
        if message["role"] == "assistant" and turn.get("complete") is False:
            message["complete"] = False
        messages.append(message)
    return messages


def _turn(role: str, content: Any, field: str) -> Message:
    if not isinstance(content, str):
        raise _LineError(
            f"{field}: " + ("missing" if content is None else f"a text is needed, this is {type(content).__name__}")
        )
    try:
        content.encode()
    except UnicodeEncodeError:
        raise _LineError(f"{field}: not valid Unicode (half of a surrogate pair)") from None
    return {"role": role, "content": content}


def _check_order(messages: list[Message], responses: Responses) -> None:
    """System first, then user and assistant in turn.

    Raises:
        _LineError: they come in another order, or there is no user message, or the last one has no response.
    """
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise _LineError("no user message")
    before = "system"
    for index, role in enumerate(roles):
        allowed = {"system": ["user"], "user": ["assistant"], "assistant": ["user"]}[before]
        if index == 0:
            allowed = ["system", "user"]
        if before == "user" and responses == "regenerate":
            allowed = ["assistant", "user"]
        if role not in allowed:
            after = f"after {before}" if index else "first"
            raise _LineError(
                f"message {index + 1}: roles out of order, {role} {after} ({' or '.join(allowed)} expected)"
            )
        before = role
    if before == "user" and responses == "given":
        raise _LineError(
            f"message {len(roles)}: the user message has no response (dataset.responses: regenerate writes them)"
        )
