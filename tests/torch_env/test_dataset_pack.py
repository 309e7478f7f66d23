import json

import numpy as np
import pytest

pytest.importorskip("transformers")

from safetensors.numpy import load_file
from tiny import make_tokenizer

from draftflow.dataset import formats
from draftflow.dataset.formats import Conversation
from draftflow.dataset.pack import fault, fill, main, pack, split
from draftflow.dataset.template import Document, encode, encode_prompt
from draftflow.errors import DraftflowError


def conversation(prompt, response="Twelve apples.", where="source.jsonl:1"):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return Conversation(messages, where)


def documents(count=60, longest=40, seed=3):
    generator = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        length = int(generator.integers(3, longest))
        ids = generator.integers(1, 300, length).tolist()
        result.append(Document(ids, [False] * (length // 2) + [True] * (length - length // 2)))
    return result


def test_rows_hold_every_document_whole_once():
    given = documents()
    rows = fill(given, 48, 0, seed=0)
    found = []
    for row in range(len(rows.input_ids)):
        ids = rows.document_ids[row]
        assert sorted(set(ids[ids >= 0])) == list(range(ids.max() + 1))
        for number in range(ids.max() + 1):
            at = np.flatnonzero(ids == number)
            assert (np.diff(at) == 1).all()
            assert rows.position_ids[row, at].tolist() == list(range(len(at)))
            found.append((rows.input_ids[row, at].tolist(), rows.loss_mask[row, at].astype(bool).tolist()))
    assert sorted(found) == sorted((document.input_ids, document.loss_mask) for document in given)
    padding = rows.document_ids == -1
    assert not rows.loss_mask[padding].any()
    assert not rows.input_ids[padding].any()
    assert [array.dtype for array in vars(rows).values()] == [np.int32, np.int32, np.int32, np.uint8]


def test_packing_is_no_worse_than_first_fit_and_fills_rows():
    lengths = [len(document) for document in documents(count=400)]
    rows = pack(lengths, 64)
    spaces: list[int] = []  # slow reference: first fit, the longest first
    for length in sorted(lengths, reverse=True):
        at = next((index for index, space in enumerate(spaces) if space >= length), None)
        if at is None:
            spaces.append(64)
            at = -1
        spaces[at] -= length
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
    assert len(rows) <= len(spaces)
    assert sum(lengths) / (64 * len(rows)) > 0.95


@pytest.mark.parametrize(("median", "sigma", "least"), [(400, 0.9, 0.999), (900, 0.7, 0.995), (1600, 0.5, 0.98)])
def test_rows_of_conversations_of_usual_lengths_are_full(median, sigma, least):
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, 20000).astype(int).clip(16, 3072).tolist()
    rows = pack(lengths, 3072)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    tokens = [sum(lengths[index] for index in row) for row in rows]
    assert max(tokens) <= 3072
    assert sum(tokens) / (len(rows) * 3072) > least


def test_seed_decides_the_order_of_rows_and_nothing_else():
    given = documents()
    first, same, other = (fill(given, 48, 0, seed).input_ids for seed in (0, 0, 1))
    assert (first == same).all()
    assert not (first == other).all()
    assert sorted(map(tuple, first)) == sorted(map(tuple, other))


def test_a_document_longer_than_the_row_is_cut_at_its_end():
    document = Document(list(range(20)), [False] * 10 + [True] * 10)
    rows = fill([document], 16, 0, seed=0)
    assert rows.input_ids.tolist() == [list(range(16))]
    assert rows.counts() == {"rows": 1, "documents": 1, "tokens": 16, "supervised_tokens": 6, "fill": 1.0}


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([False] * 15 + [True] * 9, "the prompt has 15 tokens and leaves no room for a response in a row of 16"),
        ([False] * 4 + [True], "the responses have fewer than 2 tokens"),
        ([False] * 14 + [True] * 9, None),
    ],
)
def test_a_document_needs_two_supervised_tokens_in_its_row(mask, reason):
    result = fault(Document([1] * len(mask), mask), 16)
    assert result is None if reason is None else reason in result


def test_split_keeps_equal_first_prompts_together_and_moves_none_when_others_are_added():
    some = [conversation(f"Question {index % 40}?", f"Answer {index}.") for index in range(80)]
    some.append(Conversation([*some[0].messages, *conversation("More?").messages], ""))
    train, held = split(some, 0.3, seed=0)
    assert len(train) + len(held) == len(some)
    assert not {each.messages[0]["content"] for each in train} & {each.messages[0]["content"] for each in held}
    more_train, more_held = split([*some, *(conversation(f"New {index}") for index in range(50))], 0.3, seed=0)
    assert all(each in more_held for each in held)
    assert all(each in more_train for each in train)
    assert split(some, 0.3, seed=1)[1] != held


def test_share_of_held_out_prompts_is_about_the_one_asked_for():
    _, held = split([conversation(f"Question {index}?") for index in range(2000)], 0.1, seed=0)
    assert 150 < len(held) < 250


@pytest.mark.parametrize(
    ("share", "what"), [(1e-9, "No held-out prompt left"), (1 - 1e-9, "No prompt to train on left")]
)
def test_an_empty_side_is_refused(share, what):
    with pytest.raises(DraftflowError, match=rf"dataset\.held_out: {what}"):
        split([conversation("One?"), conversation("Two?")], share, seed=0)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Run the stage on conversations; returns its folder."""
    make_tokenizer().save_pretrained(tmp_path / "target/tokenizer")
    (tmp_path / "target/target.json").write_text(json.dumps({"eos_token_ids": [2]}))

    def run(conversations, row_length=64, held_out=0.5):
        formats.write(tmp_path / "conversations.jsonl", conversations)
        settings = json.dumps({"row_length": row_length, "held_out": held_out, "seed": 0})
        paths = {
            "conversations": "conversations.jsonl",
            "target": "target",
            "output": "rows.safetensors",
            "held-out": "held_out.jsonl",
            "record": "pack.json",
        }
        arguments = [text for name, path in paths.items() for text in (f"--{name}", str(tmp_path / path))]
        monkeypatch.setattr("sys.argv", ["pack", "--settings", settings, *arguments])
        main()
        return tmp_path

    return run


def test_stage_writes_rows_held_out_prompts_and_record(stage):
    given = [conversation(f"How many apples in box {index}?") for index in range(20)]
    folder = stage(given)
    record = json.loads((folder / "pack.json").read_text())
    tensors = load_file(folder / "rows.safetensors")
    assert {name.split(".")[0] for name in tensors} == {"train", "held_out"}
    for side in ("train", "held_out"):
        assert record[side]["rows"] == len(tensors[f"{side}.input_ids"])
        assert record[side]["supervised_tokens"] == tensors[f"{side}.loss_mask"].sum()
    prompts = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    assert len(prompts) == record["held_out"]["conversations"]
    tokenizer = make_tokenizer()
    for prompt in prompts:
        assert [message["role"] for message in prompt["messages"]] == ["user"]
        assert prompt["prompt_ids"] == encode_prompt(tokenizer, prompt["messages"])
        assert prompt["id"] == formats.prompt_id(prompt["messages"])
    text = {tuple(encode(tokenizer, each.messages, [2]).input_ids) for each in given}
    rows, ids = tensors["train.input_ids"], tensors["train.document_ids"]
    for row, numbers in zip(rows, ids, strict=True):
        assert all(tuple(row[numbers == number].tolist()) in text for number in range(numbers.max() + 1))


def test_stage_gives_the_same_files_again(stage):
    given = [conversation(f"How many apples in box {index}?") for index in range(20)]
    names = ("rows.safetensors", "held_out.jsonl")
    first = [(stage(given) / name).read_bytes() for name in names]
    assert first == [(stage(given) / name).read_bytes() for name in names]


def test_stage_names_every_prompt_that_does_not_fit(stage, tmp_path):
    long = [conversation("apple " * 40 + str(index), where=f"source.jsonl:{index}") for index in range(30)]
    with pytest.raises(DraftflowError) as error:
        stage([*long, *(conversation(f"Fits {index}?") for index in range(20))], row_length=48)
    assert "leaves no room for a response in a row of 48" in str(error.value)
    assert str(error.value).count("source.jsonl:") == 10
    assert "more" in str(error.value)
    assert not (tmp_path / "rows.safetensors").exists()
