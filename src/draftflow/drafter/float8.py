"""Matrix products of a linear layer in float8, forward and backward, with scales that are found as the values come.

    y = x W^T,   dX = g W,   dW = g^T x        x [rows, in], W [out, in], g and y [rows, out]

Each row of an operand is divided by a scale of its own and rounded to e4m3 (3 bits of mantissa, 2^17 in range). A scale
stands on a dimension over which the product does not sum, so that it is applied to the result, by what the compiler
makes of the operations that follow; where it would be summed over, it is multiplied into the other operand before that
is rounded: W's into g for dX, x's into g for dW. Scales are powers of two. So all of this is exact, nothing is rounded
but to float8 and to the dtype of the result, and the products are those of whole tensors, without scales of rows, which
are the fastest.

    A scale per row, not per tensor: what a draft block finds does not depend, not even in its rounding, on what else is
        in the batch (checks/mask.py would see it). The few tokens whose features are a thousand times as large as
        others' leave these their bits. And the largest value of a row is found by the pass that makes the row, a norm
        or an activation; that of a tensor takes another pass over it.
    dW sums over the tokens. One scale serves them all there, so that g, times the scales of x, is rounded to e5m2: 2^31
        in range, for 2 bits of mantissa.
    The fast accumulation of Hopper keeps some 14 bits. That is finer than float8, but over thousands of tokens what is
        small beside the sum is cut off, always towards zero; gradients take the other kind.

A GPU multiplies float8 where both operands lie along the dimension that is summed over. So W is turned for dX, g and x
for dW: three copies of a byte an element. That dimension, and the columns of a result, are multiples of 16: sides of W
that are not keep a layer out of this, and for dW rows of zeros come in with the copies. What waits for the backward
waits in float8.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 16

# What is rounded has its largest in [2^7, 2^8); e4m3 ends at 448.
LARGEST_EXPONENT = 7
# Of fp32: one in the exponent, all of the exponent, and the exponent of 2^-100, the least that is told from 0
UNIT, EXPONENT, LEAST = 1 << 23, 0x7F800000, 27 << 23


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, and its gradients, in float8.

    Args:
        x: [.., in], bf16 or fp32.
        weight: [out, in], of the same dtype; its sides are multiples of 16.

    Returns:
        [.., out], in the dtype of `x`. Where a value of a row is not finite, that row is not.
    """
    return torch.ops.draftflow.float8_linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scales = round_rows(x)
        weight8, weight_scales = round_rows(weight)
        ctx.save_for_backward(x8, x_scales, weight8, weight_scales)
        y = _product(x8, weight8, x.dtype, fast=True)
        return (y * x_scales * weight_scales.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor]:
        x8, x_scales, weight8, weight_scales = ctx.saved_tensors
        g, of_x = _made_once(g), None
        if ctx.needs_input_grad[0]:
            g8, g_scales = round_rows(g * weight_scales.t())
            of_x = (_product(g8, transposed(weight8), g.dtype) * g_scales).to(g.dtype)
        scale, inverse = scale_of((_largest(g) * x_scales).amax())
        g8 = F.pad(g * (x_scales * inverse), (0, 0, 0, -len(g) % MULTIPLE)).to(torch.float8_e5m2)
        return of_x, _product(g8.t().contiguous(), transposed(x8), g.dtype, scale)


# Through a composite operator the compiler's tracing comes to the Function itself. A Function that Dynamo traces keeps
# the whole graph out of the compile cache.
_library = torch.library.Library("draftflow", "FRAGMENT")
_library.define("float8_linear(Tensor x, Tensor weight) -> Tensor")
_library.impl("float8_linear", _Linear.apply, "CompositeImplicitAutograd")


def scale_of(largest: Tensor) -> tuple[Tensor, Tensor]:
    """A power of two, so that values up to `largest` (fp32) divided by it are below 2^8; and one over it. The first is
    infinite where `largest` is not finite: a GPU rounds what is infinite to 448, and the result would be a number."""
    bits = (largest.view(torch.int32) & EXPONENT).clamp(min=LEAST)
    scale, inverse = bits - LARGEST_EXPONENT * UNIT, EXPONENT - bits + (LARGEST_EXPONENT - 1) * UNIT
    scale = torch.where(bits == EXPONENT, EXPONENT, scale)
    return scale.view(torch.float32), inverse.view(torch.float32)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, k] -> the rows in e4m3, and what they were divided by, [n, 1] fp32."""
    scales, inverses = scale_of(_largest(x))
    return _made_once((x * inverses).to(torch.float8_e4m3fn)), scales


def _made_once(x: Tensor) -> Tensor:
    """The same tensor, in a form for which Inductor writes it to memory. Of an operand it would otherwise make one for
    each product that takes it, and of a gradient it would keep the fp32 values from before the rounding."""
    return x.as_strided(x.shape, x.stride())


def _largest(x: Tensor) -> Tensor:
    """Of each row [n, k] the largest magnitude, [n, 1] fp32. Made of fp32: Inductor rounds with a largest value from
    before x was rounded to bf16, and multiplies with the one that it has stored, which then may be of another octave.
    """
    return x.float().abs().amax(-1, keepdim=True)


@torch.library.custom_op("draftflow::float8_transposed", mutates_args=())
def transposed(x8: Tensor) -> Tensor:
    """[rows, k] -> [k, rows], contiguous, with zeros up to the next multiple of 16 rows."""
    padded = len(x8) + -len(x8) % MULTIPLE
    if x8.is_cuda:
        from draftflow.drafter import float8_kernels  # needs Triton

        return float8_kernels.transpose(x8, padded)
    return F.pad(x8, (0, 0, 0, padded - len(x8))).t().contiguous()


@transposed.register_fake
def _(x8: Tensor) -> Tensor:
    return x8.new_empty(x8.shape[1], len(x8) + -len(x8) % MULTIPLE)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, scale: Tensor | None = None, fast: bool = False) -> Tensor:
    """a b^T * scale, of a [n, k] and b [m, k] in float8."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one if scale is None else scale, one, out_dtype=dtype, use_fast_accum=fast)
