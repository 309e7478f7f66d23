"""The compiled GPU path against the dense one on the CPU, and proofs that it is the fused path."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

from draftflow.drafter.anchors import Anchors, sample_anchors  # noqa: E402
from draftflow.drafter.attention import attend, forbid_dense  # noqa: E402
from draftflow.drafter.block_attention import fits  # noqa: E402
from draftflow.drafter.loss import block_targets, even_chunks, head_loss  # noqa: E402
from draftflow.drafter.mask import Kind, block_mask, block_masks, layer_masks  # noqa: E402
from draftflow.drafter.model import Drafter  # noqa: E402
from draftflow.drafter.shape import DrafterShape  # noqa: E402
from draftflow.errors import DraftflowError  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTH, COUNT = 384, 40
MIXED: dict[str, Any] = {"sliding_window": 150, "sliding_layers": (0, 1)}


def shape_of(block_size: int = 8, **sliding: Any) -> DrafterShape:
    return DrafterShape(
        hidden_size=192,
        intermediate_size=256,
        layers=3,
        heads=3,
        kv_heads=1,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=512,
        vocab_size=1000,
        block_size=block_size,
        mask_token_id=999,
        target_layer_ids=(1, 3),
        num_target_layers=8,
        bos_token_id=None,
        eos_token_ids=(0,),
        **sliding,
    )


def batch(shape: DrafterShape, seed: int = 0) -> tuple[Tensor, Anchors, tuple[Tensor, ...]]:
    """Two packed rows with invalid slots: document ids, anchors, and what a drafter takes but for its mask."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.full((2, LENGTH), -1)
    for row, ends in zip(documents, ((150, 384), (20, 60)), strict=True):
        row[: ends[0]], row[ends[0] : ends[1]] = 0, 1
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    index = torch.arange(LENGTH).expand(2, -1)
    positions = index - torch.where(begins, index, 0).cummax(1).values
    anchors = sample_anchors(torch.ones_like(documents), documents, COUNT, generator)
    anchors.valid[1, -4:] = False
    offsets = torch.arange(shape.block_size)
    block_positions = (positions.gather(1, anchors.positions)[:, :, None] + offsets).flatten(1)
    features = torch.randn(2, LENGTH, 2 * shape.hidden_size, generator=generator)
    embeddings = torch.randn(2, COUNT, shape.hidden_size, generator=generator)
    mask_embedding = torch.randn(shape.hidden_size, generator=generator)
    return documents, anchors, (features, embeddings, mask_embedding, positions, block_positions)


def hidden_and_gradients(drafter: Drafter, masks: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    drafter.zero_grad()
    hidden = drafter(*inputs, *masks)
    # not the norm of the output, which RMSNorm makes constant
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden.device)
    (hidden.float() * direction).mean().backward()
    return hidden.detach().float().cpu(), {
        name: value.grad.cpu().clone() for name, value in drafter.named_parameters() if value.grad is not None
    }


def on_gpu(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(value.cuda().to(dtype) if value.is_floating_point() else value.cuda() for value in inputs)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.set_float32_matmul_precision("highest")


def assert_same_as_dense(shape: DrafterShape, dtype: torch.dtype, tolerance: float) -> None:
    # tolerances are of the norm: fp32 sums in another order; bf16 keeps 8 bits, and three layers add up
    documents, anchors, inputs = batch(shape)
    drafter = Drafter(shape, torch.Generator().manual_seed(0))
    expected, expected_gradients = hidden_and_gradients(drafter, layer_masks(anchors, documents, shape, dtype), inputs)
    drafter.cuda().compile_layers()
    masks = layer_masks(anchors.to("cuda"), documents.cuda(), shape, dtype)
    with forbid_dense():
        hidden, gradients = hidden_and_gradients(drafter, masks, on_gpu(inputs, dtype))

    def error(value: Tensor, reference: Tensor) -> float:
        return ((value - reference).norm() / reference.norm()).item()

    assert error(hidden, expected) < tolerance
    assert gradients.keys() == expected_gradients.keys()
    assert max(error(gradients[name], expected_gradients[name]) for name in gradients) < tolerance * 2
    assert all(value.dtype == torch.float32 for value in gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [4, 8, 10, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_compiled_flex_is_the_dense_drafter(block_size: int, dtype: torch.dtype, tolerance: float) -> None:
    assert_same_as_dense(shape_of(block_size), dtype, tolerance)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_drafter_of_few_layers_is_the_dense_one(layers: int) -> None:
    assert_same_as_dense(replace(shape_of(16), layers=layers), torch.bfloat16, 3e-2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size"), [(8, 2, 128, 16), (9, 3, 64, 16), (4, 4, 32, 16), (8, 1, 128, 32)]
)
def test_own_kernels_are_the_dense_drafter(heads: int, kv_heads: int, width: int, block_size: int) -> None:
    shape = replace(shape_of(block_size), heads=heads, kv_heads=kv_heads, head_dim=width)
    assert fits(torch.device("cuda:0"), torch.bfloat16, width)
    assert_same_as_dense(shape, torch.bfloat16, 3e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "sliding"),
    [
        (8, MIXED),
        (10, {**MIXED, "sliding_window": 40}),
        (16, {"sliding_window": 16, "sliding_layers": (0, 2), "sliding_causal": False}),
        (8, {"sliding_window": 1000, "sliding_layers": (0, 1, 2)}),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_compiled_flex_with_sliding_layers_is_the_dense_drafter(
    block_size: int, sliding: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    assert_same_as_dense(shape_of(block_size, **sliding), dtype, tolerance)


@pytest.mark.parametrize(("sliding", "graphs"), [({}, 4), (MIXED, 5)], ids=["full", "full and sliding"])
@pytest.mark.parametrize("own", [True, False], ids=["own kernels", "flex alone"])
def test_steps_and_layers_between_share_one_graph_of_fused_kernels_per_kind(
    sliding: dict[str, Any], graphs: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own:
        monkeypatch.setattr("draftflow.drafter.mask.fits", lambda *_: False)
    # the norm of the context, the first layer, those between of one kind or of both, the last layer
    shape = replace(shape_of(**sliding), layers=5)
    drafter = Drafter(shape, torch.Generator().manual_seed(0)).cuda()
    drafter.compile_layers()
    counters.clear()

    def step(seed: int) -> None:
        documents, anchors, inputs = batch(shape, seed)
        masks = layer_masks(anchors.to("cuda"), documents.cuda(), shape, torch.bfloat16)
        hidden_and_gradients(drafter, masks, on_gpu(inputs, torch.bfloat16))

    with forbid_dense():
        step(0)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for seed in range(1, 3):
                step(seed)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                step(3)
    assert counters["stats"]["unique_graphs"] == graphs
    kernels = {event.key for event in profile.key_averages()}
    kinds = {"draftflow_attention": own, "triton_tem": bool(sliding) or not own}
    for kind, expected in kinds.items():
        for backward in (True, False):
            found = [name for name in kernels if name.startswith(kind) and ("backward" in name) == backward]
            assert bool(found) == expected, (kind, backward, kernels)


@pytest.mark.parametrize("causal", [True, False])
def test_drafting_on_the_gpu_is_that_on_the_cpu(causal: bool) -> None:
    shape = shape_of(sliding_window=20, sliding_layers=(0, 1), sliding_causal=causal)
    _, _, (features, embeddings, mask_embedding, _, _) = batch(shape)
    rows = torch.cat([embeddings[:1, :1], mask_embedding.expand(1, shape.block_size - 1, -1)], dim=1)
    drafter = Drafter(shape, torch.Generator().manual_seed(0))
    drafted = []
    for device in ("cpu", "cuda"):
        drafter.to(device)
        cache, known = drafter.new_cache(), 0
        with forbid_dense(), torch.no_grad():
            for anchor in (15, 120, 122):
                positions = torch.arange(known, anchor + shape.block_size, device=device)[None]
                drafted.append(
                    drafter.draft(features[:1, known:anchor].to(device), rows.to(device), positions, cache).cpu()
                )
                known = anchor
    for one, other in zip(drafted[:3], drafted[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # fp32 sums in another order


def test_memory_is_far_below_the_dense_scores() -> None:
    heads, count, block_size, length = 8, 256, 16, 2048
    queries = count * block_size
    documents = torch.zeros(1, length, dtype=torch.long)
    anchors = sample_anchors(torch.ones(1, length), documents, count, torch.Generator().manual_seed(0))
    mask = block_mask(anchors.to("cuda"), documents.cuda(), block_size)
    q, k, v = (
        torch.randn(1, heads, rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for rows in (queries, length + queries, length + queries)
    )
    compiled = torch.compile(attend, dynamic=False, fullgraph=True)
    compiled(q, k, v, mask).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compiled(q, k, v, mask).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * heads * queries * (length + queries) / 10


def test_dense_attention_is_refused() -> None:
    x = torch.randn(1, 2, 256, 64, device="cuda")
    with pytest.raises(DraftflowError, match="dense mask"):
        attend(x, x, x, torch.ones(1, 1, 256, 256, dtype=torch.bool, device="cuda"))
    with forbid_dense():
        with pytest.raises(DraftflowError, match=r"\[1, 2, 256, 256\] take 524,288 bytes"):
            flex_attention(x, x, x)
        with pytest.raises(DraftflowError, match="dense"):
            torch.compile(flex_attention, disable=True)(x, x, x)
        torch.compile(flex_attention, fullgraph=True)(x, x, x)


def test_a_dense_call_at_training_length_raises_in_milliseconds_and_takes_no_memory() -> None:
    q = torch.randn(1, 32, 8192, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 8192, 8192, device="cuda")
    calls = {
        "attend": lambda: attend(q, k, k, mask),
        "flex_attention": lambda: flex_attention(q, k, k, block_mask=mask, enable_gqa=True),
    }
    seconds = {}
    with forbid_dense():
        for name, call in calls.items():
            start = time.perf_counter()
            with pytest.raises(DraftflowError, match=r"\[1, 32, 8192, 8192\] take 8,589,934,592 bytes \(8.00 GiB\)"):
                call()
            seconds[name] = time.perf_counter() - start
    print("raised after", {name: f"{value * 1e3:.2f} ms" for name, value in seconds.items()})
    assert seconds["attend"] < 0.005
    assert seconds["flex_attention"] < 1  # torch prepares the dense call before it makes it
    assert torch.cuda.max_memory_allocated() - before < 2**30


def without_sync(function: Callable[[], Any]) -> Any:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_targets_and_loss_do_not_wait_for_the_gpu(dtype: torch.dtype) -> None:
    shape = shape_of()
    documents, anchors, _ = batch(shape)
    cuda_documents, cuda_anchors = documents.cuda(), anchors.to("cuda")
    kinds = (Kind(), Kind(150, True), Kind(16))
    masks = without_sync(lambda: block_masks(cuda_anchors, cuda_documents, shape.block_size, kinds))
    for mask, same in zip(masks, block_masks(anchors, documents, shape.block_size, kinds), strict=True):
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "q_num_blocks", "q_indices"):
            assert torch.equal(getattr(mask, name).cpu(), getattr(same, name)), name
        assert torch.equal(mask.full_q_indices.cpu(), same.full_q_indices)

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, documents.shape, generator=generator)
    expected = block_targets(ids, torch.ones_like(ids), documents, anchors, shape.block_size)
    cuda_ids = ids.cuda()
    ones = torch.ones_like(cuda_ids)
    targets = without_sync(lambda: block_targets(cuda_ids, ones, cuda_documents, cuda_anchors, shape.block_size))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(targets, expected, strict=True))

    hidden = torch.randn(expected[0].numel(), 192, generator=generator).to(dtype)
    head = torch.randn(1000, 192, generator=generator).mul(0.3).to(dtype)
    labels, weights = expected[0].flatten(), expected[1].flatten().float()
    exact = hidden.double().requires_grad_()
    expected_loss = (weights * F.cross_entropy(exact @ head.double().T, labels, reduction="none")).sum()
    expected_loss.backward()
    arguments = (
        hidden.cuda().requires_grad_(),
        head.cuda(),
        labels.cuda(),
        weights.cuda(),
        even_chunks(len(labels), 100),
    )
    loss, _, _ = without_sync(lambda: head_loss(*arguments))
    without_sync(loss.backward)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # bf16 keeps 8 bits of a logit
    assert loss.item() == pytest.approx(expected_loss.item(), rel=tolerance)
    error = (arguments[0].grad.cpu().double() - exact.grad).norm() / exact.grad.norm()
    assert error < tolerance
