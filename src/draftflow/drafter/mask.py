"""Who sees whom: the attention masks of DFlash training, as dense predicates and as block-sparse tiles.

Keys are `[context 0 .. S-1 | block 0 | ... | block N-1]`, queries are the blocks alone: Q = N * block_size rows,
KV = S + Q columns. A row of a block sees exactly two intervals of columns. In a full layer:

    the context of its document strictly before its anchor    [document start, anchor)
    its own block, in both directions                         [S + j * block_size, S + (j + 1) * block_size)

In a sliding layer of window W, the row at offset o of block j, which stands for position anchor + o:

    the context in its window                                 [max(document start, anchor + o - (W - 1)), anchor)
    its own block, causal unless said otherwise               [S + j * block_size, S + j * block_size + o + 1)

so that the window counts the row itself, as in Hugging Face configs and in servers. The anchor is not in the context:
at inference it is the token that the target has just chosen, whose features do not exist yet. A block in an invalid
slot sees only itself, so that its softmax is defined; it is not supervised.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from draftflow.drafter.anchors import Anchors
from draftflow.drafter.block_attention import Intervals, document_starts, fits, intervals
from draftflow.drafter.shape import DrafterShape

TILE = 128  # of flex_attention's kernels; smaller tiles do not divide their blocks
FAR = 2**30  # beyond every column, also when two are added


class Kind(NamedTuple):
    """What a kind of layer sees.

    Args:
        window: tokens, the current one included and at least a block; None: the whole document.
        causal: whether a row sees its own block only up to itself.
    """

    window: int | None = None
    causal: bool = False


FULL = Kind()


def kinds_of(shape: DrafterShape) -> tuple[Kind | None, Kind | None]:
    """What the full and what the sliding layers of a drafter see; None where it has no such layers."""
    full = FULL if len(shape.sliding_layers) < shape.layers else None
    return full, Kind(shape.sliding_window, shape.sliding_causal) if shape.sliding_layers else None


# In rising order of what they cost: for kernels of our own, for flex_attention, for dense attention on a CPU.
Mask: TypeAlias = Intervals | BlockMask | Tensor


def layer_masks(
    anchors: Anchors, document_ids: Tensor, shape: DrafterShape, dtype: torch.dtype
) -> tuple[Mask | None, Mask | None]:
    """The masks of a drafter's full and sliding layers, sparse on a GPU and dense elsewhere; None for no such layers.

    Args:
        anchors, document_ids: as of `allowed`.
        dtype: of the computation.
    """
    full, sliding = kinds_of(shape)
    made: tuple[Mask, ...]
    if full is not None and fits(document_ids.device, dtype, shape.head_dim):
        of_full = intervals(anchors, document_ids)
        return of_full, None if sliding is None else block_mask(anchors, document_ids, shape.block_size, sliding)
    present = tuple(kind for kind in (full, sliding) if kind is not None)
    if document_ids.is_cuda:
        made = block_masks(anchors, document_ids, shape.block_size, present)
    else:
        made = tuple(allowed(anchors, document_ids, shape.block_size, kind) for kind in present)
    return made[0] if full is not None else None, made[-1] if sliding is not None else None


def allowed(anchors: Anchors, document_ids: Tensor, block_size: int, kind: Kind = FULL) -> Tensor:
    """A mask, dense: the predicate as it is defined, for CPUs and as reference.

    Args:
        anchors: of N slots, on the device of `document_ids`.
        document_ids: [B, S] integer, -1 at padding.
        kind: of the layers.

    Returns:
        [B, 1, Q, S + Q] bool, True where the query may look.
    """
    batch, length = document_ids.shape
    device = document_ids.device
    kv = torch.arange(length, device=device)
    row = torch.arange(anchors.positions.shape[1] * block_size, device=device)
    document = document_ids.gather(1, anchors.positions)  # [B, N]
    same_document = document_ids[:, None, :] == document[:, :, None]  # [B, N, S]
    context = same_document & (kv < anchors.positions[:, :, None]) & anchors.valid[:, :, None]
    context = context.repeat_interleave(block_size, dim=1)  # [B, Q, S]
    if kind.window is not None:
        position = anchors.positions.repeat_interleave(block_size, dim=1) + row % block_size  # [B, Q]
        context &= position[:, :, None] - kv < kind.window
    own = (row // block_size)[:, None] == row // block_size  # [Q, Q]
    own = own.tril() if kind.causal else own
    return torch.cat([context, own.expand(batch, -1, -1)], dim=2)[:, None]


def draft_mask(known: int, rows: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """The mask of one draft block in a sliding layer at inference, dense: its keys are the context and itself.

    Args:
        known: keys of the context, the last of them of the token before the anchor.
        rows: L, of the block.
        window, causal: as in `Kind`.

    Returns:
        [1, 1, L, known + L] bool.
    """
    row = torch.arange(known, known + rows, device=device)[:, None]
    column = torch.arange(known + rows, device=device)
    seen = row - column < window
    return (seen & (column <= row) if causal else seen)[None, None]


def block_mask(anchors: Anchors, document_ids: Tensor, block_size: int, kind: Kind = FULL) -> BlockMask:
    """A mask as flex_attention's BlockMask. Args: as `allowed`; any block size, any lengths."""
    return block_masks(anchors, document_ids, block_size, (kind,))[0]


def block_masks(
    anchors: Anchors, document_ids: Tensor, block_size: int, kinds: tuple[Kind, ...]
) -> tuple[BlockMask, ...]:
    """Masks of several kinds as flex_attention's BlockMask, from interval arithmetic: no dense mask, no host sync.

    A tile of rows holds the rows of a few blocks, of each a run of offsets. Along a run the context's interval shrinks
    from its start: a tile of columns has something visible if some block's first row in the tile meets it, and
    everything if the last rows of all blocks cover it. What blocks see of themselves is known beforehand. This costs
    [2, kinds, B, Q / 128, blocks per tile, KV / 128] booleans and the same 30 or so small kernels for all kinds: a step
    of a small drafter is launched more slowly than computed.

    Args: as `allowed`; any block size, any lengths.
    """
    batch, length = document_ids.shape
    count = anchors.positions.shape[1]
    queries, columns = count * block_size, length + count * block_size
    static = _static(batch, length, count, block_size, kinds, document_ids.device)

    start = document_starts(anchors, document_ids, static.index)  # [B, N] int32, as all that follows
    end = (anchors.positions * anchors.valid).int()  # of the context; 0 in an invalid slot, whose context is empty

    run_start, run_end = (x.index_select(1, static.blocks).unflatten(1, static.runs) for x in (start, end))
    low = torch.maximum(run_start, run_end + static.shift)  # [2, kinds, B, Q tiles, runs]
    run_end = run_end * (low[0] < run_end)  # 0 where nothing is seen
    seen = (low[..., None] < static.low_below) & (run_end[..., None] > static.end_above)
    some, full = seen[0].any(dim=-2), seen[1].all(dim=-2)  # [kinds, B, Q tiles, KV tiles]

    tiles = torch.stack([some > full, full]).int()  # partial and full
    # rows for the forward pass, columns for the backward pass; from_kv_blocks would derive these through a scatter
    rows, row_tiles = _listed(tiles, static.kv_ranks)
    cols, col_tiles = _listed(tiles.mT, static.q_ranks)
    return tuple(
        BlockMask(
            (queries, columns),
            *(part[full_or_not, k, :, None] for full_or_not in (0, 1) for part in (rows, row_tiles)),
            *(part[full_or_not, k, :, None] for full_or_not in (0, 1) for part in (cols, col_tiles)),
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=_predicate(start, end, length, block_size, kind),
        )
        for k, kind in enumerate(kinds)
    )


def _predicate(
    start: Tensor, end: Tensor, length: int, block_size: int, kind: Kind
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The two intervals of a row, for the tiles that are neither empty nor full."""
    window, causal = kind

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        j = q // block_size
        low, own = start[b, j], length + j * block_size
        own_end = length + q + 1 if causal else own + block_size
        if window is not None:
            low = torch.maximum(low, end[b, j] + (q % block_size - (window - 1)))
        return ((kv >= low) & (kv < end[b, j])) | ((kv >= own) & (kv < own_end))

    return mask_mod


def _listed(tiles: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles [.., rows, columns], 0 or 1 -> how many each row has [.., rows], and which; all int32.

    The k-th tile of a row is at the first column up to which there are k. Where there are fewer the last column stands.
    """
    number = tiles.sum(dim=-1, dtype=torch.int32)
    up_to = tiles[..., :-1].cumsum(dim=-1, dtype=torch.int32)
    return number, torch.searchsorted(up_to, ranks, out_int32=True)


class _Static(NamedTuple):
    """What masks of the same sizes have in common. R runs: the rows of one block in one tile of rows."""

    index: Tensor  # [S] 0, 1, ..
    blocks: Tensor  # [Q tiles * R] int64, block of each run; a tile with fewer runs repeats its last
    runs: tuple[int, int]  # Q tiles, R
    shift: Tensor  # [2, kinds, 1, Q tiles, R], from the anchor to the window's first column, of first and last row
    low_below: (
        Tensor  # [2, kinds, 1, Q tiles, 1, KV tiles]; the interval from low to end meets the tile if low is below
    )
    end_above: Tensor  # the first and end above the second of the first two, and covers it so for the second two
    kv_ranks: Tensor  # [2, kinds, B, Q tiles, KV tiles], 1, 2, .. in every row
    q_ranks: Tensor  # [2, kinds, B, KV tiles, Q tiles]


@functools.lru_cache(maxsize=64)
def _static(
    batch: int, length: int, count: int, block_size: int, kinds: tuple[Kind, ...], device: torch.device
) -> _Static:
    queries, columns = count * block_size, length + count * block_size
    first = torch.arange(0, queries, TILE)[:, None]  # rows of each tile
    last = (first + TILE - 1).clamp(max=queries - 1)
    runs = int((last // block_size - first // block_size).max()) + 1
    blocks = torch.minimum(first // block_size + torch.arange(runs), last // block_size)
    begin = blocks * block_size
    offsets = torch.stack([(first - begin).clamp(min=0), (last - begin).clamp(max=block_size - 1)])[:, None]

    windows = torch.tensor([kind.window or FAR for kind in kinds])[:, None, None]
    causal = torch.tensor([kind.causal for kind in kinds])[:, None, None]
    own_end = length + begin + torch.where(causal, offsets + 1, block_size)  # [2, kinds, Q tiles, R]
    tile = torch.arange(0, columns, TILE)
    complete = last == first + TILE - 1
    own = (length + begin)[..., None]
    meets = ((own < tile + TILE) & (own_end[1, ..., None] > tile)).any(dim=-2)  # [kinds, Q tiles, KV tiles]
    covers = ((own <= tile) & (own_end[0, ..., None] >= tile + TILE)).all(dim=-2) & complete
    # intervals start at 0 or later; a tile of rows that is not complete covers nothing
    low_below = [torch.where(meets, FAR, tile + TILE), torch.where(covers, FAR, (tile + 1) * complete)]
    end_above = [torch.where(meets, -1, tile), torch.where(covers, -1, tile + TILE - 1)]

    def put(x: Tensor) -> Tensor:
        return x.int().contiguous().to(device, non_blocking=True)

    shape = (2, len(kinds), batch, len(first), len(tile))
    return _Static(
        put(torch.arange(length)),
        blocks.flatten().to(device, non_blocking=True),
        (len(first), runs),
        put((offsets - (windows - 1))[:, :, None]),
        put(torch.stack(low_below)[:, :, None, :, None]),
        put(torch.stack(end_above)[:, :, None, :, None]),
        put(torch.arange(1, len(tile) + 1).expand(shape)),
        put(torch.arange(1, len(first) + 1).expand(*shape[:3], len(tile), len(first))),
    )
