import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
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


def drawn_per_document(lengths, count, per_document, draws=1, seed=0):
    """[draws, documents]: how many anchors each document of one row got, all of whose tokens are supervised."""
    documents = document_ids([lengths], sum(lengths) + 3).expand(draws, -1)
    anchors = sample_anchors(torch.ones_like(documents), documents, count, seeded(seed), per_document)
    assert (anchors.valid.sum(1) == anchors.valid.sum(1)[0]).all()
    assert all((row[:-1] < row[1:]).all() for row in (p[v] for p, v in zip(*anchors, strict=True)))
    found = torch.where(anchors.valid, documents.gather(1, anchors.positions), -1)
    return torch.stack([(found == number).sum(1) for number in range(len(lengths))], dim=1)


@pytest.mark.parametrize(
    ("per_document", "expected"), [(None, [9, 0, 2, 29]), (50, [9, 0, 2, 29]), (8, [8, 0, 2, 8]), (1, [1, 0, 1, 1])]
)
def test_every_document_gets_its_budget_where_the_row_has_slots(per_document, expected):
    assert drawn_per_document([10, 1, 3, 30], 40, per_document).tolist() == [expected]
    exact = sum(expected)  # no slot to spare
    assert drawn_per_document([10, 1, 3, 30], exact, per_document).tolist() == [expected]


@pytest.mark.parametrize("per_document", [None, 50, 7])
def test_too_few_slots_are_shared_in_proportion_to_what_documents_want(per_document):
    lengths, count, draws = [101, 41, 5, 2, 61], 16, 2000
    wanted = np.minimum(np.array(lengths) - 1, per_document or 1000)  # the last token is no anchor
    proportion = count * wanted / wanted.sum()
    drawn = drawn_per_document(lengths, count, per_document, draws).numpy()
    assert (drawn.sum(axis=1) == count).all()
    assert (drawn >= np.floor(proportion)).all()
    assert (drawn <= np.ceil(proportion)).all()
    # a share is rounded down or up, so its deviation is at most 1/2 and that of the mean 0.011
    assert np.abs(drawn.mean(axis=0) - proportion).max() < 0.05


def test_each_token_of_a_document_is_as_likely_as_another():
    lengths, count, draws = [31, 11, 6], 8, 4000
    documents = document_ids([lengths], 50).expand(draws, -1)
    anchors = sample_anchors(torch.ones_like(documents), documents, count, seeded(), per_document=15)
    hits = anchors.positions.flatten().bincount(minlength=50).double() / draws
    likely = []
    for candidates, wanted in ((30, 15), (10, 10), (5, 5)):
        likely += [count * wanted / 30 / candidates] * candidates + [0.0]  # the last token is no anchor
    # deviation of a frequency is at most 0.008
    assert (hits[:48] - torch.tensor(likely)).abs().max() < 0.035


def test_anchors_of_a_document_are_its_candidates_of_the_highest_scores():
    documents = document_ids([[30, 1, 25], [64], [8, 20, 20]], 64)
    mask = torch.rand(3, 64, generator=seeded(1)) < 0.8
    scores = torch.rand(3, 64, generator=seeded(2))  # what the sampling draws
    anchors = sample_anchors(mask, documents, 12, seeded(2), 10)
    for row, (positions, valid) in enumerate(zip(*anchors, strict=True)):
        chosen, expected = positions[valid].tolist(), []
        for number in range(3):
            candidates = [
                t
                for t in range(63)
                if documents[row, t] == documents[row, t + 1] == number and mask[row, t] and mask[row, t + 1]
            ]
            share = sum(documents[row, t].item() == number for t in chosen)
            expected += sorted(candidates, key=lambda t: -scores[row, t])[:share]
        assert chosen == sorted(expected)
        assert len(chosen) == 12 - 2 * (row == 1)


def test_a_row_s_anchors_depend_on_its_generator_alone():
    mask, documents = torch.ones(3, 64), document_ids([[30, 20], [64], [10, 40]], 64)
    together = sample_anchors(mask, documents, 12, [seeded(5), None, seeded(7)], 9)
    for row, seed in ((0, 5), (2, 7)):
        alone = sample_anchors(mask[:1], documents[row : row + 1], 12, seeded(seed), 9)
        assert torch.equal(alone.positions[0], together.positions[row])
        assert torch.equal(alone.valid[0], together.valid[row])
    assert not together.valid[1].any()


def test_block_inputs_are_the_anchors_tokens_and_the_positions_that_follow():
    input_ids = torch.arange(100, 112)[None]
    tokens, positions = block_inputs(input_ids, position_ids(DOCUMENTS), anchors_at([[3, 7, None]]), 3)
    assert tokens.tolist() == [[103, 107, 100]]
    assert positions.tolist() == [[3, 4, 5, 2, 3, 4, 0, 1, 2]]
