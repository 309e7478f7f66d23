"""The packaged target against transformers' own reading of the same GGUF file."""

import os
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")

import torch
from transformers import AutoTokenizer

from draftflow.dataset.template import encode, render
from draftflow.stage import Record
from draftflow.target.load import load_target
from draftflow.target.prepare import prepare
from draftflow.target.tokenizer import load_tokenizer

FILE = Path(os.environ.get("DRAFTFLOW_SMOLLM2", ""))
pytestmark = [
    pytest.mark.slow,  # transformers takes its time over the file
    pytest.mark.skipif(not FILE.is_file(), reason="DRAFTFLOW_SMOLLM2 does not name the GGUF file"),
]

MESSAGES = [
    {"role": "user", "content": "What is 12 x 12?"},
    {"role": "assistant", "content": "144."},
    {"role": "user", "content": "And in 'C'?\n\n```c\nint a = 12 * 12;\n```"},
    {"role": "assistant", "content": " It depends…"},
]
TEXTS = [
    "",
    " ",
    "Hello, world! 1234567 + 3.14159 = ?",
    "  indented\n\n\n\tdef f(x):\r\n        return {x: [1, 2]}  # done   ",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? ¿Qué?",
    "日本語のテキスト 한국어 العربية עברית 🍏🏳️‍🌈 e\u0301 \u00a0\u2028\ufeff",
    "<|im_start|>user\n<|im_end|> <|endoftext|><repo_name> <|not_special|> <file_sep>",
    "'s 't 're I'LL don't CAN'T https://example.org/a?b=c&d=%20",
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    description = prepare({"source": str(FILE)}, None, folder, Record("prepare_target"))
    return folder, description


@pytest.fixture(scope="module")
def theirs():
    return AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


def random_texts(count):
    draw = random.Random(0)
    ranges = [(32, 126), (32, 126), (0, 31), (160, 591), (0x400, 0x4FF), (0x4E00, 0x4FFF), (0x1F300, 0x1F6FF)]
    return ["".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 80))) for _ in range(count)]


def test_tokenizer_equals_transformers_own(prepared, theirs):
    ours = load_tokenizer(prepared[0])
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS + random_texts(300):
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert [ours.decode(ours(text)["input_ids"]) for text in TEXTS] == TEXTS


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [None, {"role": "system", "content": "Be brief."}])
def test_chat_template_equals_transformers_own(prepared, theirs, length, first):
    ours = load_tokenizer(prepared[0])
    messages = ([first] if first else []) + MESSAGES[:length]
    for prompt in (False, True):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert render(ours, messages, prompt) == expected


def test_special_tokens_are_those_of_the_file(prepared):
    folder, description = prepared
    tokenizer = load_tokenizer(folder)
    assert description["eos_token_ids"] == [2]
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token_id) == ("<|im_end|>", "<|im_start|>", 2)
    assert tokenizer.convert_ids_to_tokens(description["mask_token_id_auto"]) in description["mask_token_reason"]
    assert description["mask_token_id_auto"] not in (0, 1, 2)


def test_loss_mask_of_the_template_covers_responses_and_their_end(prepared):
    tokenizer = load_tokenizer(prepared[0])
    document = encode(tokenizer, MESSAGES, [2])
    chosen = [token for token, flag in zip(document.input_ids, document.loss_mask, strict=True) if flag]
    assert tokenizer.decode(chosen) == "144.<|im_end|> It depends…<|im_end|>"


def test_it_answers_a_simple_question(prepared):
    target, tokenizer = load_target(prepared[0], "cpu", torch.float32), load_tokenizer(prepared[0])
    text = render(tokenizer, [{"role": "user", "content": "What is the capital of France?"}], prompt=True)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    output = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, ids.shape[1] :])


def test_weights_equal_transformers_own_bit_for_bit(prepared):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, GgufConfig

    theirs = AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    ours = load_target(prepared[0], "cpu", torch.float32).model
    expected, tensors = theirs.state_dict(), ours.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    for key in ("rope_parameters", "rms_norm_eps", "head_dim", "num_key_value_heads", "tie_word_embeddings"):
        assert getattr(ours.config, key) == getattr(theirs.config, key)
