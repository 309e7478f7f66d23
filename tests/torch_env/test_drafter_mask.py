import pytest

torch = pytest.importorskip("torch")

from drafter_cases import anchors_at, document_ids, tiny_shape  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, create_mask  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from draftflow.drafter.anchors import sample_anchors  # noqa: E402
from draftflow.drafter.mask import FULL, Kind, allowed, block_mask, block_masks, draft_mask, layer_masks  # noqa: E402


def seen(row):
    return row.nonzero().flatten().tolist()


def test_block_sees_its_document_before_the_anchor_and_itself():
    documents = document_ids([[4, 5]], 10)  # documents 0-3 and 4-8, padding 9
    mask = allowed(anchors_at([[2, 7, None]]), documents, 2)
    assert mask.shape == (1, 1, 6, 16)
    rows = mask[0, 0]
    assert seen(rows[0]) == seen(rows[1]) == [0, 1, 10, 11]
    assert seen(rows[2]) == seen(rows[3]) == [4, 5, 6, 12, 13]
    assert seen(rows[4]) == seen(rows[5]) == [14, 15]


def test_anchor_at_the_first_token_of_a_document_has_no_context():
    mask = allowed(anchors_at([[4]]), document_ids([[4, 5]], 10), 2)
    assert seen(mask[0, 0, 0]) == [10, 11]


def test_row_of_a_sliding_layer_sees_its_window_and_its_block_up_to_itself():
    documents = document_ids([[3, 9]], 12)
    rows = allowed(anchors_at([[5, 9]]), documents, 3, Kind(5, causal=True))[0, 0]
    # the window ends in the row itself: four tokens before it, of which those after the anchor are in the block
    assert seen(rows[0]) == [3, 4, 12]  # the document starts at 3
    assert seen(rows[1]) == [3, 4, 12, 13]
    assert seen(rows[3]) == [5, 6, 7, 8, 15]
    assert seen(rows[4]) == [6, 7, 8, 15, 16]
    assert seen(rows[5]) == [7, 8, 15, 16, 17]


def test_sliding_layers_may_see_their_block_in_both_directions():
    rows = allowed(anchors_at([[9]]), document_ids([[12]], 12), 3, Kind(5))[0, 0]
    assert seen(rows[0]) == [5, 6, 7, 8, 12, 13, 14]
    assert seen(rows[2]) == [7, 8, 12, 13, 14]


@pytest.mark.parametrize("known", [0, 3, 4, 7, 20])
@pytest.mark.parametrize("kind", [Kind(4, True), Kind(4), Kind(7, True), Kind(30)])
def test_draft_mask_is_that_of_a_block_after_its_context(known, kind):
    documents = torch.zeros(1, known + 1, dtype=torch.long)
    trained = allowed(anchors_at([[known]]), documents, 4, kind)
    without_anchor = torch.cat([trained[..., :known], trained[..., known + 1 :]], dim=-1)
    assert torch.equal(draft_mask(known, 4, *kind, torch.device("cpu")), without_anchor)


def by_definition(anchors, documents, block_size, kind):
    """The predicate with documents and window, one pair at a time."""
    (batch, length), count = documents.shape, anchors.positions.shape[1]
    mask = torch.zeros(batch, 1, count * block_size, length + count * block_size, dtype=torch.bool)
    for b in range(batch):
        for q in range(mask.shape[2]):
            j = q // block_size
            anchor, valid = int(anchors.positions[b, j]), bool(anchors.valid[b, j])
            position = anchor + q % block_size
            for kv in range(mask.shape[3]):
                if kv < length:
                    near = kind.window is None or position - kv < kind.window
                    mask[b, 0, q, kv] = valid and near and kv < anchor and documents[b, kv] == documents[b, anchor]
                else:
                    own, earlier = (kv - length) // block_size == j, kv - length <= q
                    mask[b, 0, q, kv] = own and (earlier or not kind.causal)
    return mask


# row length, slots, block size, document lengths per row
CASES = [
    (256, 32, 8, [[256], [100, 156]]),  # tiles that divide everything
    (256, 24, 16, [[40, 100, 90], [7, 3]]),  # padding
    (200, 13, 10, [[120, 80], [60, 60, 60]]),  # neither row nor block size divides a tile
    (130, 40, 7, [[130], [64, 66]]),
    (384, 30, 5, [[384], [1, 383]]),
    (300, 31, 12, [[300], [130, 170]]),
    (640, 96, 4, [[640], [200, 300, 140]]),  # full context tiles
    (96, 300, 4, [[96], [50, 46]]),  # more slots than anchors
    (40, 7, 8, [[40], [22, 18]]),  # one tile of rows and one of columns
    (128, 3, 200, [[128], [64, 64]]),  # full tiles of a block's own rows
]


def kinds(block_size):
    """Windows that are no larger than a block, within a tile, across tiles, as large as two and beyond every row."""
    windows = [block_size, max(block_size, 50), max(block_size, 177), 256, 5000]
    return [FULL] + [Kind(window, causal) for window in windows for causal in (True, False)]


@pytest.mark.parametrize(
    ("length", "count", "block_size", "documents"),
    [(30, 6, 4, [[30], [10, 12]]), (21, 5, 10, [[7, 9], [5, 5, 5]]), (16, 9, 3, [[16], [2, 14]])],
)
def test_dense_mask_is_the_definition(length, count, block_size, documents):
    ids = document_ids(documents, length)
    anchors = sample_anchors(torch.ones_like(ids), ids, count, torch.Generator().manual_seed(0))
    for kind in (FULL, Kind(block_size, True), Kind(block_size + 3), Kind(14, True), Kind(100)):
        assert torch.equal(allowed(anchors, ids, block_size, kind), by_definition(anchors, ids, block_size, kind)), kind


@pytest.mark.parametrize(("length", "count", "block_size", "documents"), CASES)
def test_analytic_tiles_are_those_of_create_block_mask(length, count, block_size, documents):
    ids = document_ids(documents, length)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0  # so that the second row has invalid slots
    anchors = sample_anchors(mask, ids, count, torch.Generator().manual_seed(0))
    queries, columns = count * block_size, length + count * block_size
    found = set()
    for kind, ours in zip(
        kinds(block_size), block_masks(anchors, ids, block_size, tuple(kinds(block_size))), strict=True
    ):
        dense = create_mask(ours.mask_mod, 2, 1, queries, columns, device="cpu")
        assert torch.equal(dense, allowed(anchors, ids, block_size, kind)), kind

        theirs = create_block_mask(lambda b, h, q, kv: dense[b, 0, q, kv], 2, 1, queries, columns, device="cpu")  # noqa: B023
        assert ours.seq_lengths == theirs.seq_lengths
        assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
        for name in ("kv", "full_kv", "q", "full_q"):
            number, indices = getattr(ours, f"{name}_num_blocks"), getattr(ours, f"{name}_indices")
            assert torch.equal(number, getattr(theirs, f"{name}_num_blocks")), (kind, name)
            meant = torch.arange(indices.shape[-1]) < number[..., None]
            assert torch.equal(indices[meant], getattr(theirs, f"{name}_indices")[meant]), (kind, name)
            # what stands behind is not meant, but a kernel may load it
            assert ((indices >= 0) & (indices < indices.shape[-1])).all()
            assert number.dtype == indices.dtype == torch.int32
            assert number.is_contiguous()
            assert indices.is_contiguous()  # the backward kernel reads rows as they lie
            found |= {name} if number.any() else set()
        assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert found >= {"kv", "q"}
    if length == 640 or block_size == 200:
        assert found == {"kv", "full_kv", "q", "full_q"}


def test_a_mask_alone_is_the_one_made_with_others():
    ids = document_ids([[200, 56]], 256)
    anchors = sample_anchors(torch.ones_like(ids), ids, 32, torch.Generator().manual_seed(0))
    both = block_masks(anchors, ids, 8, (FULL, Kind(70, True)))
    for mask, kind in zip(both, (FULL, Kind(70, True)), strict=True):
        alone = block_mask(anchors, ids, 8, kind)
        for name in ("kv", "full_kv", "q", "full_q"):
            assert torch.equal(getattr(mask, f"{name}_num_blocks"), getattr(alone, f"{name}_num_blocks"))
            assert torch.equal(getattr(mask, f"{name}_indices"), getattr(alone, f"{name}_indices"))


class Operations(TorchDispatchMode):
    """Counts operations that compute something: on a GPU each is a launch or a few."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += all(result.alias_info is None for result in func._schema.returns)
        return func(*args, **(kwargs or {}))


def test_both_masks_take_the_few_operations_of_one():
    ids = document_ids([[200, 56]], 256)
    anchors = sample_anchors(torch.ones_like(ids), ids, 32, torch.Generator().manual_seed(0))
    counts = []
    for these in ((FULL,), (FULL, Kind(70, True))):
        block_masks(anchors, ids, 8, these)
        with Operations() as operations:
            block_masks(anchors, ids, 8, these)
        counts.append(operations.count)
    assert counts[0] == counts[1] <= 27


@pytest.mark.parametrize(("sliding", "full_too"), [((), True), ((0, 1), True), ((1,), True), ((0, 1, 2), False)])
def test_each_kind_of_layer_that_a_drafter_has_gets_a_mask(sliding, full_too):
    shape = tiny_shape(sliding_layers=sliding, sliding_window=9 if sliding else None)
    ids = document_ids([[30, 10]], 40)
    anchors = sample_anchors(torch.ones_like(ids), ids, 4, torch.Generator().manual_seed(0))
    full, slides = layer_masks(anchors, ids, shape, torch.float32)
    assert full is None if not full_too else torch.equal(full, allowed(anchors, ids, 8))
    assert slides is None if not sliding else torch.equal(slides, allowed(anchors, ids, 8, Kind(9, True)))


def test_invalid_slots_hold_only_tiles_of_their_own_block():
    ids = document_ids([[256]], 256)
    mask = block_mask(anchors_at([[None] * 32]), ids, 8)
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1]
    assert mask.full_kv_num_blocks.sum() == 0
    assert mask.kv_indices[0, 0, :, 0].tolist() == [2, 3]
