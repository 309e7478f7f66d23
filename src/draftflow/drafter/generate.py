"""Greedy speculative decoding with a drafter, and plain greedy decoding to hold it against. One sequence at a time.

Each round drafts a block after the last token, lets the target judge all proposals in one forward, keeps the longest
prefix of proposals that the target would have chosen itself, and adds the target's own next token. So the tokens are
the target's greedy tokens whatever the drafter proposes.

That holds in exact arithmetic. In floating point the target's logits for a token depend a little on how many tokens its
forward covers, since matrix products of different shapes sum in different orders. Where the two best logits are closer
than that (about 1e-5 in fp32, 1e-1 in bf16), verification of a block and one-token decoding may choose differently, and
all later tokens differ. `margin_at` tells such a near tie from an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from draftflow.drafter.model import Drafter

if TYPE_CHECKING:
    from draftflow.target.load import Target


@dataclass(frozen=True)
class Generation:
    """What speculative decoding did with one prompt.

    Args:
        tokens: new tokens, a stop token included.
        acceptance_lengths: tokens that each block added: accepted proposals and the target's one, cut at a stop token
            and at max_new_tokens. The first new token comes with the prefill and belongs to no block.
        proposed_by_position: for position 1 .. block_size - 1, the blocks that proposed a token there, positions after
            an accepted stop token left out.
        accepted_by_position: of these, the blocks in which it and all proposals before it were accepted.
    """

    tokens: list[int]
    acceptance_lengths: list[int]
    proposed_by_position: list[int]
    accepted_by_position: list[int]


@torch.inference_mode()
def generate(
    drafter: Drafter, target: "Target", prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Generation:
    """Greedy speculative decoding of one prompt, in the dtype of the target.

    Args:
        drafter: on the device of the target.
        target: with `model`, `embed_weight` and `head_weight`.
        prompt_ids: at least one token.
        max_new_tokens: at least 1.
        stop_ids: tokens that end the generation.
    """
    device, shape = target.embed_weight.device, drafter.shape
    target_cache, drafter_cache = _new_cache(target), drafter.new_cache()
    stop, end = set(stop_ids), len(prompt_ids) + max_new_tokens
    ids = list(prompt_ids)
    lengths: list[int] = []
    proposed, accepted = [0] * (shape.block_size - 1), [0] * (shape.block_size - 1)

    choices, features = _forward(target, ids, 0, target_cache, shape.target_layer_ids)
    ids.append(choices[-1])
    while len(ids) < end and ids[-1] not in stop:
        # [known 0 .. anchor-1 | anchor, proposals]: features of the first part are all with the drafter after this
        anchor = len(ids) - 1
        size = min(shape.block_size, end - anchor)
        block = torch.tensor([[ids[anchor]] + [shape.mask_token_id] * (size - 1)], device=device)
        positions = torch.arange(anchor - features.shape[1], anchor + size, device=device)[None]
        hidden = drafter.draft(features, F.embedding(block, target.embed_weight), positions, drafter_cache)
        proposals = F.linear(hidden[:, 1:], target.head_weight).argmax(dim=-1)[0].tolist()

        choices, features = _forward(target, [ids[anchor], *proposals], anchor, target_cache, shape.target_layer_ids)
        matches = next((k for k in range(size - 1) if proposals[k] != choices[k]), size - 1)
        new = choices[: min(matches + 1, end - len(ids))]  # the accepted proposals are the target's choices
        new = new[: next((k + 1 for k, token in enumerate(new) if token in stop), len(new))]

        for k in range(len(new) if len(new) <= matches else size - 1):
            proposed[k] += 1
            accepted[k] += k < matches
        lengths.append(len(new))
        ids += new
        # the last new token is the next anchor: neither cache may hold it or what was rejected
        target_cache.crop(len(new) - size)
        features = features[:, : len(new)]
    return Generation(ids[len(prompt_ids) :], lengths, proposed, accepted)


@torch.inference_mode()
def greedy(target: "Target", prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """Plain greedy decoding, one token a forward: the new tokens, a stop token included."""
    cache, stop = _new_cache(target), set(stop_ids)
    ids, known = list(prompt_ids), 0
    while len(ids) < len(prompt_ids) + max_new_tokens and (known == 0 or ids[-1] not in stop):
        choices, _ = _forward(target, ids[known:], known, cache, ())
        known = len(ids)
        ids.append(choices[-1])
    return ids[len(prompt_ids) :]


@torch.inference_mode()
def margin_at(target: "Target", prompt_ids: Sequence[int], tokens: Sequence[int], index: int) -> float:
    """By how much the target prefers its best token to its second best where it chooses `tokens[index]`, in logits."""
    ids = torch.tensor([[*prompt_ids, *tokens[:index]]], device=target.embed_weight.device)
    best, second = target.model(ids, logits_to_keep=1).logits[0, -1].float().topk(2).values.tolist()
    return best - second


def _new_cache(target: "Target") -> DynamicCache:
    cache = DynamicCache(config=target.model.config)
    cache.activate_past_recording()  # layers with a sliding window can be cropped only then
    return cache


def _forward(
    target: "Target", ids: Sequence[int], start: int, cache: DynamicCache, taps: Sequence[int]
) -> tuple[list[int], Tensor | Any]:
    """Run the target on `ids` at positions from `start` on.

    Returns:
        its choice after each of `ids`, after the last alone for a prompt, and the tapped features
        [1, len(ids), len(taps) * H] (hidden state i + 1 is the output of layer i).
    """
    device = target.embed_weight.device
    output = target.model(
        torch.tensor([list(ids)], device=device),
        position_ids=torch.arange(start, start + len(ids), device=device)[None],
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=len(taps) > 0,
        logits_to_keep=1 if start == 0 else 0,  # 0 keeps all
    )
    features = torch.cat([output.hidden_states[i + 1] for i in taps], dim=-1) if taps else None
    return output.logits[0].argmax(dim=-1).tolist(), features
