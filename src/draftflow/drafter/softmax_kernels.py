"""Triton kernels for the softmax of the loss, over logits [rows, V] that exist once, in the precision of the products.

Per row with logits x, label y, weight w:

    statistics   lse = log sum_v exp(x_v),  ce = lse - x_y,  correct = (x_y = max_v x_v)       reads the logits
    gradient     x_v <- w (exp(x_v - lse) - [v = y])                                           reads and writes them
    divergence   kl = sum_v p_v (log p_v - log q_v),  x_v <- w (q_v - p_v)                     reads both, writes one

with p the softmax of the target's logits and q that of x. In bf16 the cross-entropy thus moves 6 bytes per logit,
beside the 2 that the product writes and the 2 that the next one reads. Everything is computed in fp32. A row belongs to
one program, so sums do not depend on the number of rows, and no argument that changes from batch to batch is one that
Triton compiles for.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a row at a time
# Triton compiles for how a pointer is aligned, and parts of these begin anywhere.
PER_ROW = ["labels", "lse", "teacher_lse", "ce", "correct", "weights", "kl"]
LOWEST = tl.constexpr(-3.0e38)  # stands for minus infinity, whose difference to itself is not a number


@triton.jit(do_not_specialize=PER_ROW)
def draftflow_softmax_statistics(logits, labels, lse, ce, correct, vocabulary: tl.constexpr, size: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    largest, total = LOWEST, 0.0
    for start in range(0, vocabulary, size):
        column = start + tl.arange(0, size)
        x = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    of_label = tl.load(logits + tl.load(labels + row)).to(tl.float32)
    log_sum = largest + tl.log(total)
    tl.store(lse + row, log_sum)
    tl.store(ce + row, log_sum - of_label)
    tl.store(correct + row, of_label >= largest)


@triton.jit(do_not_specialize=PER_ROW)
def draftflow_softmax_gradient(logits, labels, lse, weights, vocabulary: tl.constexpr, size: tl.constexpr):
    tiles: tl.constexpr = (vocabulary + size - 1) // size
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * size + tl.arange(0, size)
    inside = column < vocabulary
    logits += row * vocabulary
    x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.exp(x - tl.load(lse + row)) - (column == tl.load(labels + row))
    gradient *= tl.load(weights + row)
    tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=PER_ROW)
def draftflow_softmax_divergence(
    logits, teacher, lse, teacher_lse, weights, kl, vocabulary: tl.constexpr, write: tl.constexpr, size: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    teacher += row * vocabulary
    log_sum, teacher_log_sum, weight = tl.load(lse + row), tl.load(teacher_lse + row), tl.load(weights + row)
    total = 0.0
    for start in range(0, vocabulary, size):
        column = start + tl.arange(0, size)
        inside = column < vocabulary
        log_q = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32) - log_sum
        log_p = tl.load(teacher + column, mask=inside, other=0.0).to(tl.float32) - teacher_log_sum
        p = tl.exp(log_p)
        total += tl.sum(tl.where(inside, p * (log_p - log_q), 0.0), axis=0)
        if write:
            gradient = weight * (tl.exp(log_q) - p)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(kl + row, total)


def statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `loss.statistics`."""
    rows, vocabulary = logits.shape
    lse = torch.empty(rows, device=logits.device)
    ce, correct = torch.empty_like(lse), torch.empty(rows, dtype=torch.bool, device=logits.device)
    grid = (rows,)
    draftflow_softmax_statistics[grid](logits, labels, lse, ce, correct, vocabulary, size=BLOCK, num_warps=8)
    return lse, ce, correct


def gradient_(logits: Tensor, lse: Tensor, labels: Tensor, weights: Tensor) -> None:
    """As `loss.gradient_`."""
    rows, vocabulary = logits.shape
    grid = (rows * triton.cdiv(vocabulary, BLOCK),)
    draftflow_softmax_gradient[grid](logits, labels, lse, weights, vocabulary, size=BLOCK, num_warps=8)


def divergence_(
    logits: Tensor, teacher: Tensor, lse: Tensor, teacher_lse: Tensor, weights: Tensor, write: bool
) -> Tensor:
    """As `loss.divergence_`."""
    rows, vocabulary = logits.shape
    kl = torch.empty(rows, device=logits.device)
    arguments = (logits, teacher, lse, teacher_lse, weights, kl, vocabulary)
    draftflow_softmax_divergence[(rows,)](*arguments, write=write, size=BLOCK, num_warps=8)
    return kl
