"""A Triton kernel that turns a matrix of bytes: out[j, i] = x[i, j], zero from the last row of x on.

A program reads a tile along the rows of x and writes it along the rows of the result, which is the other way round: in
the registers between, where the tile is turned. Compiled together with what makes x, a store of one byte here and the
next a row further on would be all that a program can do.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128


@triton.jit
def draftflow_float8_transpose(x, out, rows, columns, padded, tile: tl.constexpr):
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0)
    place = out + column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(place, tl.trans(values), mask=(column < columns)[:, None] & (row < padded)[None, :])


def transpose(x: Tensor, padded: int) -> Tensor:
    """[rows, k] of one byte each, contiguous -> [k, padded]."""
    rows, columns = x.shape
    out = torch.empty(columns, padded, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(padded, TILE), triton.cdiv(columns, TILE))
    given = (x.view(torch.uint8), out.view(torch.uint8), rows, columns, padded)
    draftflow_float8_transpose[grid](*given, tile=TILE, num_warps=8)
    return out
