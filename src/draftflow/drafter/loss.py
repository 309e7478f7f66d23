"""The loss of DFlash: what the block's proposals cost, through the target's frozen head.

    L = sum_jk m_jk w_k l_jk / normalizer

Position k >= 1 of block j predicts the token at its own position, m says where. Three kinds:

    decay   l = CE, w_k = exp(-(k - 1) / gamma), over the sum of m w               (arXiv 2602.06036, equation 4)
    dpace   l = CE, w_k = sum_{i >= k} prod_{h <= i} ((1 - alpha) q_h + alpha), q = exp(-CE) without gradient,
            over the number of blocks: w is what a hit at k adds to the expected acceptance length, and dividing by
            its sum would cancel that                                               (arXiv 2605.18810, equations 7, 8)
    kl      l = KL(target's distribution at the position || drafter's), w and normalizer of decay

Logits [M, V] are far larger than anything else in the step: 4,096 rows of a vocabulary of 152k take 1.2 GB in bf16. So
they are made in chunks of rows, and since the head is frozen and the loss is the last thing in the graph, the
gradient of the hidden states is made in the same pass, from the same softmax:

    d(w CE)/dh = w (softmax(h W^T) - onehot(label)) W
    d(w KL)/dh = w (softmax(h W^T) - p) W

Per chunk: one product to the logits, one look at them, one pass that puts their gradient in their place, one product
back. Saved for backward: [M, H]. A separate forward and backward pass would compute the logits twice or keep them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from draftflow.drafter import softmax
from draftflow.drafter.anchors import Anchors


@dataclass(frozen=True)
class Objective:
    """Which loss, and its constants.

    Attributes:
        kind: `decay`, `dpace` or `kl`.
        gamma: of the decay.
        alpha: of dpace: 0 weighs by the drafter's own confidence alone, 1 gives every position the number of those
            that follow.
    """

    kind: Literal["decay", "dpace", "kl"]
    gamma: float
    alpha: float = 0.5


def default_gamma(block_size: int) -> float:
    """Decay of the loss weights: 4, 5 and 7 at block size 8, 10 and 16 (arXiv 2602.06036), linear between."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def loss_weights(block_size: int, gamma: float) -> Tensor:
    """w_k of each position of a block, [block_size] fp32; 0 for the anchor."""
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float32) - 1) / gamma)
    weights[0] = 0.0
    return weights


@dataclass(frozen=True)
class Dpace:
    """Arguments of `dpace_weights` for all rows.

    Attributes:
        offsets: [M] integer, k of each row.
    """

    offsets: Tensor
    alpha: float
    block_size: int


def block_targets(
    input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor, anchors: Anchors, block_size: int
) -> tuple[Tensor, Tensor]:
    """What each position of each block shall predict, and where it is supervised.

    Supervision of a block stops at the end of the row, of the document, and at the first token that the target did not
    write: at inference a block never goes on beyond such a token.

    Args:
        input_ids, document_ids: [B, S] integer.
        loss_mask: [B, S], nonzero at supervised tokens.

    Returns:
        labels [B, N, block_size] int64, 0 where unsupervised, and supervised [B, N, block_size] bool.
    """
    length = input_ids.shape[1]
    index = anchors.positions[:, :, None] + torch.arange(block_size, device=input_ids.device)  # [B, N, block_size]
    inside = index < length
    index = index.clamp(max=length - 1).flatten(1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, index).view_as(inside)

    documents = at(document_ids)
    open_so_far = inside & (documents == documents[:, :, :1]) & at(loss_mask).bool() & anchors.valid[:, :, None]
    open_so_far[:, :, 0] = anchors.valid
    supervised = open_so_far.cumprod(dim=-1).bool()
    supervised[:, :, 0] = False
    return at(input_ids).long().masked_fill(~supervised, 0), supervised


def dpace_weights(ce: Tensor, offsets: Tensor, alpha: float, block_size: int) -> Tensor:
    """w_k of D-PACE (see above).

    Args:
        ce: [M] nats, of whole blocks.
        offsets: [M] integer, k of each row: blocks one after the other, k = 1, 2, .. without a gap in each.
        alpha: in (0, 1].
        block_size: more than any k.

    Returns:
        [M] in the dtype of `ce`.
    """
    place = ((offsets == 1).cumsum(0) - 1, offsets - 1)
    blocks = ce.new_zeros(len(ce), block_size - 1)  # as many as there can be: how many there are, no host knows
    supervised = blocks.index_put(place, torch.ones_like(ce))
    confidence = blocks.index_put(place, (1 - alpha) * torch.exp(-ce) + alpha)
    accepted = confidence.cumprod(1) * supervised
    return accepted.flip(1).cumsum(1).flip(1)[place]


def even_chunks(rows: int, size: int) -> tuple[int, ...]:
    """Boundaries of chunks of `size` rows, from 0 to `rows`."""
    return (*range(0, rows, size), rows)


def head_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    chunks: Sequence[int],
    dpace: Dpace | None = None,
    teacher: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the losses of hidden states under a frozen head, differentiable once, in `hidden`.

    Args: as of `head_loss_and_gradient`.

    Returns:
        loss_sum, correct and losses, as there; correct and losses are not differentiable.
    """
    return _HeadLoss.apply(hidden, head_weight, labels, weights, chunks, dpace, teacher)


@torch.no_grad()
def head_loss_and_gradient(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    chunks: Sequence[int],
    dpace: Dpace | None = None,
    teacher: Tensor | None = None,
    differentiate: bool = True,
    capacity: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Weighted sum of the losses of hidden states under a frozen head, and its gradient, in one pass.

    Args:
        hidden: [M, H].
        head_weight: [V, H], dtype of `hidden`; gets no gradient.
        labels: [M] int64, in the vocabulary also where the weight is 0.
        weights: [M] fp32; with `dpace`, factors of its weights.
        chunks: boundaries of the rows whose logits exist at a time, from 0 to M, as of `even_chunks`; with `dpace`
            they do not cut a block. A chunk of n rows takes n * V numbers in the dtype of `hidden`, twice with
            `teacher`.
        dpace: weigh by the drafter's own confidence.
        teacher: [M, H], hidden states from which the head reads the target's distribution at the place of each row:
            the loss is the divergence from that, and not the cross-entropy.
        differentiate: make the gradient.
        capacity: rows for which memory is taken, if chunks have fewer: of one size, it is always found again.

    Returns:
        loss_sum: scalar fp32, sum of weights * loss.
        correct: [M] bool, no token is more probable than the label.
        losses: [M] fp32, nats.
        gradient: [M, H], of loss_sum, in the dtype of `hidden`; None if it is not asked for.
    """
    parts = _parts(hidden)
    rows, most = hidden.shape[0], max((end - start for start, end in pairwise(chunks)), default=0)
    most = max(most, capacity)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    # one buffer for all chunks: memory that the allocator returns to the system comes back page by page
    buffer = hidden.new_empty(most, head_weight.shape[0])
    teacher_buffer = torch.empty_like(buffer) if teacher is not None else buffer
    losses, correct = hidden.new_empty(rows, dtype=wide), hidden.new_empty(rows, dtype=torch.bool)
    weights = weights.to(wide).clone() if dpace is not None else weights.to(wide)
    gradient = torch.empty_like(hidden) if differentiate else None
    for start, end in pairwise(chunks):
        part = slice(start, end)
        logits = buffer[: end - start]
        torch.mm(hidden[part], head_weight.T, out=logits)
        lse, losses[part], correct[part] = parts.statistics(logits, labels[part])
        if dpace is not None:
            weights[part] *= dpace_weights(losses[part], dpace.offsets[part], dpace.alpha, dpace.block_size)
        if teacher is not None:
            of_teacher = teacher_buffer[: end - start]
            torch.mm(teacher[part], head_weight.T, out=of_teacher)
            teacher_lse, _, _ = parts.statistics(of_teacher, labels[part])
            losses[part] = parts.divergence_(logits, of_teacher, lse, teacher_lse, weights[part], differentiate)
        elif differentiate:
            parts.gradient_(logits, lse, labels[part], weights[part])
        if gradient is not None:
            torch.mm(logits, head_weight, out=gradient[part])
    return (losses * weights).sum(), correct, losses, gradient


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head_weight, labels, weights, chunks, dpace, teacher):  # type: ignore[override]
        arguments = (hidden, head_weight, labels, weights, chunks, dpace, teacher)
        loss, correct, losses, gradient = head_loss_and_gradient(*arguments, ctx.needs_input_grad[0])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct, losses)
        return loss, correct, losses

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor, *_: Tensor):  # type: ignore[override]
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        # in fp32: 1 / sum(weights), rounded to bf16, would scale the whole gradient
        return (gradient.to(grad_loss.dtype) * grad_loss).to(gradient.dtype), *[None] * 6


def _parts(hidden: Tensor) -> ModuleType:
    """`statistics`, `gradient_` and `divergence_` for the device: kernels on GPUs, plain torch elsewhere."""
    if hidden.is_cuda:
        from draftflow.drafter import softmax_kernels  # needs Triton

        return softmax_kernels
    return softmax
