"""Does a draft block see what it must not? Measured on the trained drafter, on a held-out row.

A block may see the context features of its own document before its anchor, its anchor's token, and nothing else. So for
a few blocks everything else is changed: features at and after the anchor and of other documents, and every token but
the anchor. The block's proposals must stay. And where a feature that it may see is changed, its output must change:
otherwise the first finding would say nothing.

Sliding layers see less: of the context what lies in the window of the block's first row, and of the block, where they
are causal, no later row: when the last row takes another position, and with it another key, the rows before must stay.
A full layer beside them hides that from the output, so that their mask is looked at a second time, alone: what the
attention of full layers finds is left out. Every layer keeps its mask and with it the compiled code of training.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftflow.checks.result import Check
from draftflow.drafter.anchors import Anchors, block_inputs, sample_anchors
from draftflow.drafter.mask import Mask, kinds_of, layer_masks
from draftflow.drafter.model import Drafter

LIMIT = 1e-6  # of the output's largest value; masked weights are exactly 0, so that the rest is rounding
BLOCKS = 4
MOVED = 7  # tokens

Visibility = Callable[..., Mask]


@torch.no_grad()
def leak(
    drafter: Drafter,
    embed_weight: Tensor,
    features: Tensor,
    row: dict[str, Tensor],
    visibility: Visibility | None = None,
    batch: tuple[int, int] = (BLOCKS, BLOCKS),
    seed: int = 0,
    sliding_alone: bool = False,
) -> tuple[float, int, int]:
    """How much of the output of a few blocks depends on what they must not see.

    Args:
        drafter: on the device of the rest.
        embed_weight: [V, H], the target's embedding.
        features: [S, taps * H] of the row, in the precision of the computation.
        row: `input_ids`, `document_ids`, `position_ids` and `loss_mask`, [S] each.
        visibility: called as `mask.allowed` or `mask.block_mask` for the mask of the full layers, and with their kind
            for that of the sliding layers; None: the masks of training.
        batch: rows, and anchors per row, that the drafter is given at a time. With those of the plan, compiled layers
            run the code of training.
        seed: of the anchors and of what is put in place of the features and tokens.
        sliding_alone: leave out what the attention of full layers finds.

    Returns:
        largest change of a block's proposals over the largest output; how many blocks do not react to the feature just
        before their anchor; and how many blocks were tried.
    """
    generator = torch.Generator().manual_seed(seed)
    device, size = features.device, drafter.shape.block_size
    rows, slots = batch
    anchors = sample_anchors(row["loss_mask"].cpu()[None], row["document_ids"].cpu()[None], slots, generator)
    valid = int(anchors.valid.sum())  # the valid ones come first
    if not valid:
        return 0.0, 0, 0
    # blocks of the whole row, as many copies of it, in whole batches
    chosen = torch.linspace(0, valid - 1, min(BLOCKS, valid)).long()
    blocks = len(chosen)
    each = torch.cat([chosen, chosen[:1].expand(-blocks % rows)]).to(device)
    copies = len(each)
    anchors = anchors.to(device)
    at = anchors.positions[0, each, None]  # [copies, 1]
    batch_anchors = Anchors(*(part.expand(rows, -1) for part in anchors))
    ids, documents, positions = (
        row[name].to(device).long().expand(copies, -1) for name in ("input_ids", "document_ids", "position_ids")
    )
    index = torch.arange(ids.shape[1], device=device)
    full, sliding = kinds_of(drafter.shape)
    kind = full if full is not None and not sliding_alone else sliding  # what bounds the output
    assert kind is not None
    visible = (documents == documents.gather(1, at)) & (index < at)  # [copies, S]
    if kind.window is not None:
        # of the first row that reaches a proposal: slot 0 does through a second layer
        visible &= index > at + (len(drafter.shape.sliding_layers) == 1) - kind.window
    features = features.expand(copies, -1, -1)
    noise = (torch.randn(features.shape, generator=generator).to(device) * features.std()).to(features.dtype)
    random_ids = torch.randint(embed_weight.shape[0], ids.shape, generator=generator).to(device)
    if visibility is None:
        masks: tuple[Mask | None, Mask | None] = layer_masks(
            batch_anchors, documents[:rows], drafter.shape, features.dtype
        )
    else:
        masks = (
            None if full is None else visibility(batch_anchors, documents[:rows], size),
            None if sliding is None else visibility(batch_anchors, documents[:rows], size, sliding),
        )
    silent = [layer for number, layer in enumerate(drafter.layers) if number not in drafter.shape.sliding_layers]

    def own_output(features: Tensor, ids: Tensor, moved: int = 0) -> Tensor:
        """[copies, size - 1, H]: of copy j of the row, the output of its block, whose last row is moved by so much."""
        outputs = []
        for part in torch.arange(copies, device=device).split(rows):
            where = positions[part]
            tokens, block_positions = block_inputs(ids[part], where, batch_anchors, size)
            block_positions[:, size - 1 :: size] += moved
            embeddings = F.embedding(tokens, embed_weight), embed_weight[drafter.shape.mask_token_id]
            hidden = drafter(features[part], *embeddings, where, block_positions, *masks)
            outputs.append(hidden.unflatten(1, (-1, size - 1))[torch.arange(rows, device=device), each[part]].float())
        return torch.cat(outputs)

    with _silenced(silent if sliding_alone else []):
        before = own_output(features, ids)
        hidden_changed = own_output(
            torch.where(visible[:, :, None], features, noise), torch.where(index == at, ids, random_ids)
        )
        seen_changed = own_output(torch.where((index == at - 1)[:, :, None], noise, features), ids)
        changes = (hidden_changed - before).abs().max()
        if kind.causal and size > 2:  # or no proposal comes before the last
            earlier_rows = (own_output(features, ids, moved=MOVED) - before)[:, :-1]
            changes = torch.maximum(changes, earlier_rows.abs().max())
    scale = before.abs().max()
    largest = (changes / scale).item()
    reactions = (seen_changed - before)[:blocks].abs().amax(dim=(1, 2)) / scale
    return largest, int((reactions <= LIMIT).sum()), blocks


@contextlib.contextmanager
def _silenced(layers: Sequence[nn.Module]) -> Iterator[None]:
    """While this holds, what the attention of these layers finds goes nowhere."""
    weights = [layer.get_parameter("self_attn.o_proj.weight") for layer in layers]
    kept = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            weight.zero_()
        yield
    finally:
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)


def mask_checks(
    drafter: Drafter,
    embed_weight: Tensor,
    features: Tensor,
    row: dict[str, Tensor],
    visibility: Visibility | None = None,
    batch: tuple[int, int] = (BLOCKS, BLOCKS),
) -> list[Check]:
    """Two findings: nothing leaks, and what a block may see reaches it. Arguments as of `leak`.

    A drafter with both kinds of layers has two more, of the mask of the sliding ones.
    """
    arguments = (drafter, embed_weight, features, row, visibility, batch)
    found = _findings(leak(*arguments))
    if None not in kinds_of(drafter.shape):
        found += _findings(
            leak(*arguments, sliding_alone=True), "_sliding", ", with the attention of full layers left out"
        )
    return found


def _findings(measured: tuple[float, int, int], suffix: str = "", how: str = "") -> list[Check]:
    largest, deaf, blocks = measured
    return [
        Check(
            f"mask_leak{suffix}",
            blocks > 0 and largest <= LIMIT,
            largest,
            f"<= {LIMIT:g} of the output",
            f"Change of the output of {blocks} draft blocks when everything that they must not see is changed{how}.",
            "drafter/mask.py and the labels of the training step",
        ),
        Check(
            f"mask_reach{suffix}",
            blocks > 0 and deaf == 0,
            deaf,
            "0 blocks",
            f"Of {blocks} draft blocks, those that do not react to the feature just before their anchor{how}.",
            "drafter/mask.py, and fc and hidden_norm of the drafter",
        ),
    ]
