"""The kernels in Triton's interpreter, which needs no GPU, against dense attention in fp64."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from drafter_cases import anchors_at, document_ids  # noqa: E402

from draftflow.drafter.block_attention import Intervals, fits  # noqa: E402
from draftflow.drafter.mask import allowed  # noqa: E402

IN_INTERPRETER = """
import sys
import torch
from triton.runtime import interpreter

patch = interpreter._patch_lang_tensor

def patched(tensor, *rest):
    patch(tensor, *rest)
    tensor.__index__ = lambda self: int(self.handle.data.item())  # numpy 2.4 takes no array of one number for a number

interpreter._patch_lang_tensor = patched
from draftflow.drafter.anchors import Anchors
from draftflow.drafter.block_attention import backward, forward, intervals

found = []
for case in torch.load(sys.argv[1]):
    anchors, documents = Anchors(*case["anchors"]), case["documents"]
    seen = intervals(anchors, documents)
    arguments = [case[name].requires_grad_() for name in ("q", "k", "v")]
    out, lse = forward(*arguments, *seen)
    found.append((out.detach(), lse, *torch.autograd.grad(out, arguments, case["do"])))
    utilities = ["test_schema", "test_faketensor"]
    torch.library.opcheck(forward, (*arguments, *seen), test_utils=[*utilities, "test_autograd_registration"])
    details = (case["do"], *(x.detach() for x in arguments), out.detach(), lse, *seen)
    torch.library.opcheck(backward, details, test_utils=utilities)
torch.save(found, sys.argv[2])
"""

# documents of each row, slots, block size, query and key heads, width, precision; the last slots are not valid
CASES = [
    ([[90, 60, 50], [130]], 9, 8, 6, 2, 16, torch.float32),
    ([[100, 150]], 11, 10, 4, 1, 16, torch.float32),  # a tile of queries is not full
    ([[256]], 5, 16, 8, 1, 32, torch.float32),
    ([[40, 40, 50]], 6, 7, 3, 1, 16, torch.float32),  # three heads share a key head and lie in three tiles
    ([[13] * 30], 40, 4, 2, 2, 16, torch.float32),  # a tile of queries has many documents
    ([[120]], 4, 32, 8, 1, 16, torch.float32),  # eight heads share a key head, of which four have room in a tile
    ([[150]], 5, 16, 4, 1, 16, torch.float16),  # the interpreter has no products in bf16
]


def make_case(documents, slots, block_size, heads, kv_heads, width, dtype):
    generator = torch.Generator().manual_seed(slots)
    length = max(map(sum, documents)) + 7
    ids = document_ids(documents, length)
    picked = [torch.randperm(sum(row), generator=generator)[: slots - 2].sort().values.tolist() for row in documents]
    anchors = anchors_at([[*row, None, None] for row in picked])
    queries = slots * block_size

    def draw(rows, count):
        """[B, rows, heads, D] in memory, as projections leave it."""
        values = torch.randn(len(documents), rows, count, width, generator=generator)
        return values.transpose(1, 2).to(dtype)

    columns = length + queries
    case = {"q": draw(queries, heads), "k": draw(columns, kv_heads), "v": draw(columns, kv_heads)}
    return case | {
        "do": draw(queries, heads),
        "anchors": tuple(anchors),
        "documents": ids,
        "block_size": block_size,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    cases = [make_case(*case) for case in CASES]
    torch.save(cases, folder / "cases")
    command = [sys.executable, "-c", IN_INTERPRETER, folder / "cases", folder / "found"]
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source})
    return list(zip(cases, torch.load(folder / "found"), strict=True))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_attention_and_its_gradients_are_those_of_dense_attention(results, number):
    from draftflow.drafter.anchors import Anchors

    case, (out, lse, *gradients) = results[number]
    mask = allowed(Anchors(*case["anchors"]), case["documents"], case["block_size"])
    inputs = [case[name].double().requires_grad_() for name in ("q", "k", "v")]
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    expected.backward(case["do"].double())
    group = case["q"].shape[1] // case["k"].shape[1]
    scores = inputs[0] @ inputs[1].repeat_interleave(group, dim=1).mT * case["q"].shape[-1] ** -0.5
    sums = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    rounding = 1e-6 if case["q"].dtype == torch.float32 else 2e-3
    torch.testing.assert_close(lse.double(), sums * 1.4426950408889634, rtol=rounding, atol=rounding)
    for ours, theirs in zip((out, *gradients), (expected, *(value.grad for value in inputs)), strict=True):
        assert ours.dtype == case["q"].dtype
        assert (ours.double() - theirs).norm() < rounding * theirs.norm()


def test_what_no_block_sees_gets_no_gradient(results):
    case, (_, _, _, dk, dv) = results[1]
    last = int(case["anchors"][0].max())  # the anchor itself is no context
    length = case["documents"].shape[1]
    for gradient in (dk, dv):
        assert not gradient[:, :, last:length].any()
        assert gradient[:, :, last - 1].any()


@pytest.mark.parametrize(
    ("major", "shared_memory", "fit"),
    [
        (8, 163 * 2**10, True),  # A100
        (8, 99 * 2**10, False),  # GPUs of desktops
        (9, 227 * 2**10, True),  # H100, H200
        (10, 227 * 2**10, False),  # B200
        (12, 99 * 2**10, False),
    ],
)
def test_kernels_are_for_gpus_that_have_room_for_their_tiles(monkeypatch, major, shared_memory, fit):
    found = SimpleNamespace(major=major, shared_memory_per_block_optin=shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert fits(torch.device("cuda"), torch.bfloat16, 128) is fit


class Launches(list):
    """Takes the place of a kernel, keeps what it is launched with."""

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.append((arguments, constants))


SIGNATURE = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", int: "i32", float: "fp32"}


@pytest.mark.parametrize(("target", "shared_memory"), [(80, 163 * 2**10), (90, 227 * 2**10)])
@pytest.mark.parametrize("name", ["forward", "backward_queries", "backward_context"])
def test_tiles_of_large_blocks_and_groups_have_room(monkeypatch, name, target, shared_memory):
    triton = pytest.importorskip("triton")
    from draftflow.drafter import block_attention_kernels as kernels

    launched = {other: Launches() for other in ("forward", "backward_queries", "backward_context")}
    kernel = getattr(kernels, f"draftflow_attention_{name}")
    for other, launches in launched.items():
        monkeypatch.setattr(kernels, f"draftflow_attention_{other}", launches)
    blocks, block_size, context, heads, kv_heads = 4, 64, 256, 16, 2
    with torch.device("meta"):
        q, k = (
            torch.empty(2, count, rows, 128, dtype=torch.bfloat16)
            for count, rows in ((heads, blocks * block_size), (kv_heads, context + blocks * block_size))
        )
        start, seen_by = (torch.empty(shape, dtype=torch.int32) for shape in ((2, blocks), (2, 4, 4)))
    found = Intervals(start, start, seen_by)
    kernels.backward(q, q, k, k, *kernels.forward(q, k, k, found), found)

    ((arguments, constants),) = launched[name]
    options = {option: constants.pop(option) for option in ("num_warps", "num_stages")}
    kinds = [SIGNATURE[value.dtype if isinstance(value, torch.Tensor) else type(value)] for value in arguments]
    signature = dict(zip(kernel.arg_names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (place,): aligned
        for place, value in enumerate(arguments)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
    }
    source = triton.compiler.ASTSource(
        kernel, signature, {(kernel.arg_names.index(one),): value for one, value in constants.items()}, attributes
    )
    gpu = triton.backends.compiler.GPUTarget("cuda", target, 32)
    assert triton.compile(source, target=gpu, options=options).metadata.shared <= shared_memory
