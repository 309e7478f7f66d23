import pytest

pytest.importorskip("torch")

import torch
from drafter_cases import tiny_shape
from training_cases import make_rows, make_settings

from draftflow.training.data import Batches, read_rows
from draftflow.training.features import Colocated, fits_beside_step
from draftflow.training.memory import step_bound
from draftflow.training.plan import make_plan

SHAPE = {"block_size": 4, "vocab_size": 400, "mask_token_id": 384, "hidden_size": 2, "target_layer_ids": (1, 3)}
ROW_BYTES = 64 * 4 * 4


class Extractor:
    """Features that are known from the token, the document and the position; remembers its shapes."""

    def __init__(self):
        self.shapes = []

    def __call__(self, input_ids, document_ids, position_ids):
        self.shapes.append(tuple(input_ids.shape))
        return torch.stack([input_ids, document_ids, position_ids, input_ids * position_ids], dim=-1).float()


@pytest.fixture
def make(tmp_path):
    make_rows(tmp_path / "rows.safetensors", train=10, held_out=3)
    rows = read_rows(tmp_path / "rows.safetensors", 64)
    plan = make_plan(SHAPE, make_settings(), "cpu", 1)
    batches = Batches(plan, *rows, gamma=4.0, seed=0, rank=0, world_size=1)

    def source(remembered_rows):
        extractor = Extractor()
        counts = {"train": 10, "held_out": 3}
        limit = remembered_rows * ROW_BYTES / 1e9
        return Colocated(extractor, plan, counts, limit, torch.device("cpu")), extractor

    return batches, source


def expected(batch):
    return Extractor()(batch.input_ids, batch.document_ids, batch.position_ids)


@pytest.mark.parametrize("remembered", [0, 1, 5, 13, 1000])
def test_features_are_the_extractor_s_whatever_is_remembered(make, remembered):
    batches, source = make
    features, _ = source(remembered)
    for batch in [*(batches.train(step) for step in range(8)), *batches.held_out()]:
        assert torch.equal(features(batch), expected(batch))


def test_rows_that_were_seen_are_not_computed_again(make):
    batches, source = make
    features, extractor = source(13)
    for step in range(5):  # two epochs of ten rows
        features(batches.train(step))
    assert (features.hits, features.misses) == (10, 10)
    before = len(extractor.shapes)
    features(batches.train(5))
    assert len(extractor.shapes) == before


def test_memory_is_never_more_than_the_limit(make):
    batches, source = make
    features, _ = source(5.9)
    for step in range(10):
        features(batches.train(step))
    assert features.hits == 5 * 3  # five rows of ten, each seen four times


def test_the_target_always_runs_in_one_shape(make):
    batches, source = make
    features, extractor = source(5)
    for step in range(8):
        features(batches.train(step))
    assert set(extractor.shapes) == {(4, 64)}


def test_held_out_rows_are_not_taken_for_training_rows(make):
    batches, source = make
    features, _ = source(13)
    for step in range(3):
        features(batches.train(step))
    (held_out,) = batches.held_out()
    assert torch.equal(features(held_out), expected(held_out))


def test_features_stay_on_a_gpu_only_where_the_step_has_room_beside_them():
    plan = make_plan(vars(tiny_shape()), {**make_settings(), "row_length": 128}, "cuda", 1)
    step = step_bound(plan, 0)["total"]
    small = step // 100
    assert fits_beside_step(plan, small, step + small)
    assert not fits_beside_step(plan, small, step + small - 1)
    assert not fits_beside_step(plan, 3 * step, 10 * step)
    assert fits_beside_step(plan, 2 * step, 10 * step)
