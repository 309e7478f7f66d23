"""A batch on its way to a GPU."""

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from draftflow.training.data import Batch, Batches, rows_of_one_token  # noqa: E402
from draftflow.training.plan import make_plan  # noqa: E402

pytestmark = pytest.mark.gpu


def make_batches() -> Batches:
    shape = {"block_size": 8, "vocab_size": 1000, "mask_token_id": 999, "target_layer_ids": (1, 3)}
    settings = {"row_length": 512, "rows_per_step": 4, "anchors_per_row": 64, "precision": "auto"}
    plan = make_plan(shape, settings, "cuda", 1)
    rows = rows_of_one_token(plan, 6)
    return Batches(plan, rows, rows, 4.0, 0, 0, 1)


def test_a_batch_arrives_whole_by_one_copy_without_waiting() -> None:
    batches = make_batches()
    device = torch.device("cuda:0")
    batches.train(0).to(device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        torch.cuda.set_sync_debug_mode("error")
        try:
            batch = batches.train(1)
            moved = batch.to(device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    copies = {event.key: event.count for event in found.key_averages() if event.key.startswith("Memcpy")}
    assert list(copies.values()) == [1], copies
    assert "Pinned" in next(iter(copies)), copies
    assert_equal(moved, batch)


def test_held_out_batches_arrive_as_well() -> None:
    for batch in make_batches().held_out():
        assert_equal(batch.to(torch.device("cuda:0")), batch)


def assert_equal(moved: Batch, batch: Batch) -> None:
    for name in ("input_ids", "document_ids", "position_ids", "anchor_tokens", "block_positions"):
        assert torch.equal(getattr(moved, name).cpu(), getattr(batch, name)), name
    for name in ("supervised", "labels", "offsets", "weights"):
        assert torch.equal(getattr(moved, name).cpu(), getattr(batch, name)), name
    assert all(torch.equal(one.cpu(), other) for one, other in zip(moved.anchors, batch.anchors, strict=True))
    assert moved.supervised.is_cuda
    assert not moved.host_document_ids.is_cuda
    assert moved.chunks == batch.chunks
    assert moved.weights.numel() > 100
