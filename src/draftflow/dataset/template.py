"""From messages to token ids and loss mask, through the target's chat template.

What is supervised is what the target writes at inference: the tokens after the generation prompt up to and with the one
that ends the turn. Where a response begins and ends is read off the text: the conversation up to a response, written
with the generation prompt, must be how the whole conversation begins, and so must the conversation that ends with the
response. The whole text is tokenized once, and a token belongs to a response if its characters do. (Tokenizing the
pieces apart would differ at the seams for tokenizers that merge over them or prefix every text with a space.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftflow.dataset.formats import Message
from draftflow.errors import DraftflowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Document:
    """A conversation in tokens.

    Args:
        input_ids: token ids.
        loss_mask: for each token, whether it is part of a response.
    """

    input_ids: list[int]
    loss_mask: list[bool]

    def __len__(self) -> int:
        return len(self.input_ids)

    def cut(self, length: int) -> Document:
        """The first `length` tokens."""
        return Document(self.input_ids[:length], self.loss_mask[:length])


def render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], prompt: bool, where: str | None = None
) -> str:
    """The conversation as text; `prompt` adds what makes the target write a response.

    Raises:
        DraftflowError: the template refuses the conversation.
    """
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    try:
        return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # templates raise what they like
        raise DraftflowError(
            f"The chat template refuses the conversation ({error}).",
            "Remove it from the source, or give another template in target.chat_template.",
            where,
        ) from None


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], where: str | None = None
) -> list[int]:
    """Token ids of a prompt with the generation prompt; templates write their own begin-of-text token."""
    return tokenizer(render(tokenizer, messages, prompt=True, where=where), add_special_tokens=False)["input_ids"]


def encode(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    eos_token_ids: Sequence[int],
    where: str | None = None,
) -> Document:
    """Token ids and loss mask of a whole conversation.

    Args:
        tokenizer: the target's, with a chat template.
        messages: ends with a response.
        eos_token_ids: tokens that end a turn. In a response, what the template writes after the last of them (a line
            break) is not supervised; nor is that token itself in a response that was cut (`complete: False`).
        where: `file:line`, for messages.

    Raises:
        DraftflowError: the template refuses the conversation, or writes earlier turns in another way once later
            ones follow, so that no single text has the prompts that the target sees.
    """
    text = render(tokenizer, messages, prompt=False, where=where)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    mask = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], prompt=True, where=where)
        after = render(tokenizer, messages[: index + 1], prompt=False, where=where)
        if not (text.startswith(after) and after.startswith(before)):
            raise DraftflowError(
                f"The chat template rewrites turns: with message {index + 1} the text does not begin as it does "
                "without what follows or comes before it (templates that strip <think> parts of earlier turns do so).",
                "Use conversations of a single turn, or give a template that keeps every turn in target.chat_template.",
                where,
            )
        span = [at for at, (start, end) in enumerate(offsets) if len(before) <= start and end <= len(after)]
        ends = [at for at in span if ids[at] in eos_token_ids]
        if ends:
            complete = message.get("complete", True)
            span = [at for at in span if at < ends[-1] or (at == ends[-1] and complete)]
        for at in span:
            mask[at] = True
    return Document(ids, mask)
