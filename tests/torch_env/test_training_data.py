from dataclasses import fields, replace
from itertools import pairwise

import pytest

pytest.importorskip("torch")

import torch
from training_cases import make_rows, make_settings

from draftflow.drafter.anchors import block_inputs
from draftflow.drafter.loss import block_targets, loss_weights
from draftflow.errors import DraftflowError
from draftflow.training.data import Batches, Rows, read_rows, row_at
from draftflow.training.plan import make_plan

SHAPE = {"block_size": 4, "vocab_size": 400, "mask_token_id": 384, "hidden_size": 64, "target_layer_ids": (1, 3)}


@pytest.fixture
def rows(tmp_path):
    make_rows(tmp_path / "rows.safetensors", train=10, held_out=3)
    return read_rows(tmp_path / "rows.safetensors", 64)


def batches(rows, rank=0, world_size=1, seed=0, anchors_per_document=None, **changes):
    plan = replace(make_plan(SHAPE, make_settings(), "cpu", world_size), **changes)
    return Batches(plan, *rows, 4.0, seed, rank, world_size, anchors_per_document)


def rows_with_gaps(count=40):
    """Rows of many documents in which supervision comes and goes, up to the row's last token."""
    generator = torch.Generator().manual_seed(0)
    documents = (torch.rand(count, 64, generator=generator) < 0.08).cumsum(1)
    documents[::3, 50:] = -1
    ids = torch.randint(0, 300, documents.shape, generator=generator)
    begins = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    index = torch.arange(64).expand(count, -1)
    positions = index - torch.where(begins, index, 0).cummax(1).values
    mask = (torch.rand(documents.shape, generator=generator) < 0.85) & (documents >= 0)
    mask[4] = False
    return Rows("train", ids.int(), documents.int(), positions.int(), mask.to(torch.uint8))


def test_every_epoch_visits_every_row_once_in_another_order():
    epochs = [[row_at(place, 10, seed=0) for place in range(start, start + 10)] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [row_at(place, 10, seed=1) for place in range(10)] != epochs[0]


def test_ranks_take_contiguous_shares_of_the_same_step(rows):
    whole = batches(rows).train(3)
    shares = [batches(rows, rank, 2).train(3) for rank in range(2)]
    assert sum((share.indices for share in shares), ()) == whole.indices
    for name in ("input_ids", "anchor_tokens", "block_positions", "labels", "weights", "offsets"):
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
        row, rest = divmod(place, 8 * 3)
        slot, k = rest // 3, rest % 3 + 1
        anchor = batch.anchors.positions[row, slot].item()
        assert k == offset
        assert batch.anchors.valid[row, slot]
        assert label == batch.input_ids[row, anchor + k]
        assert batch.document_ids[row, anchor] == batch.document_ids[row, anchor + k]
        assert batch.block_positions[row, slot * 4 + k] == batch.position_ids[row, anchor] + k
        assert batch.anchor_tokens[row, slot] == batch.input_ids[row, anchor]
    assert torch.equal(batch.weights, loss_weights(4, 4.0)[batch.offsets])


@pytest.mark.parametrize("block_size", [2, 4, 10, 16])
def test_blocks_and_what_they_predict_equal_the_reference(block_size):
    rows = rows_with_gaps()
    source = batches((rows, rows), block_size=block_size, anchors=30)
    seen = 0
    for step in range(8):
        batch = source.train(step)
        mask = rows.loss_mask[list(batch.indices)]
        tokens, positions = block_inputs(batch.input_ids, batch.position_ids, batch.anchors, block_size)
        labels, supervised = block_targets(batch.input_ids, mask, batch.document_ids, batch.anchors, block_size)
        assert torch.equal(batch.anchor_tokens, tokens)
        assert torch.equal(batch.block_positions, positions)
        assert torch.equal(batch.supervised, supervised[:, :, 1:].flatten().nonzero().squeeze(1))
        assert torch.equal(batch.labels, labels[supervised])
        assert torch.equal(batch.offsets, torch.arange(block_size).expand_as(labels)[supervised])
        seen += len(batch.labels)
    assert seen > 8 * 4 * 10


@pytest.mark.parametrize("loss_chunk", [1, 3, 4, 7, 20, 1000])
def test_chunks_hold_whole_blocks_and_are_as_few_as_can_be(rows, loss_chunk):
    batch = batches(rows, loss_chunk=loss_chunk).train(0)
    blocks = (batch.supervised // 3).unique_consecutive(return_counts=True)[1].tolist()
    assert max(blocks) == 3
    assert batch.chunks[0] == 0
    assert batch.chunks[-1] == len(batch.labels)
    ends = torch.tensor(blocks).cumsum(0).tolist()
    assert set(batch.chunks[1:]) <= set(ends)
    assert all(0 < end - start <= max(loss_chunk, 3) for start, end in pairwise(batch.chunks))
    fewest = [0]  # for the blocks so far, by trying every last chunk
    for last in range(1, len(blocks) + 1):
        fits = [first for first in range(last) if first == last - 1 or sum(blocks[first:last]) <= loss_chunk]
        fewest.append(1 + min(fewest[first] for first in fits))
    assert len(batch.chunks) - 1 == fewest[-1]


def test_a_batch_without_blocks_has_no_chunks():
    rows = rows_with_gaps()
    nothing = replace(rows, loss_mask=torch.zeros_like(rows.loss_mask))
    batch = batches((nothing, nothing)).train(0)
    assert batch.chunks == (0,)
    assert not batch.anchors.valid.any()
    assert len(batch.supervised) == len(batch.labels) == len(batch.weights) == 0


def test_documents_keep_to_their_budget(rows):
    for limit, most in ((None, 8), (2, 2)):
        batch = batches(rows, anchors_per_document=limit).train(0)
        found = torch.where(batch.anchors.valid, batch.document_ids.gather(1, batch.anchors.positions), -1)
        counts = torch.stack([(found == number).sum(1) for number in range(3)], dim=1)
        assert counts.max() <= most
        assert (counts[counts > 0] == 2).all() == (limit == 2)
        # no document is left out
        assert torch.equal((counts > 0).sum(1), batch.document_ids.amax(1) + 1)


def test_a_batch_moves_as_one_piece_of_memory_and_keeps_its_documents_on_the_host(rows):
    batch = batches(rows).train(0)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    assert moved.host_document_ids is batch.host_document_ids
    assert torch.equal(batch.host_document_ids, batch.document_ids)
    assert moved.chunks == batch.chunks
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors |= {f"anchors.{name}": value for name, value in tensors.pop("anchors")._asdict().items()}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    assert len({value.untyped_storage().data_ptr() for value in tensors.values()}) == 1
    for name, value in tensors.items():
        holder = moved.anchors if name.startswith("anchors.") else moved
        other = getattr(holder, name.removeprefix("anchors."))
        assert (other.shape, other.dtype) == (value.shape, value.dtype), name
        assert other.device.type == ("cpu" if name == "host_document_ids" else "meta"), name
        assert value.dtype in (torch.int64, torch.bool, torch.float32), name


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
