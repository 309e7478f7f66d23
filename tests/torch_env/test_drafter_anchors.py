import pytest

torch = pytest.importorskip("torch")

from drafter_cases import anchors_at, document_ids, position_ids  # noqa: E402

from draftflow.drafter.anchors import block_inputs, sample_anchors  # noqa: E402


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# two documents and padding; supervised: 2 3 4 | 6 7 9
DOCUMENTS = document_ids([[5, 5]], 12)
LOSS_MASK = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0]])


def test_anchor_and_its_successor_are_supervised_in_one_document():
    anchors = sample_anchors(LOSS_MASK, DOCUMENTS, 8, seeded())
    assert anchors.positions[anchors.valid].tolist() == [2, 3, 6]
    assert anchors.positions.shape == (1, 8)
    assert anchors.valid.tolist() == [[True] * 3 + [False] * 5]
    assert anchors.positions[~anchors.valid].eq(0).all()


def test_no_anchor_straddles_a_document_end_or_stands_in_padding():
    mask = torch.ones(1, 12, dtype=torch.uint8)
    anchors = sample_anchors(mask, DOCUMENTS, 12, seeded())
    assert anchors.positions[anchors.valid].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]


def test_row_without_candidates_has_only_invalid_slots():
    anchors = sample_anchors(torch.zeros(2, 12), DOCUMENTS.expand(2, -1), 4, seeded())
    assert not anchors.valid.any()


def test_more_slots_than_tokens_keep_their_static_number():
    anchors = sample_anchors(LOSS_MASK, DOCUMENTS, 20, seeded())
    assert anchors.positions.shape == anchors.valid.shape == (1, 20)


def test_numpy_rows_are_taken_as_they_are():
    from_numpy = sample_anchors(LOSS_MASK.numpy().astype("uint8"), DOCUMENTS.numpy().astype("int32"), 2, seeded(3))
    assert torch.equal(from_numpy.positions, sample_anchors(LOSS_MASK, DOCUMENTS, 2, seeded(3)).positions)


def test_sample_is_ascending_without_repetition_and_uniform():
    length, count, draws = 21, 5, 2000
    mask, documents = torch.ones(draws, length), torch.zeros(draws, length, dtype=torch.long)
    anchors = sample_anchors(mask, documents, count, seeded())
    assert anchors.valid.all()
    assert (anchors.positions.diff(dim=1) > 0).all()
    hits = anchors.positions.flatten().bincount(minlength=length)
    assert hits[-1] == 0
    expected = draws * count / (length - 1)  # 500, deviation below 20
    assert (hits[:-1] - expected).abs().max() < 100


def test_same_seed_same_anchors_and_another_seed_others():
    mask, documents = torch.ones(4, 64), torch.zeros(4, 64, dtype=torch.long)
    first, again, other = (sample_anchors(mask, documents, 8, seeded(seed)).positions for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_block_inputs_are_the_anchor_and_masks_at_following_positions():
    input_ids = torch.arange(100, 112)[None]
    tokens, positions = block_inputs(input_ids, position_ids(DOCUMENTS), anchors_at([[3, 7, None]]), 3, 9)
    assert tokens.tolist() == [[103, 9, 9, 107, 9, 9, 100, 9, 9]]
    assert positions.tolist() == [[3, 4, 5, 2, 3, 4, 0, 1, 2]]
