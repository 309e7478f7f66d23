import json

import pytest

from draftflow.dataset import formats
from draftflow.errors import DraftflowError

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Good day"}


@pytest.fixture
def source(tmp_path):
    def write(*lines):
        path = tmp_path / "source.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def refusal(path, responses="given"):
    with pytest.raises(DraftflowError) as error:
        formats.read([path], responses)
    return str(error.value)


def test_three_forms_give_the_same_conversation(source):
    path = source(
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day"}]},
        {"prompt": "Hello", "response": "Good day", "source": "other columns are left alone"},
    )
    read = formats.read([path], "given")
    assert [conversation.messages for conversation in read] == [[USER, ASSISTANT]] * 3
    assert [conversation.where for conversation in read] == [f"{path}:{line}" for line in (1, 2, 3)]
    assert len({conversation.id for conversation in read}) == 1


def test_id_depends_on_the_prompt_turns_and_not_on_the_responses():
    other = {**ASSISTANT, "content": "Another"}
    assert formats.Conversation([USER, ASSISTANT], "").id == formats.Conversation([USER, other], "").id
    assert formats.Conversation([USER], "").id != formats.Conversation([{**USER, "content": "Hello!"}], "").id


def test_to_regenerate_drops_responses_and_allows_user_messages_in_a_row(source):
    system = {"role": "system", "content": "Be brief."}
    path = source({"messages": [system, USER, USER]}, {"messages": [USER, {**ASSISTANT, "content": ""}, USER]})
    assert [each.messages for each in formats.read([path], "regenerate")] == [[system, USER, USER], [USER, USER]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "broken JSON"),
        ("[" * 100000, "broken JSON"),
        ("[]", "a JSON object is needed, this is list"),
        ({"text": "Hello"}, "(columns: text)"),
        ({"messages": []}, "no user message"),
        ({"messages": {"role": "user"}}, "messages: a list is needed, this is dict"),
        ({"messages": [USER, "Good day"]}, "messages[1]: an object is needed, this is str"),
        ({"messages": [USER, {"role": "tool", "content": "4"}]}, "messages[1].role: unknown role 'tool'"),
        ({"conversations": [{"from": "bing", "value": "4"}]}, "conversations[0].from: unknown role 'bing'"),
        ({"messages": [USER, {**ASSISTANT, "content": " \n"}]}, "message 2 (assistant): empty response"),
        ({"messages": [{**USER, "content": ""}, ASSISTANT]}, "message 1 (user): empty prompt"),
        ({"messages": [{"role": "user"}, ASSISTANT]}, "messages[0].content: missing"),
        ({"messages": [{"role": "user", "content": [{"text": "Hello"}]}, ASSISTANT]}, "a text is needed, this is list"),
        ({"messages": [ASSISTANT, USER]}, "message 1: roles out of order, assistant first"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "message 3: roles out of order, assistant after assistant"),
        (
            {"messages": [USER, {"role": "system", "content": "Late"}]},
            "message 2: roles out of order, system after user",
        ),
        ({"messages": [USER, USER, ASSISTANT]}, "message 2: roles out of order, user after user"),
        ({"messages": [USER, ASSISTANT, USER]}, "message 3: the user message has no response"),
        ({"messages": [USER, ASSISTANT], "tools": [{"name": "clock"}]}, "tools: the column would change the prompt"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [1]}]}, "messages[1].tool_calls: not supported"),
        ({"prompt": "Hello"}, "response: missing"),
        ({"prompt": "\ud800", "response": "?"}, "prompt: not valid Unicode"),
    ],
)
def test_bad_line_is_refused_with_file_line_and_field(source, line, reason):
    path = source({"messages": [USER, ASSISTANT]}, line)
    message = refusal(path)
    assert message.startswith(f"{path}:2: ")
    assert reason in message


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9", "response": "yes"}\n')
    assert f"{path}:1: not UTF-8 (byte 16 of the line)" in refusal(path)


def test_byte_order_mark_and_blank_lines_are_read_over(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "Hello", "response": "Good day"}\r\n\r\n')
    assert formats.read([path], "given")[0].messages == [USER, ASSISTANT]


def test_ten_bad_lines_are_named_and_the_others_counted(source):
    message = refusal(source({"prompt": "Hello", "response": "Good day"}, *["{"] * 13))
    assert "13 of 14 lines cannot be used" in message
    assert ":2: " in message
    assert ":11: " in message
    assert ":12: " not in message
    assert "and 3 more" in message


def test_empty_and_missing_files_are_refused(source, tmp_path):
    assert "holds no conversation" in refusal(source())
    assert "No such file" in refusal(tmp_path / "absent.jsonl")


def test_written_conversations_are_read_again_and_written_the_same(source, tmp_path):
    cut = {**ASSISTANT, "content": "Good \u2028 d\u00e4y", "complete": False}
    read = formats.read([source({"messages": [USER, cut]}, {"prompt": "1", "response": "2"})], "given")
    assert read[0].messages[1]["complete"] is False
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    formats.write(first, read)
    assert formats.read_canonical(first) == read
    again = formats.read([first], "given")
    assert [each.messages for each in again] == [each.messages for each in read]
    formats.write(second, formats.read_canonical(first))
    assert first.read_bytes() == second.read_bytes()
