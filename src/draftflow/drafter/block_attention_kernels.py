"""Triton kernels of `block_attention`: forward, and a backward that sums in a fixed order.

A query of block j sees the context [start_j, end_j) and its own block, in both directions (see `mask.py`). Blocks come
in the order of their anchors, so that start and end do not fall from one block to the next. Hence what a tile has to
look at is an interval, and there are no lists of tiles:

    of a tile of queries    the context from the first block's start to the last one's end; without a mask from the last
                            one's start to the first one's end
    of a tile of context    the blocks from the first that ends behind its beginning to the last that starts before its
                            end; without a mask those that cover it

The query heads that share a key head lie in one tile of rows, as many of them as are a power of two: keys and values
are read once for all of them, and a tile holds fewer blocks, whose intervals differ less. With S = scale * Q K^T,
P = softmax(S), O = P V and D = rowsum(dO * O),

    dV = P^T dO,   dS = P * (dO V^T - D),   dQ = scale * dS K,   dK = scale * dS^T Q

The kernel that makes dQ makes dK and dV of the blocks' own keys as well, another goes over the context; both compute P
anew. Sums over query heads that lie in different tiles are made at the end, so that no order is left to chance.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftflow.drafter.block_attention import KEYS, Intervals

ROWS = 128  # of queries in a tile, over all of its heads
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(at, index, step, bound, dim: tl.constexpr, masked: tl.constexpr):
    """Rows `index` of a matrix, [len(index), dim]; 0 beyond `bound`."""
    pointers = at + index.to(tl.int64)[:, None] * step + tl.arange(0, dim)[None, :]
    if masked:
        return tl.load(pointers, mask=(index < bound)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def _attend(state, q, k_at, v_at, k_step, v_step, column, bound, seen, scale, dim: tl.constexpr, masked: tl.constexpr):
    """One tile of keys of the forward pass; scores in units of log2."""
    accumulator, largest, total = state
    k = _load(k_at, column, k_step, bound, dim, masked)
    v = _load(v_at, column, v_step, bound, dim, masked)
    scores = tl.dot(q, tl.trans(k)) * scale
    if masked:
        scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, axis=1))
    reference = tl.where(larger == float("-inf"), 0.0, larger) if masked else larger
    p = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(largest - reference)
    total = total * shrink + tl.sum(p, axis=1)
    accumulator = tl.dot(p.to(v.dtype), v, accumulator * shrink[:, None])
    return accumulator, larger, total


@triton.jit
def _context_of(start, end, first, last, tile: tl.constexpr):
    """Bounds of a tile of queries from block `first` to `last`: masked, full, masked tiles of context between them."""
    low = tl.load(start + first) // tile * tile
    high = tl.load(end + last)
    full_low = tl.cdiv(tl.load(start + last), tile) * tile
    full_high = tl.load(end + first) // tile * tile
    if full_high <= full_low:
        full_low = tl.maximum(tl.cdiv(high, tile) * tile, low)
        full_high = full_low
    return low, full_low, full_high, high


@triton.jit
def draftflow_attention_forward(
    q, k, v, start, end, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    context, blocks, scale,
    heads: tl.constexpr, group: tl.constexpr, pack: tl.constexpr, block: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr, own_keys: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    first_head = tl.program_id(1) * pack
    batch = tl.program_id(2)
    per_tile: tl.constexpr = queries // block  # whole blocks, so that their own keys belong to one tile
    rows = tl.arange(0, pack * queries)
    head, query = first_head + rows // queries, tile * per_tile * block + rows % queries
    total_queries = blocks * block
    q_at = q + batch.to(tl.int64) * q_batch + head * q_head + query * q_row
    inside = (rows % queries < per_tile * block) & (query < total_queries)
    columns_of = tl.arange(0, dim)
    q_tile = tl.load(q_at[:, None] + columns_of[None, :], mask=inside[:, None], other=0.0)
    start += batch * blocks
    end += batch * blocks
    own = tl.minimum(query // block, blocks - 1)
    row_start, row_end = tl.load(start + own), tl.load(end + own)
    first, last = tile * per_tile, tl.minimum(tile * per_tile + per_tile, blocks) - 1
    k_at = k + batch.to(tl.int64) * k_batch + first_head // group * k_head
    v_at = v + batch.to(tl.int64) * v_batch + first_head // group * v_head
    bound = context + total_queries
    low, full_low, full_high, high = _context_of(start, end, first, last, keys)
    scale *= LOG2E
    largest = tl.full([pack * queries], float("-inf"), tl.float32)
    state = (tl.zeros([pack * queries, dim], tl.float32), largest, tl.zeros([pack * queries], tl.float32))
    for n in range(low, full_low, keys):
        column = n + tl.arange(0, keys)
        seen = (column[None, :] >= row_start[:, None]) & (column[None, :] < row_end[:, None])
        state = _attend(state, q_tile, k_at, v_at, k_row, v_row, column, bound, seen, scale, dim, True)
    for n in range(full_low, full_high, keys):
        column = n + tl.arange(0, keys)
        state = _attend(state, q_tile, k_at, v_at, k_row, v_row, column, bound, column, scale, dim, False)
    for n in range(full_high, high, keys):
        column = n + tl.arange(0, keys)
        seen = (column[None, :] >= row_start[:, None]) & (column[None, :] < row_end[:, None])
        state = _attend(state, q_tile, k_at, v_at, k_row, v_row, column, bound, seen, scale, dim, True)
    for n in range(first * block, (last + 1) * block, own_keys):
        column = n + tl.arange(0, own_keys)
        seen = (column // block)[None, :] == (query // block)[:, None]
        column += context
        state = _attend(state, q_tile, k_at, v_at, k_row, v_row, column, bound, seen, scale, dim, True)
    accumulator, largest, total = state
    o_at = out + batch.to(tl.int64) * o_batch + head * o_head + query * o_row
    result = (accumulator / total[:, None]).to(out.dtype.element_ty)
    tl.store(o_at[:, None] + columns_of[None, :], result, mask=inside[:, None])
    lse_at = lse + (batch * heads + head) * total_queries + query
    tl.store(lse_at, largest + tl.log2(total), mask=inside)


@triton.jit
def _query_gradient(
    dq, q, do, row_lse, delta, k_at, v_at, k_step, v_step, column, bound, seen, scale, dim: tl.constexpr,
    masked: tl.constexpr,
):  # fmt: skip
    """dQ over one tile of keys; and P and dS / scale of it."""
    k = _load(k_at, column, k_step, bound, dim, masked)
    v = _load(v_at, column, v_step, bound, dim, masked)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - row_lse[:, None])
    if masked:
        p = tl.where(seen, p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq), p, ds


@triton.jit
def draftflow_attention_backward_queries(
    q, k, v, start, end, out, do, lse, dq, delta, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row, do_batch, do_head, do_row, dq_batch, dq_head, dq_row, dk_part, dk_batch, dk_head, dk_row,
    context, blocks, scale,
    heads: tl.constexpr, group: tl.constexpr, pack: tl.constexpr, block: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr, own_keys: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_head = tl.program_id(1) * pack
    batch = tl.program_id(2)
    per_tile: tl.constexpr = queries // block  # whole blocks, so that their own keys belong to one tile
    rows = tl.arange(0, pack * queries)
    head, query = first_head + rows // queries, tile * per_tile * block + rows % queries
    total_queries = blocks * block
    inside = (rows % queries < per_tile * block) & (query < total_queries)
    columns_of = tl.arange(0, dim)
    q_at = q + batch.to(tl.int64) * q_batch + head * q_head + query * q_row
    o_at = out + batch.to(tl.int64) * o_batch + head * o_head + query * o_row
    do_at = do + batch.to(tl.int64) * do_batch + head * do_head + query * do_row
    q_tile = tl.load(q_at[:, None] + columns_of[None, :], mask=inside[:, None], other=0.0)
    do_tile = tl.load(do_at[:, None] + columns_of[None, :], mask=inside[:, None], other=0.0)
    o_tile = tl.load(o_at[:, None] + columns_of[None, :], mask=inside[:, None], other=0.0)
    row_delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), axis=1)
    row_at = (batch * heads + head) * total_queries + query
    tl.store(delta + row_at, row_delta, mask=inside)
    row_lse = tl.load(lse + row_at, mask=inside, other=0.0)
    start += batch * blocks
    end += batch * blocks
    own = tl.minimum(query // block, blocks - 1)
    row_start, row_end = tl.load(start + own), tl.load(end + own)
    first, last = tile * per_tile, tl.minimum(tile * per_tile + per_tile, blocks) - 1
    kv_head = first_head // group
    k_at = k + batch.to(tl.int64) * k_batch + kv_head * k_head
    v_at = v + batch.to(tl.int64) * v_batch + kv_head * v_head
    bound = context + total_queries
    low, full_low, full_high, high = _context_of(start, end, first, last, keys)
    in_log2 = scale * LOG2E
    result = tl.zeros([pack * queries, dim], tl.float32)
    for n in range(low, full_low, keys):
        column = n + tl.arange(0, keys)
        seen = (column[None, :] >= row_start[:, None]) & (column[None, :] < row_end[:, None])
        result, _, _ = _query_gradient(
            result, q_tile, do_tile, row_lse, row_delta, k_at, v_at, k_row, v_row, column, bound, seen, in_log2, dim,
            True,
        )  # fmt: skip
    for n in range(full_low, full_high, keys):
        column = n + tl.arange(0, keys)
        result, _, _ = _query_gradient(
            result, q_tile, do_tile, row_lse, row_delta, k_at, v_at, k_row, v_row, column, bound, column, in_log2, dim,
            False,
        )  # fmt: skip
    for n in range(full_high, high, keys):
        column = n + tl.arange(0, keys)
        seen = (column[None, :] >= row_start[:, None]) & (column[None, :] < row_end[:, None])
        result, _, _ = _query_gradient(
            result, q_tile, do_tile, row_lse, row_delta, k_at, v_at, k_row, v_row, column, bound, seen, in_log2, dim,
            True,
        )  # fmt: skip
    part = first_head % group // pack
    dk_at = part.to(tl.int64) * dk_part + batch.to(tl.int64) * dk_batch + kv_head * dk_head
    for n in range(first * block, (last + 1) * block, own_keys):
        place = n + tl.arange(0, own_keys)
        seen = ((place // block)[None, :] == (query // block)[:, None]) & inside[:, None]
        column = place + context
        result, p, ds = _query_gradient(
            result, q_tile, do_tile, row_lse, row_delta, k_at, v_at, k_row, v_row, column, bound, seen, in_log2, dim,
            True,
        )  # fmt: skip
        own_dk = tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile) * scale
        own_dv = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile)
        pointers = dk_at + column.to(tl.int64)[:, None] * dk_row + columns_of[None, :]
        kept = (place < (last + 1) * block)[:, None]
        tl.store(dk + pointers, own_dk.to(dk.dtype.element_ty), mask=kept)
        tl.store(dv + pointers, own_dv.to(dv.dtype.element_ty), mask=kept)
    dq_at = dq + batch.to(tl.int64) * dq_batch + head * dq_head + query * dq_row
    tl.store(dq_at[:, None] + columns_of[None, :], (result * scale).to(dq.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _key_gradient(
    dk, dv, k, v, q_at, do_at, q_step, do_step, lse, delta, start, end, m, bound, column, scale,
    block: tl.constexpr, queries: tl.constexpr, dim: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """dK / scale and dV of a tile of keys over one tile of queries of one head."""
    query = m + tl.arange(0, queries)
    q = _load(q_at, query, q_step, bound, dim, masked)
    do = _load(do_at, query, do_step, bound, dim, masked)
    if masked:
        row_lse = tl.load(lse + query, mask=query < bound, other=0.0)
        row_delta = tl.load(delta + query, mask=query < bound, other=0.0)
    else:
        row_lse = tl.load(lse + query)
        row_delta = tl.load(delta + query)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - row_lse[None, :])
    if masked:
        row_start = tl.load(start + query // block, mask=query < bound, other=0)
        row_end = tl.load(end + query // block, mask=query < bound, other=0)
        p = tl.where((column[:, None] >= row_start[None, :]) & (column[:, None] < row_end[None, :]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (tl.dot(v, tl.trans(do)) - row_delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def draftflow_attention_backward_context(
    q, k, v, start, end, seen_by, do, lse, delta, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, dk_part, dk_batch, dk_head, dk_row,
    context, blocks, tiles, scale,
    heads: tl.constexpr, group: tl.constexpr, block: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr,
    dim: tl.constexpr,
):  # fmt: skip
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # the first tiles are seen by most
    kv_head = head // group
    column = tile * keys + tl.arange(0, keys)
    k_tile = _load(k + batch.to(tl.int64) * k_batch + kv_head * k_head, column, k_row, context, dim, True)
    v_tile = _load(v + batch.to(tl.int64) * v_batch + kv_head * v_head, column, v_row, context, dim, True)
    q_at = q + batch.to(tl.int64) * q_batch + head * q_head
    do_at = do + batch.to(tl.int64) * do_batch + head * do_head
    lse += (batch * heads + head) * blocks * block
    delta += (batch * heads + head) * blocks * block
    start += batch * blocks
    end += batch * blocks
    seen_by += batch * 4 * tiles + tile
    low, high = tl.load(seen_by) * block, tl.load(seen_by + 3 * tiles) * block
    full_low, full_high = tl.load(seen_by + tiles) * block, tl.load(seen_by + 2 * tiles) * block
    full_low = tl.minimum(low + tl.cdiv(tl.maximum(full_low - low, 0), queries) * queries, high)
    full_high = full_low + tl.maximum(full_high - full_low, 0) // queries * queries
    in_log2 = scale * LOG2E
    dk_tile = tl.zeros([keys, dim], tl.float32)
    dv_tile = tl.zeros([keys, dim], tl.float32)
    for m in range(low, full_low, queries):
        dk_tile, dv_tile = _key_gradient(
            dk_tile, dv_tile, k_tile, v_tile, q_at, do_at, q_row, do_row, lse, delta, start, end, m, full_low, column,
            in_log2, block, queries, dim, True,
        )  # fmt: skip
    for m in range(full_low, full_high, queries):
        dk_tile, dv_tile = _key_gradient(
            dk_tile, dv_tile, k_tile, v_tile, q_at, do_at, q_row, do_row, lse, delta, start, end, m, full_high, column,
            in_log2, block, queries, dim, False,
        )  # fmt: skip
    for m in range(full_high, high, queries):
        dk_tile, dv_tile = _key_gradient(
            dk_tile, dv_tile, k_tile, v_tile, q_at, do_at, q_row, do_row, lse, delta, start, end, m, high, column,
            in_log2, block, queries, dim, True,
        )  # fmt: skip
    at = (head % group).to(tl.int64) * dk_part + batch.to(tl.int64) * dk_batch + kv_head * dk_head
    pointers = at + column.to(tl.int64)[:, None] * dk_row + tl.arange(0, dim)[None, :]
    kept = (column < context)[:, None]
    tl.store(dk + pointers, (dk_tile * scale).to(dk.dtype.element_ty), mask=kept)
    tl.store(dv + pointers, dv_tile.to(dv.dtype.element_ty), mask=kept)


def _sizes(q: Tensor, k: Tensor, block_size: int) -> dict[str, int]:
    """Constants of the kernels: of a group as many heads lie in a tile as divide it and leave room for a block."""
    group = q.shape[1] // k.shape[1]
    pack = min(8, group & -group, ROWS // triton.next_power_of_2(block_size))
    queries = ROWS // pack
    sizes = {"heads": q.shape[1], "group": group, "block": block_size, "queries": queries, "dim": q.shape[3]}
    return {**sizes, "pack": pack, "own_keys": 32}


def forward(q: Tensor, k: Tensor, v: Tensor, found: Intervals) -> tuple[Tensor, Tensor]:
    """As `block_attention.forward`."""
    batch, heads, total, dim = q.shape
    blocks = found.start.shape[1]
    context, block_size = k.shape[2] - total, total // blocks
    out = q.new_empty(batch, total, heads, dim).transpose(1, 2)
    lse = torch.empty(batch, heads, total, device=q.device)
    sizes = _sizes(q, k, block_size)
    grid = (triton.cdiv(blocks, sizes["queries"] // block_size), heads // sizes["pack"], batch)
    draftflow_attention_forward[grid](
        q, k, v, found.start, found.end, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        context, blocks, dim**-0.5, **sizes, keys=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, found: Intervals
) -> tuple[Tensor, Tensor, Tensor]:
    """As `block_attention.backward`."""
    batch, heads, total, dim = q.shape
    kv_heads, columns = k.shape[1:3]
    blocks, context = found.start.shape[1], columns - total
    block_size = total // blocks
    sizes = _sizes(q, k, block_size)
    parts = sizes["group"] // sizes["pack"]  # tiles that a key head's query heads lie in
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = torch.empty_like(lse)
    # where one tile has them all, the gradients of the blocks' own keys need no sum
    own = [x[None] if parts == 1 else x.new_empty(parts, *x.shape) for x in (dk, dv)]
    grid = (triton.cdiv(blocks, sizes["queries"] // block_size), heads // sizes["pack"], batch)
    draftflow_attention_backward_queries[grid](
        q, k, v, found.start, found.end, out, do, lse, dq, delta, *own,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
        *own[0].stride()[:4], context, blocks, dim**-0.5, **sizes, keys=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    seen = k.new_empty(2, sizes["group"], batch, kv_heads, context, dim)
    tiles = found.seen_by.shape[2]
    for name in ("pack", "own_keys", "queries"):
        sizes.pop(name)
    draftflow_attention_backward_context[(tiles, heads, batch)](
        q, k, v, found.start, found.end, found.seen_by, do, lse, delta, seen[0], seen[1],
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *seen.stride()[1:5],
        context, blocks, tiles, dim**-0.5, **sizes, queries=64, keys=KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    for gradient, of_context, of_blocks in zip((dk, dv), seen, own, strict=True):
        torch.sum(of_context, 0, out=gradient[:, :, :context])
        if parts > 1:
            torch.sum(of_blocks[:, :, :, context:], 0, out=gradient[:, :, context:])
    return dq, dk, dv
