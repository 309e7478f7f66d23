import pytest

torch = pytest.importorskip("torch")

from drafter_cases import anchors_at, document_ids  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, create_mask  # noqa: E402

from draftflow.drafter.anchors import sample_anchors  # noqa: E402
from draftflow.drafter.mask import allowed, block_mask  # noqa: E402


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


def by_definition(anchors, documents, block_size):
    """The predicate with documents, one pair at a time."""
    (batch, length), count = documents.shape, anchors.positions.shape[1]
    mask = torch.zeros(batch, 1, count * block_size, length + count * block_size, dtype=torch.bool)
    for b in range(batch):
        for q in range(mask.shape[2]):
            j = q // block_size
            anchor, valid = int(anchors.positions[b, j]), bool(anchors.valid[b, j])
            for kv in range(mask.shape[3]):
                if kv < length:
                    mask[b, 0, q, kv] = valid and kv < anchor and documents[b, kv] == documents[b, anchor]
                else:
                    mask[b, 0, q, kv] = (kv - length) // block_size == j
    return mask


# row length, slots, block size, document lengths per row
CASES = [
    (256, 32, 8, [[256], [100, 156]]),  # tiles that divide everything
    (256, 24, 16, [[40, 100, 90], [7, 3]]),  # padding
    (200, 13, 10, [[120, 80], [60, 60, 60]]),  # neither row nor block size divides a tile
    (130, 40, 7, [[130], [64, 66]]),
    (384, 30, 5, [[384], [1, 383]]),
    (640, 96, 4, [[640], [200, 300, 140]]),  # full context tiles
    (96, 300, 4, [[96], [50, 46]]),  # more slots than anchors
]


@pytest.mark.parametrize(
    ("length", "count", "block_size", "documents"),
    [(30, 6, 4, [[30], [10, 12]]), (21, 5, 10, [[7, 9], [5, 5, 5]]), (16, 9, 3, [[16], [2, 14]])],
)
def test_dense_mask_is_the_definition(length, count, block_size, documents):
    ids = document_ids(documents, length)
    anchors = sample_anchors(torch.ones_like(ids), ids, count, torch.Generator().manual_seed(0))
    assert torch.equal(allowed(anchors, ids, block_size), by_definition(anchors, ids, block_size))


@pytest.mark.parametrize(("length", "count", "block_size", "documents"), CASES)
def test_analytic_tiles_are_those_of_create_block_mask(length, count, block_size, documents):
    ids = document_ids(documents, length)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0  # so that the second row has invalid slots
    anchors = sample_anchors(mask, ids, count, torch.Generator().manual_seed(0))
    ours = block_mask(anchors, ids, block_size)
    queries, columns = count * block_size, length + count * block_size

    dense = create_mask(ours.mask_mod, 2, 1, queries, columns, device="cpu")
    assert torch.equal(dense, allowed(anchors, ids, block_size))

    theirs = create_block_mask(ours.mask_mod, 2, 1, queries, columns, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        number, indices = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
        assert torch.equal(number, getattr(theirs, f"{kind}_num_blocks")), kind
        assert torch.equal(indices, getattr(theirs, f"{kind}_indices")), kind
        assert number.dtype == indices.dtype == torch.int32
        assert number.is_contiguous()
        assert indices.is_contiguous()  # the backward kernel reads rows as they lie
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    if length == 640:
        assert ours.full_kv_num_blocks.sum() > 0


def test_invalid_slots_hold_only_tiles_of_their_own_block():
    ids = document_ids([[256]], 256)
    mask = block_mask(anchors_at([[None] * 32]), ids, 8)
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1]
    assert mask.full_kv_num_blocks.sum() == 0
    assert mask.kv_indices[0, 0, :, 0].tolist() == [2, 3]
