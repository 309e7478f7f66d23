"""The target on a GPU: packed attention against a dense mask, without waiting, in memory that grows with the tokens."""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch import Tensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from draftflow.target.features import FeatureExtractor  # noqa: E402
from draftflow.target.load import Target  # noqa: E402
from draftflow.target.replayed import TOKENS_PER_DOCUMENT, Replayed, worth_replaying  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTH, TAPS = 512, [1, 3, 5]


def make_target(kind: str = "llama", **changes: Any) -> Target:
    config = AutoConfig.for_model(
        kind,
        **{
            "hidden_size": 384,
            "intermediate_size": 512,
            "num_hidden_layers": 7,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 1000,
            **changes,
        },
    )
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False), {})


def rows(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows, on the host: many documents (one of a single token) and padding; one document."""
    ids = torch.randint(0, 1000, (2, length), generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([length // 2, 1, length // 4, 5, length // 8])
    documents = torch.full((2, length), -1)
    documents[0, : sizes.sum()] = torch.arange(5).repeat_interleave(sizes)
    documents[1] = 0
    index = torch.arange(length).expand(2, -1)
    begins = torch.ones(2, length, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return ids, documents, index - torch.where(begins, index, 0).cummax(1).values


def dense(target: Target, ids: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
    """Features by way of a mask [B, 1, S, S] for SDPA; sliding layers get their band."""
    decoder = target.model.get_decoder()
    index = torch.arange(ids.shape[1], device=ids.device)
    distance = index[:, None] - index
    seen = (documents[:, None, :, None] == documents[:, None, None, :]) & (distance >= 0)
    hidden = decoder.embed_tokens(ids)
    angles = decoder.rotary_emb(hidden, position_ids=positions)
    tapped = []
    for number, layer in enumerate(decoder.layers[: TAPS[-1] + 1]):
        window = getattr(layer.self_attn, "sliding_window", None)
        mask = seen if window is None else seen & (distance < window)
        hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        tapped += [hidden] if number in TAPS else []
    return torch.cat(tapped, dim=-1)


def error(features: Tensor, exact: Tensor) -> float:
    return ((features.float() - exact).norm() / exact.norm()).item()


SLIDING = {"layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"], "use_sliding_window": True}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"hidden_size": 240, "head_dim": 40}),
        ("qwen3", {"head_dim": 128}),
        *(("qwen3", {**SLIDING, "sliding_window": window}) for window in (1, 17, 256, 4096)),
    ],
)
def test_packed_attention_is_attention_with_a_dense_mask(kind: str, changes: dict[str, Any]) -> None:
    target = make_target(kind, **changes)
    ids, documents, positions = rows()
    with torch.no_grad():
        exact = dense(target, ids, documents, positions).cuda()
        target.model.cuda()
        on_gpu = ids.cuda(), documents.cuda(), positions.cuda()
        found = FeatureExtractor(target, TAPS)(on_gpu[0], documents, on_gpu[2])
        assert error(found, exact) < 1e-5  # fp32: another order of sums
        target.model.bfloat16()
        found = FeatureExtractor(target, TAPS)(on_gpu[0], documents, on_gpu[2])
        masked = dense(target, *on_gpu)
    assert found.dtype == torch.bfloat16
    # both are bf16 roundings of one function: neither may be further from it than the other but for chance
    assert error(found, exact) < 1.3 * error(masked, exact)
    assert error(masked, exact) < 0.02


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_compiled_layers_are_as_exact(kind: str) -> None:
    target = make_target(kind)
    ids, documents, positions = rows()
    with torch.no_grad():
        exact = dense(target, ids, documents, positions).cuda()
        target.model.cuda().bfloat16()
        extract = FeatureExtractor(target, TAPS)
        launched = error(extract(ids.cuda(), documents, positions.cuda()), exact)
        torch._dynamo.reset()
        extract.compile_layers()
        compiled = error(extract(ids.cuda(), documents, positions.cuda()), exact)
    assert compiled < 1.1 * launched


def test_replayed_features_are_the_launched_ones() -> None:
    target = make_target()
    target.model.cuda().bfloat16()
    torch._dynamo.reset()
    extract = FeatureExtractor(target, TAPS)
    extract.compile_layers()
    replayed = Replayed(extract)
    assert worth_replaying(extract, 2 * LENGTH)
    assert not worth_replaying(extract, 2**30)
    ids, documents, positions = rows()
    most = 2 * LENGTH // TOKENS_PER_DOCUMENT
    lengths = [LENGTH, LENGTH // 2, TOKENS_PER_DOCUMENT, 8]  # the last are more documents than there is room for
    others = [torch.arange(LENGTH).expand(2, -1) // length for length in lengths]
    assert 2 * LENGTH // lengths[2] == most
    ids, positions = ids.cuda(), positions.cuda()
    for number, ids_of in enumerate((documents, *others, documents)):
        shifted = (ids + number) % 1000
        expected = extract(shifted, ids_of, positions)
        assert torch.equal(replayed(shifted, ids_of, positions), expected), number
    assert replayed._graph is not None
    few = ids[:1], documents[:1], positions[:1]
    assert torch.equal(replayed(*few), extract(*few))  # rows of another shape
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = replayed(ids, documents, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, extract(ids, documents, positions))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        replayed(ids, documents, positions)
        torch.cuda.synchronize()
    launches = sum(event.count for event in found.key_averages() if event.key == "cudaLaunchKernel")
    assert launches < TAPS[-1] + 1, launches


def test_it_is_the_flash_kernel_and_nothing_waits() -> None:
    target = make_target()
    target.model.cuda().bfloat16()
    ids, documents, positions = rows()
    extract = FeatureExtractor(target, TAPS)
    ids, positions = ids.cuda(), positions.cuda()
    extract(ids, documents, positions)  # the first call looks the device up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        extract(ids, documents, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        extract(ids, documents, positions)
        torch.cuda.synchronize()
    flash = {event.key: event.count for event in found.key_averages() if "flash" in event.key}
    assert sum(flash.values()) == TAPS[-1] + 1, flash
    # a mask would take elementwise kernels over [S, S], math attention a softmax
    assert not [event.key for event in found.key_averages() if "softmax" in event.key.lower()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_grows_with_the_tokens(dtype: torch.dtype) -> None:
    target = make_target(num_hidden_layers=2)
    target.model.cuda().to(dtype)
    extract = FeatureExtractor(target, [0])

    def peak(length: int) -> int:
        ids, documents, positions = rows(length)
        ids, positions = ids.cuda(), positions.cuda()
        extract(ids, documents, positions)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        extract(ids, documents, positions)
        return torch.cuda.max_memory_allocated() - before

    short, long = peak(4096), peak(16384)
    assert long < 5 * short
    assert long < 16384**2 * 2  # the mask of two rows alone
    print(f"{dtype}: {short / 2**20:.1f} MiB at 2 x 4096 tokens, {long / 2**20:.1f} MiB at 2 x 16384")
