"""Who sees whom: the attention mask of DFlash training, as a dense predicate and as block-sparse tiles.

Keys are `[context 0 .. S-1 | block 0 | ... | block N-1]`, queries are the blocks alone: Q = N * block_size rows,
KV = S + Q columns. A row of a block sees exactly two intervals of columns:

    the context of its document strictly before its anchor    [document start, anchor)
    its own block, in both directions                         [S + j * block_size, S + (j + 1) * block_size)

The anchor itself is not in the context: at inference it is the token that the target has just chosen, whose features
do not exist yet. A block in an invalid slot sees only itself, so that its softmax
is defined; it is not supervised.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from draftflow.drafter.anchors import Anchors

TILE = 128  # of flex_attention's kernels; smaller tiles do not divide their blocks


def allowed(anchors: Anchors, document_ids: Tensor, block_size: int) -> Tensor:
    """The mask, dense: the predicate as it is defined, for CPUs and as reference.

    Args:
        anchors: of N slots, on the device of `document_ids`.
        document_ids: [B, S] integer, -1 at padding.

    Returns:
        [B, 1, Q, S + Q] bool, True where the query may look.
    """
    batch, length = document_ids.shape
    count = anchors.positions.shape[1]
    device = document_ids.device
    kv = torch.arange(length, device=device)
    document = document_ids.gather(1, anchors.positions)  # [B, N]
    same_document = document_ids[:, None, :] == document[:, :, None]  # [B, N, S]
    context = same_document & (kv < anchors.positions[:, :, None]) & anchors.valid[:, :, None]
    own = torch.eye(count, dtype=torch.bool, device=device).expand(batch, count, count)
    own = own.repeat_interleave(block_size, dim=2)  # [B, N, Q]
    per_block = torch.cat([context, own], dim=2)  # [B, N, S + Q]: all rows of a block see the same
    return per_block.repeat_interleave(block_size, dim=1)[:, None]


def block_mask(anchors: Anchors, document_ids: Tensor, block_size: int) -> BlockMask:
    """The mask as flex_attention's BlockMask, from interval arithmetic, without the dense mask and without a host sync.

    For each row and each tile of 128 columns, two comparisons per interval say whether the tile holds something
    visible and whether all of it is; a tile of 128 rows joins its rows. This costs [B, Q, KV / 128] booleans.

    Args: as `allowed`; any block size, any lengths.
    """
    batch, length = document_ids.shape
    count = anchors.positions.shape[1]
    queries, columns = count * block_size, length + count * block_size
    start, end = _context(anchors, document_ids)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        j = q // block_size
        own = (kv >= length) & ((kv - length) // block_size == j)
        return own | ((kv >= start[b, j]) & (kv < end[b, j]))

    own_start = length + block_size * torch.arange(count, device=document_ids.device).expand(batch, count)
    tile = torch.arange(0, columns, TILE, device=document_ids.device)  # first column of each tile
    context_any, context_all = _overlap(start, end, tile)
    own_any, own_all = _overlap(own_start, own_start + block_size, tile)
    some = _row_tiles(context_any | own_any, block_size, queries).any(dim=2)  # [B, Q tiles, KV tiles]
    full = _row_tiles(context_all | own_all, block_size, queries).all(dim=2)
    partial = some & ~full
    # rows for the forward pass, columns for the backward pass; from_kv_blocks would derive these through a scatter
    tiles = (*_ordered(partial), *_ordered(full), *_ordered(partial.mT), *_ordered(full.mT))
    return BlockMask((queries, columns), *tiles, BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod)


def _context(anchors: Anchors, document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The context interval [start, end) of each block, [B, N] each; empty at 0 for an invalid slot."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    document_start = torch.where(begins, index, 0).cummax(dim=1).values
    end = torch.where(anchors.valid, anchors.positions, 0)
    return torch.where(anchors.valid, document_start.gather(1, anchors.positions), 0), end


def _overlap(start: Tensor, end: Tensor, tile: Tensor) -> tuple[Tensor, Tensor]:
    """Whether intervals [start, end), [B, N], meet tiles of columns and cover them: [B, N, KV tiles] bool, twice."""
    start, end = start[:, :, None], end[:, :, None]
    meets = torch.maximum(start, tile) < torch.minimum(end, tile + TILE)
    return meets, (start <= tile) & (end >= tile + TILE)


def _row_tiles(per_block: Tensor, block_size: int, queries: int) -> Tensor:
    """[B, N, KV tiles] of blocks -> [B, Q tiles, 128, KV tiles] of rows; rows past the last query see nothing."""
    rows = per_block.repeat_interleave(block_size, dim=1)
    return pad(rows, (0, 0, 0, -queries % TILE)).unflatten(1, (-1, TILE))


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles [B, rows, columns] bool -> number in each row [B, 1, rows] and columns, theirs first; both int32."""
    tiles = tiles[:, None].int().contiguous()  # a transposed one would keep its strides; kernels read rows as they lie
    return tiles.sum(dim=-1, dtype=torch.int32), tiles.argsort(dim=-1, descending=True, stable=True).int()
