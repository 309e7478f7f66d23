"""The loss of DFlash: weighted cross-entropy of the block's proposals, through the target's frozen head.

    L = sum_jk m_jk w_k CE(logits_jk, x_{a_j + k}) / sum_jk m_jk w_k ,   w_k = exp(-(k - 1) / gamma), k >= 1

(arXiv 2602.06036, equation 4): position k of block j predicts the token at its own position, m says where.

Logits [M, V] are far larger than anything else in the step: 4,096 rows of a vocabulary of 152k take 2.5 GB in fp32. So
they are made in chunks of rows, and since the head is frozen and the loss is the last thing in the graph, the
gradient of the hidden states is made in the same pass, from the same softmax:

    d(w CE)/dh = w (softmax(h W^T) - onehot(label)) W

Per chunk: one product to the logits, one softmax in place, one product back. Saved for backward: [M, H]. A separate
forward and backward pass would compute the logits twice or keep them.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from draftflow.drafter.anchors import Anchors


def default_gamma(block_size: int) -> float:
    """Decay of the loss weights: 4, 5 and 7 at block size 8, 10 and 16 (arXiv 2602.06036), linear between."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def loss_weights(block_size: int, gamma: float) -> Tensor:
    """w_k of each position of a block, [block_size] fp32; 0 for the anchor."""
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float32) - 1) / gamma)
    weights[0] = 0.0
    return weights


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


def linear_cross_entropy(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the cross-entropies of hidden states under a frozen head, with their gradient in one pass.

    Args:
        hidden: [M, H].
        head_weight: [V, H], dtype of `hidden`; gets no gradient.
        labels: [M] int64, in the vocabulary also where the weight is 0.
        weights: [M] fp32.
        chunk: rows whose logits exist at a time; chunk * V * 4 bytes of memory (6 in bf16).

    Returns:
        loss_sum: scalar fp32, sum of weights * ce; differentiable once, in `hidden`.
        correct: [M] bool, no token is more probable than the label.
        ce: [M] fp32, nats, not differentiable; softmax in fp32, so at most 87.3 (the smallest normal number).
    """
    return _LinearCrossEntropy.apply(hidden, head_weight, labels, weights, chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head_weight, labels, weights, chunk):  # type: ignore[override]
        rows = hidden.shape[0]
        chunk = max(1, min(chunk, rows))
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # one buffer for all chunks: memory that the allocator returns to the system comes back page by page
        logits = hidden.new_empty(chunk, head_weight.shape[0])
        probabilities = logits if hidden.dtype == wide else torch.empty_like(logits, dtype=wide)
        ce, correct = hidden.new_empty(rows, dtype=wide), hidden.new_empty(rows, dtype=torch.bool)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            label = labels[part, None]
            p = probabilities[: label.shape[0]]
            torch.mm(hidden[part], head_weight.T, out=logits[: label.shape[0]])
            torch.softmax(logits[: label.shape[0]], dim=-1, dtype=wide, out=p)
            of_label = p.gather(1, label)
            ce[part] = -of_label.clamp(min=torch.finfo(wide).tiny).log().squeeze(1)
            correct[part] = (of_label >= p.amax(dim=1, keepdim=True)).squeeze(1)
            if gradient is not None:
                p.scatter_add_(1, label, torch.full_like(of_label, -1.0))
                torch.mm(p.to(hidden.dtype), head_weight, out=gradient[part])
                gradient[part] *= weights[part, None]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct, ce)
        return (ce * weights).sum(), correct, ce

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor, *_: Tensor):  # type: ignore[override]
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        # in fp32: 1 / sum(weights), rounded to bf16, would scale the whole gradient
        return (gradient.to(grad_loss.dtype) * grad_loss).to(gradient.dtype), None, None, None, None
