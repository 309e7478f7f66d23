import json

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from tiny import make_target

from draftflow.dataset import formats
from draftflow.dataset.formats import Conversation
from draftflow.dataset.regenerate import GumbelNoise, generate, main, write_responses
from draftflow.dataset.template import encode_prompt
from draftflow.errors import DraftflowError
from draftflow.stage import Record
from draftflow.target.load import Target, load_target
from draftflow.target.prepare import prepare
from draftflow.target.tokenizer import load_tokenizer

GREEDY = {"max_new_tokens": 10, "temperature": 0.0, "top_p": 1.0, "batch_size": 3, "seed": 0}
PROMPTS = [
    "Hi",
    "How many apples are there in the box?",
    "Explain why the sky is blue.",
    "Two?",
    "Write a function.",
    "a",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    prepare({"source": str(make_target(folder / "model"))}, None, folder, Record("prepare_target"))
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder, "cpu", torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def user(*texts):
    return Conversation([{"role": "user", "content": text} for text in texts], f"source.jsonl:{len(texts[0])}")


def greedy(target, ids, count):
    """Slow reference: the whole sequence anew for every token, one conversation at a time, no cache, no padding."""
    ids = list(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


def answers(conversations):
    return [[m["content"] for m in each.messages if m["role"] == "assistant"] for each in conversations]


def ending_with(target, token):
    """The same target with another token that ends responses."""
    return Target(target.model, {**target.description, "eos_token_ids": [token]})


def test_greedy_batches_equal_decoding_alone(target, tokenizer):
    prompts = [encode_prompt(tokenizer, user(text).messages) for text in PROMPTS]
    expected = [greedy(target, ids, 10) for ids in prompts]
    assert 2 not in [token for response in expected for token in response]
    assert generate(target, prompts, PROMPTS, GREEDY) == expected


def test_no_head_of_keys_is_copied_for_its_group(target, tokenizer, monkeypatch):
    shapes, attend = [], F.scaled_dot_product_attention

    def spy(query, key, value, **options):
        shapes.append((*query.shape[1:3], *key.shape[1:3]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    prompts = [encode_prompt(tokenizer, user(text).messages) for text in PROMPTS]
    width, layers = max(map(len, prompts)), target.model.config.num_hidden_layers
    generate(target, prompts, PROMPTS, GREEDY)
    # 4 heads, 2 of keys; transformers attends to the prompts, which is one call of each layer
    assert shapes[layers:] == [(2, 2, 2, width + new) for new in range(1, 10) for _ in range(layers)]
    assert target.model.config._attn_implementation == "sdpa"


def test_a_response_ends_with_the_first_token_that_ends_it(target, tokenizer):
    prompts = [encode_prompt(tokenizer, user(text).messages) for text in PROMPTS]
    full = generate(target, prompts, PROMPTS, GREEDY)
    token = full[1][4]
    for response, whole in zip(generate(ending_with(target, token), prompts, PROMPTS, GREEDY), full, strict=True):
        end = whole.index(token) + 1 if token in whole else len(whole)
        assert response == whole[:end]


def test_order_and_places_of_the_input_are_kept(target, tokenizer):
    given = [user(text) for text in PROMPTS]
    written, figures = write_responses(target, tokenizer, given, GREEDY)
    assert [each.messages[0] for each in written] == [each.messages[0] for each in given]
    assert [each.where for each in written] == [each.where for each in given]
    assert figures["responses"] == figures["conversations"] == figures["cut_responses"] == len(PROMPTS)
    assert figures["tokens"] == 10 * len(PROMPTS)
    assert all(each.messages[1]["complete"] is False for each in written)


def test_later_turns_follow_the_target_s_own_earlier_answers(target, tokenizer):
    system = {"role": "system", "content": "Be brief."}
    turns = user("Hi", "How many?", "Why?").messages
    stale = {"role": "assistant", "content": "left out"}
    given = [Conversation([system, turns[0], stale, *turns[1:]], "source.jsonl:1"), user("Hello"), user("One?", "Two?")]
    written, figures = write_responses(target, tokenizer, given, GREEDY)
    assert figures["responses"] == 6
    first = written[0].messages
    assert [m["role"] for m in first] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert [m for m in first if m["role"] != "assistant"] == [system, *turns]
    for index in (2, 4, 6):
        ids = greedy(target, encode_prompt(tokenizer, first[:index]), 10)
        assert first[index]["content"] == tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")


def test_finished_responses_carry_no_special_token_and_no_mark(target, tokenizer):
    prompt = encode_prompt(tokenizer, user(PROMPTS[1]).messages)
    ids = greedy(target, prompt, 10)
    end = next(at for at in range(10) if ids[at] not in ids[:at] and tokenizer.decode(ids[:at]).strip())
    written, figures = write_responses(ending_with(target, ids[end]), tokenizer, [user(PROMPTS[1])], GREEDY)
    assert written[0].messages[1] == {"role": "assistant", "content": tokenizer.decode(ids[:end])}
    assert figures["cut_responses"] == 0


def test_conversation_in_which_the_target_says_nothing_is_dropped_and_counted(target, tokenizer, capsys):
    silent = greedy(target, encode_prompt(tokenizer, user(PROMPTS[1]).messages), 1)[0]
    talkative = [t for t in PROMPTS if greedy(target, encode_prompt(tokenizer, user(t).messages), 1)[0] != silent]
    assert talkative
    given = [user(PROMPTS[1], "And then?"), *map(user, talkative)]
    written, figures = write_responses(ending_with(target, silent), tokenizer, given, GREEDY)
    assert [each.messages[0]["content"] for each in written] == talkative
    assert figures["dropped"] == [given[0].where]
    assert "said nothing" in capsys.readouterr().out
    with pytest.raises(DraftflowError, match="said nothing to any prompt"):
        write_responses(ending_with(target, silent), tokenizer, given[:1], GREEDY)


def test_samples_do_not_depend_on_the_batch_and_follow_the_seed(target, tokenizer):
    sampled = {**GREEDY, "temperature": 1.5, "top_p": 0.9}
    given = [user(text) for text in PROMPTS]
    together = answers(write_responses(target, tokenizer, given, {**sampled, "batch_size": 6})[0])
    alone = answers(write_responses(target, tokenizer, given, {**sampled, "batch_size": 1})[0])
    backwards = answers(write_responses(target, tokenizer, given[::-1], sampled)[0])[::-1]
    assert together == alone == backwards
    assert together != answers(write_responses(target, tokenizer, given, {**sampled, "seed": 1})[0])
    assert together != answers(write_responses(target, tokenizer, given, GREEDY)[0])


def test_equal_prompts_are_sampled_differently(target, tokenizer):
    sampled = {**GREEDY, "temperature": 1.5}
    first, second = answers(write_responses(target, tokenizer, [user("Hi"), user("Hi")], sampled)[0])
    assert first != second


def test_gumbel_noise_samples_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, float("-inf")]]).expand(20000, -1)
    noise = GumbelNoise([torch.Generator().manual_seed(seed) for seed in range(len(logits))])
    chosen = noise(torch.zeros(len(logits), 1), logits).argmax(-1)
    frequencies = torch.bincount(chosen, minlength=4) / len(logits)
    expected = torch.softmax(logits[0], -1)
    # five standard deviations of a binomial share
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / len(logits)).sqrt()).all()


def test_conversation_beyond_the_context_is_refused_before_anything_is_written(target, tokenizer):
    with pytest.raises(DraftflowError, match=r"source\.jsonl:2: may need \d+ tokens, the target's context is 1024"):
        write_responses(target, tokenizer, [user("Hi"), user("Hi", "apples " * 2000)], GREEDY)


def test_stage_writes_responses_that_are_a_source_and_their_provenance(folder, tmp_path, monkeypatch):
    formats.write(tmp_path / "in.jsonl", [user(text) for text in PROMPTS])
    arguments = ["--device", "cpu", "--target", str(folder), "--conversations", str(tmp_path / "in.jsonl")]

    def run(name):
        output = ["--output", str(tmp_path / f"{name}.jsonl"), "--record", str(tmp_path / f"{name}.json")]
        monkeypatch.setattr("sys.argv", ["regenerate", "--settings", json.dumps(GREEDY), *arguments, *output])
        main()
        return (tmp_path / f"{name}.jsonl").read_bytes(), json.loads((tmp_path / f"{name}.json").read_text())

    content, record = run("one")
    assert content == run("two")[0]
    assert len(formats.read([tmp_path / "one.jsonl"], "given")) == len(PROMPTS)
    assert record["settings"] == GREEDY
    assert record["target"]["sha256"] == json.loads((folder / "target.json").read_text())["sha256"]
    assert record["torch"] == torch.__version__
    assert (record["device"], record["precision"], record["conversations"]) == ("cpu", "float32", len(PROMPTS))
    assert len(record["sha256"]) == 64
