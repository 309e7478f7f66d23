"""Checks of the compiled path, where it exists: fused kernels are seen at work, and a leak is found."""

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from draftflow.checks.compiled import fused_check  # noqa: E402
from draftflow.checks.mask import mask_checks  # noqa: E402
from draftflow.compile_cache.exercise import kernels_of  # noqa: E402
from draftflow.drafter.anchors import Anchors  # noqa: E402
from draftflow.drafter.block_attention import intervals  # noqa: E402
from draftflow.drafter.mask import block_mask  # noqa: E402
from draftflow.drafter.model import Drafter  # noqa: E402
from draftflow.drafter.shape import DrafterShape  # noqa: E402
from draftflow.training.plan import FLOAT8_CAPABILITY  # noqa: E402

pytestmark = pytest.mark.gpu

FITS_FLOAT8 = torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
LENGTH = 384
SHAPE = DrafterShape(
    hidden_size=192,
    intermediate_size=256,
    layers=2,
    heads=3,
    kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=4096,
    vocab_size=500,
    block_size=8,
    mask_token_id=499,
    target_layer_ids=(1, 3),
    num_target_layers=8,
    bos_token_id=None,
    eos_token_ids=(2,),
)


@pytest.fixture
def drafter():
    torch.set_float32_matmul_precision("highest")
    drafter = Drafter(SHAPE, torch.Generator().manual_seed(0)).to("cuda")
    drafter.compile_layers()
    return drafter


@pytest.fixture
def inputs():
    """Embedding, features and a row of two documents and padding."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator).to("cuda")
    features = torch.randn(LENGTH, 2 * SHAPE.hidden_size, generator=generator).to("cuda")
    lengths = (200, 150, LENGTH - 350)
    row = {
        "input_ids": torch.randint(SHAPE.vocab_size, (LENGTH,), generator=generator),
        "document_ids": torch.cat([torch.full((n,), d) for n, d in zip(lengths, (0, 1, -1), strict=True)]),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "loss_mask": torch.arange(LENGTH) % 200 >= 60,
    }
    row["loss_mask"][350:] = False
    return embedding, features, {name: value.to("cuda") for name, value in row.items()}


FLOAT8 = pytest.param(torch.bfloat16, True, marks=pytest.mark.skipif(not FITS_FLOAT8, reason="needs float8 products"))


# flex_attention, and kernels of our own
@pytest.mark.parametrize(("dtype", "in_float8"), [(torch.float32, False), (torch.bfloat16, False), FLOAT8])
def test_the_compiled_mask_leaks_nothing(drafter, inputs, dtype, in_float8):
    drafter.use_float8(in_float8)
    embedding, features, row = inputs
    assert {check.check: check.passed for check in mask_checks(drafter, embedding, features.to(dtype), row)} == {
        "mask_leak": True,
        "mask_reach": True,
    }


def test_a_compiled_mask_that_shows_the_anchor_is_seen(drafter, inputs):
    def shifted(anchors, document_ids, block_size):
        return block_mask(Anchors(anchors.positions + 1, anchors.valid), document_ids, block_size)

    assert mask_checks(drafter, *inputs, shifted)[0].passed is False


@pytest.mark.parametrize("own", [True, False])
def test_fused_kernels_are_seen_at_work(drafter, inputs, own):
    torch._dynamo.reset()
    embedding, features, row = inputs
    anchors = Anchors(torch.tensor([[80, 100, 290]], device="cuda"), torch.ones(1, 3, dtype=torch.bool, device="cuda"))
    documents = row["document_ids"][None]
    mask = intervals(anchors, documents) if own else block_mask(anchors, documents, SHAPE.block_size)
    positions = row["position_ids"][None], torch.arange(24, device="cuda")[None]

    def forward() -> torch.Tensor:
        return drafter(features[None].bfloat16(), embedding[None, :3], embedding[SHAPE.mask_token_id], *positions, mask)

    forward().float().sum().backward()
    forward_only = fused_check(kernels_of(forward))
    found = fused_check(kernels_of(lambda: forward().float().sum().backward()))
    assert (forward_only.passed, found.passed) == (False, True), (forward_only.figure, found.figure)
