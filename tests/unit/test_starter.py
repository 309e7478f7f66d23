"""The starter set: prompts of this project, and the default target's own answers to them."""

import hashlib
import json
from collections import Counter
from pathlib import Path

from draftflow.config import Config
from draftflow.dataset.formats import read, read_canonical

STARTER = Path(__file__).parents[2] / "data/starter"


def test_the_responses_are_the_bytes_that_the_target_wrote():
    provenance = json.loads((STARTER / "smollm2-135m-instruct.provenance.json").read_text())
    content = (STARTER / "smollm2-135m-instruct.jsonl").read_bytes()
    assert provenance["stage"] == "regenerate_responses"
    assert provenance["target"]["source"] == Config().target.source
    assert provenance["sha256"] == hashlib.sha256(content).hexdigest()


def test_every_prompt_is_answered_turn_by_turn():
    prompts = read([STARTER / "prompts.jsonl"], "regenerate")
    answered = read_canonical(STARTER / "smollm2-135m-instruct.jsonl")
    assert len(prompts) >= 240
    assert [conversation.id for conversation in answered] == [conversation.id for conversation in prompts]
    for asked, given in zip(prompts, answered, strict=True):
        roles = [message["role"] for message in given.messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        mine = [message for message in given.messages if message["role"] != "assistant"]
        assert [m["content"] for m in mine] == [m["content"] for m in asked.messages]


def test_the_prompts_are_of_every_kind_and_none_stands_twice():
    lines = [json.loads(line) for line in (STARTER / "prompts.jsonl").read_text().splitlines()]
    kinds = Counter(line["category"] for line in lines)
    assert set(kinds) == {"mathematics", "code", "explanation", "extraction", "chat", "multi_turn"}
    assert min(kinds.values()) >= 40
    assert len({json.dumps(line["messages"]) for line in lines}) == len(lines)
