"""Does a draft block see what it must not? Measured on the trained drafter, on a held-out row.

A block may see the context features of its own document before its anchor, its anchor's token, and nothing else. So for
a few blocks everything else is changed: features at and after the anchor and of other documents, and every token but
the anchor. The block's output must stay. And where a feature that it may see is changed, its output must change:
otherwise the first finding would say nothing.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from draftflow.checks.result import Check
from draftflow.drafter.anchors import Anchors, block_inputs, sample_anchors
from draftflow.drafter.mask import allowed, block_mask
from draftflow.drafter.model import Drafter

LIMIT = 1e-6  # of the output's largest value; masked weights are exactly 0, so that the rest is rounding
BLOCKS = 4

Visibility = Callable[[Anchors, Tensor, int], BlockMask | Tensor]


@torch.no_grad()
def leak(
    drafter: Drafter,
    embed_weight: Tensor,
    features: Tensor,
    row: dict[str, Tensor],
    visibility: Visibility,
    seed: int = 0,
) -> tuple[float, int, int]:
    """How much of the output of a few blocks depends on what they must not see.

    Args:
        drafter: in fp32, on the device of the rest.
        embed_weight: [V, H], the target's embedding.
        features: [S, taps * H] of the row.
        row: `input_ids`, `document_ids`, `position_ids` and `loss_mask`, [S] each.
        visibility: the mask of training, `mask.allowed` or `mask.block_mask`.
        seed: of the anchors and of what is put in place of the features and tokens.

    Returns:
        largest change of a block's output over the largest output; how many blocks do not react to the feature just
        before their anchor; and how many blocks were tried.
    """
    generator = torch.Generator().manual_seed(seed)
    device, size = features.device, drafter.shape.block_size
    anchors = sample_anchors(row["loss_mask"].cpu()[None], row["document_ids"].cpu()[None], BLOCKS, generator)
    blocks = int(anchors.valid.sum())  # the valid ones come first
    at = anchors.positions[0, :blocks, None].to(device)  # [blocks, 1]
    anchors = Anchors(*(part.expand(blocks, -1) for part in anchors)).to(device)
    ids, documents, positions = (
        row[name].to(device).long().expand(blocks, -1) for name in ("input_ids", "document_ids", "position_ids")
    )
    index, each = torch.arange(ids.shape[1], device=device), torch.arange(blocks, device=device)
    visible = (documents == documents.gather(1, at)) & (index < at)  # [blocks, S]
    features = features.expand(blocks, -1, -1)
    noise = torch.randn(features.shape, generator=generator).to(device) * features.std()
    random_ids = torch.randint(embed_weight.shape[0], ids.shape, generator=generator).to(device)
    mask = visibility(anchors, documents, size)

    def own_output(features: Tensor, ids: Tensor) -> Tensor:
        """[blocks, size, H]: of copy j of the row, the output of block j."""
        tokens, block_positions = block_inputs(ids, positions, anchors, size, drafter.shape.mask_token_id)
        hidden = drafter(features, F.embedding(tokens, embed_weight), positions, block_positions, mask)
        return hidden.unflatten(1, (-1, size))[each, each]

    before = own_output(features, ids)
    hidden_changed = own_output(
        torch.where(visible[:, :, None], features, noise), torch.where(index == at, ids, random_ids)
    )
    seen_changed = own_output(torch.where((index == at - 1)[:, :, None], noise, features), ids)
    scale = before.abs().max()
    largest = ((hidden_changed - before).abs().max() / scale).item()
    reactions = (seen_changed - before).abs().amax(dim=(1, 2)) / scale
    return largest, int((reactions <= LIMIT).sum()), blocks


def mask_checks(
    drafter: Drafter,
    embed_weight: Tensor,
    features: Tensor,
    row: dict[str, Tensor],
    visibility: Visibility | None = None,
) -> list[Check]:
    """Two findings: nothing leaks, and what a block may see reaches it. Arguments as of `leak`."""
    if visibility is None:
        visibility = block_mask if features.is_cuda else allowed
    largest, deaf, blocks = leak(drafter, embed_weight, features, row, visibility)
    return [
        Check(
            "mask_leak",
            blocks > 0 and largest <= LIMIT,
            largest,
            f"<= {LIMIT:g} of the output",
            f"Change of the output of {blocks} draft blocks when everything that they must not see is changed.",
            "drafter/mask.py and the labels of the training step",
        ),
        Check(
            "mask_reach",
            blocks > 0 and deaf == 0,
            deaf,
            "0 blocks",
            f"Of {blocks} draft blocks, those whose output does not react to the feature just before their anchor.",
            "drafter/mask.py, and fc and hidden_norm of the drafter",
        ),
    ]
