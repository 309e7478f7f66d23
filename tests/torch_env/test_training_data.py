import pytest

pytest.importorskip("torch")

import torch
from training_cases import make_rows, make_settings

from draftflow.drafter.loss import loss_weights
from draftflow.errors import DraftflowError
from draftflow.training.data import Batches, read_rows, row_at
from draftflow.training.plan import make_plan

SHAPE = {"block_size": 4, "vocab_size": 400, "mask_token_id": 384, "hidden_size": 64, "target_layer_ids": (1, 3)}


@pytest.fixture
def rows(tmp_path):
    make_rows(tmp_path / "rows.safetensors", train=10, held_out=3)
    return read_rows(tmp_path / "rows.safetensors", 64)


def batches(rows, rank=0, world_size=1, seed=0):
    plan = make_plan(SHAPE, make_settings(), "cpu", world_size)
    return Batches(plan, *rows, gamma=4.0, seed=seed, rank=rank, world_size=world_size)


def test_every_epoch_visits_every_row_once_in_another_order():
    epochs = [[row_at(place, 10, seed=0) for place in range(start, start + 10)] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [row_at(place, 10, seed=1) for place in range(10)] != epochs[0]


def test_ranks_take_contiguous_shares_of_the_same_step(rows):
    whole = batches(rows).train(3)
    shares = [batches(rows, rank, 2).train(3) for rank in range(2)]
    assert sum((share.indices for share in shares), ()) == whole.indices
    for name in ("input_ids", "block_tokens", "block_positions", "labels", "weights", "offsets"):
        assert torch.equal(torch.cat([getattr(share, name) for share in shares]), getattr(whole, name)), name
    assert torch.equal(torch.cat([share.anchors.positions for share in shares]), whole.anchors.positions)


def test_a_step_is_a_function_of_its_number(rows):
    one = batches(rows)
    for step in range(5):
        one.train(step)
    again, fresh = one.train(2), batches(rows).train(2)
    assert again.indices == fresh.indices
    assert torch.equal(again.anchors.positions, fresh.anchors.positions)


def test_a_row_has_other_anchors_when_it_comes_again(rows):
    seen = {}
    for step in range(5):
        batch = batches(rows).train(step)
        for row, index in enumerate(batch.indices):
            seen.setdefault(index, set()).add(tuple(batch.anchors.positions[row].tolist()))
    assert all(len(anchors) == 2 for anchors in seen.values())  # 20 places, 10 rows


def test_labels_are_the_tokens_behind_the_anchor_in_the_same_document(rows):
    batch = batches(rows).train(0)
    assert len(batch.labels) > 50
    for place, label, offset in zip(batch.supervised.tolist(), batch.labels, batch.offsets.tolist(), strict=True):
        row, rest = divmod(place, 8 * 4)
        slot, k = divmod(rest, 4)
        anchor = batch.anchors.positions[row, slot].item()
        assert k == offset >= 1
        assert batch.anchors.valid[row, slot]
        assert label == batch.input_ids[row, anchor + k]
        assert batch.document_ids[row, anchor] == batch.document_ids[row, anchor + k]
        assert batch.block_positions[row, slot * 4 + k] == batch.position_ids[row, anchor] + k
        assert batch.block_tokens[row, slot * 4 + k] == 384
    assert torch.equal(batch.weights, loss_weights(4, 4.0)[batch.offsets])


@pytest.mark.parametrize("world_size", [1, 2])
def test_held_out_batches_hold_every_row_once_with_the_same_anchors(rows, world_size):
    found = {}
    for rank in range(world_size):
        for batch in batches(rows, rank, world_size).held_out():
            assert batch.input_ids.shape == (4 // world_size, 64)
            for row, index in enumerate(batch.indices):
                if batch.anchors.valid[row].any():
                    assert index not in found
                    found[index] = batch.anchors.positions[row].tolist()
    assert found == {row: batches(rows).held_out()[0].anchors.positions[row].tolist() for row in range(3)}


def test_devices_have_equally_many_held_out_batches(rows):
    assert [len(batches(rows, rank, 4).held_out()) for rank in range(4)] == [1, 1, 1, 1]


def test_rows_of_another_length_and_empty_splits_are_refused(rows, tmp_path):
    with pytest.raises(DraftflowError, match="Rows have 64 tokens and the plan says 128"):
        read_rows(tmp_path / "rows.safetensors", 128)
    make_rows(tmp_path / "empty.safetensors", held_out=0)
    with pytest.raises(DraftflowError, match="no held_out rows"):
        read_rows(tmp_path / "empty.safetensors", 64)
