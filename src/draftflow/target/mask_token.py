"""Which token stands for `to be drafted`: one that the target never reads or writes."""

import re

from transformers import PreTrainedTokenizerFast

RESERVED = re.compile(r"reserved|unused|placeholder|mask", re.IGNORECASE)


def choose_mask_token(
    tokenizer: PreTrainedTokenizerFast, embedding_rows: int, eos_token_ids: list[int]
) -> tuple[int | None, str]:
    """The id of the mask token and the reason for it; no id where there is no good one.

    In this order: the tokenizer's own mask token, the first row of the embedding beyond the tokenizer's tokens, a
    special token that nothing uses (one called reserved or unused first, then the lowest id). Never a token that
    begins, ends or pads a text, and none that the chat template knows: the drafter must not take text for a gap.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id, f"the tokenizer's own mask token {tokenizer.mask_token}"
    used = max(tokenizer.get_vocab().values()) + 1
    if used < embedding_rows:
        return used, f"the first of {embedding_rows - used} rows of the embedding beyond the tokenizer's {used} tokens"
    template = str(tokenizer.chat_template)
    taken = {
        *eos_token_ids,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    }
    free = [
        (RESERVED.search(token.content) is None, index, token.content)
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in taken and index < embedding_rows and token.content not in template
    ]
    if not free:
        return None, "every row of the embedding has a token, and no special token is unused: set drafter.mask_token"
    _, index, content = min(free)
    return index, f"the special token {content}, which neither begins, ends nor pads a text nor is in the chat template"
