import pytest

pytest.importorskip("transformers")

from tiny import CHATML, make_tokenizer

from draftflow.dataset.template import encode, encode_prompt, render
from draftflow.errors import DraftflowError

EOS = [2]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many apples? 🍏"},
    {"role": "assistant", "content": "Zwölf 🍎."},
    {"role": "user", "content": "And pears?"},
    {"role": "assistant", "content": "\nNone "},
]
DEFAULT_SYSTEM = "{%- if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
# Earlier answers lose their reasoning, the last one gets an empty block if it has none.
THINKING = """\
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- if message.role == 'assistant' and loop.last %}
{%- set content = '<think>\\n\\n</think>\\n\\n' + content if '<think>' not in message.content else message.content %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
STRICT = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{%- endif %}" + CHATML


def supervised(tokenizer, document):
    """Text of each run of supervised tokens."""
    runs, before = [], False
    for token, flag in zip(document.input_ids, document.loss_mask, strict=True):
        if flag and not before:
            runs.append([])
        if flag:
            runs[-1].append(token)
        before = flag
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM])
@pytest.mark.parametrize("first", [0, 1])
def test_responses_and_their_end_of_turn_are_supervised_and_nothing_else(template, first):
    tokenizer = make_tokenizer(template)
    document = encode(tokenizer, MESSAGES[first:], EOS)
    assert tokenizer.decode(document.input_ids) == render(tokenizer, MESSAGES[first:], prompt=False)
    assert supervised(tokenizer, document) == ["Zwölf 🍎.<|im_end|>", "\nNone <|im_end|>"]


def test_tokens_before_a_response_are_those_of_the_prompt_at_inference():
    tokenizer = make_tokenizer()
    document = encode(tokenizer, MESSAGES, EOS)
    prompt = encode_prompt(tokenizer, MESSAGES[:2])
    assert document.input_ids[: len(prompt)] == prompt
    assert document.loss_mask.index(True) == len(prompt)


def test_a_response_that_was_cut_has_no_end_of_turn_to_learn():
    tokenizer = make_tokenizer()
    messages = [MESSAGES[1], {**MESSAGES[2], "complete": False}, MESSAGES[3], MESSAGES[4]]
    assert supervised(tokenizer, encode(tokenizer, messages, EOS)) == ["Zwölf 🍎.", "\nNone <|im_end|>"]


def test_without_an_end_of_turn_token_the_whole_turn_is_supervised():
    tokenizer = make_tokenizer(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    messages = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    assert [text.strip() for text in supervised(tokenizer, encode(tokenizer, messages, EOS))] == ["Two."]


def test_a_token_that_reaches_into_the_header_is_not_supervised():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["\nNo"])  # header's line break and the beginning of the response in one token
    messages = [{"role": "user", "content": "Pears?"}, {"role": "assistant", "content": "None"}]
    document = encode(tokenizer, messages, EOS)
    assert supervised(tokenizer, document) == ["ne<|im_end|>"]


def test_thinking_template_keeps_single_turns_and_refuses_several():
    tokenizer = make_tokenizer(THINKING)
    reasoned = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwelve"}
    assert supervised(tokenizer, encode(tokenizer, [MESSAGES[1], reasoned], EOS)) == [
        "<think>\nhm\n</think>\n\nTwelve<|im_end|>"
    ]
    assert supervised(tokenizer, encode(tokenizer, MESSAGES[1:3], EOS)) == [
        "<think>\n\n</think>\n\nZwölf 🍎.<|im_end|>"
    ]
    with pytest.raises(DraftflowError, match=r"rewrites turns.*single turn") as error:
        encode(tokenizer, MESSAGES, EOS, "source.jsonl:7")
    assert error.value.where == "source.jsonl:7"


def test_what_the_template_refuses_is_refused_with_its_line():
    with pytest.raises(DraftflowError, match=r"source\.jsonl:7: The chat template refuses .*no system message"):
        encode(make_tokenizer(STRICT), MESSAGES, EOS, "source.jsonl:7")
