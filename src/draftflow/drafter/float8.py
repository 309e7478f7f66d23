"""Matrix products of a linear layer in float8, forward and backward, with scales that are found as the values come.

    y = x W^T,   dX = g W,   dW = g^T x        x [rows, in], W [out, in], g and y [rows, out]

Each row of an operand is divided by a scale of its own and rounded to e4m3 (3 bits of mantissa, of 2^17 in range). A
scale stands on a dimension over which the product does not sum, so that it is applied to the result, in what the
compiler makes of the operations that follow; where it would be summed over, it is multiplied into the other operand
before that is rounded: W's into g for dX, x's into g for dW. Scales are powers of two. So all of this is exact, every
rounding is the one to float8 or the one to the dtype of the result, and the products themselves are those of whole
tensors without scales of rows, which are the fastest.

    a scale per row, not per tensor: what a draft block finds does not depend, not even in its rounding, on what else is
        in the batch (checks/mask.py would find it). Nor do the few tokens of a target with features a thousand times as
        large as the others' leave these no bits. And the largest value of a row is found in the pass that makes the
        row, a norm or an activation, while that of a tensor is another pass over it.
    dW sums over the tokens: one scale serves them all there, so that g, times the scales of x, is rounded to e5m2,
        which has 2^31 in range for 2 bits of mantissa.
    accumulation: the fast kind of Hopper's tensor cores keeps some 14 bits. That is much finer than float8, but over
        thousands of tokens it cuts off what is small beside the sum; gradients take the exact kind.

A GPU multiplies float8 only where both operands lie along the dimension that is summed over. So W is transposed for dX,
g and x for dW: three copies of a byte per element, and what is needed for the backward is kept in float8. That
dimension has to be a multiple of 16, as do the columns of the result: for dW rows of zeros are added while the copies
are made.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# of the sides of a weight
MULTIPLE = 16

# What is rounded is brought to [2^7, 2^8) at its largest: e4m3 ends at 448
LARGEST_EXPONENT = 7
EXPONENT_BITS = 0x7F800000  # of fp32; alone they are the power of two below or at a positive number


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float8, with its gradients in float8.

    Args:
        x: [.., in], bf16 or fp32.
        weight: [out, in], of that dtype; both sides are multiples of 16.

    Returns:
        [.., out], in the dtype of `x`.
    """
    return torch.ops.draftflow.float8_linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scales = round_rows(x.float())
        weight8, weight_scales = round_rows(weight.float())
        ctx.save_for_backward(x8, x_scales, weight8, weight_scales)
        y = _product(x8, weight8, x.dtype, fast=True)
        return (y * x_scales * weight_scales.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor]:
        x8, x_scales, weight8, weight_scales = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            g8, g_scales = round_rows(g.float() * weight_scales.t())
            of_x = _product(g8, weight8.t().contiguous(), g.dtype)
            of_x = (of_x * g_scales).to(g.dtype)
        g_weighted = g.float() * x_scales
        scale = scale_for(g_weighted.abs().amax(-1).amax())  # a row at a time first, as above
        g8 = (g_weighted / scale).to(torch.float8_e5m2)
        return of_x, _product(_transposed(g8), _transposed(x8), g.dtype, scale)


def scale_for(largest: Tensor) -> Tensor:
    """The power of two by which values up to `largest` (fp32) are divided before they are rounded to float8.

    Not 0 where the values are. Where one of them is not finite, the scale is not, and the result is no number.
    """
    power = (largest.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return power.clamp(min=2.0**-100) * 2.0**-LARGEST_EXPONENT


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, k] in fp32 -> the rows in e4m3, and what they were divided by, [n, 1] in fp32."""
    scales = scale_for(x.abs().amax(-1, keepdim=True))
    return (x / scales).to(torch.float8_e4m3fn), scales


def _transposed(x8: Tensor) -> Tensor:
    """[rows, k] -> [k, rows], with zeros up to the next multiple of 16 rows."""
    missing = -len(x8) % MULTIPLE
    if not missing:
        return x8.t().contiguous()
    return F.pad(x8.float(), (0, 0, 0, missing)).to(x8.dtype).t().contiguous()


_library = torch.library.Library("draftflow", "FRAGMENT")
_library.define("float8_linear(Tensor x, Tensor weight) -> Tensor")
_library.impl("float8_linear", _Linear.apply, "CompositeImplicitAutograd")


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, scale: Tensor | None = None, fast: bool = False) -> Tensor:
    """a b^T * scale, of a [n, k] and b [m, k] in float8."""
    one = torch.ones((), device=a.device)
    # the public torch.nn.functional.scaled_mm is not compiled by Inductor
    return torch._scaled_mm(a, b.t(), one if scale is None else scale, one, out_dtype=dtype, use_fast_accum=fast)
