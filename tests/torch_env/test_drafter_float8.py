"""Linear layers in float8 against fp64, with the real float8 products of the CPU.

Rounding to e4m3 changes a value by 1/16 at most and by 1/37 in the mean square, to e5m2 by twice that; a product of
two operands shows the root of the sum of squares of both.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from drafter_cases import tiny_shape
from torch._dynamo.utils import counters

from draftflow.drafter import float8
from draftflow.drafter.model import Drafter, Linear

LEAST, OUTPUT, OF_WEIGHT = 0.01, 0.05, 0.08  # below the least nothing was float8
BF16, FP32 = torch.bfloat16, torch.float32


def operands(rows=64, inputs=128, outputs=96, dtype=BF16, seed=0):
    """x [2, rows, inputs], weight, and the gradient of the output; rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(2, rows, size, generator=generator) for size in (inputs, outputs))
    sizes = torch.randn(2, 2, rows, 1, generator=generator).exp()
    weight = torch.randn(outputs, inputs, generator=generator) * 0.02
    return (x * sizes[0]).to(dtype), weight.to(dtype), (g * sizes[1] * 1e-5).to(dtype)


def run(function, x, weight, g):
    """Output, gradient of x, gradient of the weight."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight)
    y.backward(g)
    return y.detach(), x.grad, weight.grad


def in_fp64(x, weight, g):
    return run(F.linear, x.double(), weight.double(), g.double())


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rows", [64, 33, 1])  # 33: 66 rows are no multiple of 16
def test_output_and_gradients_are_those_of_fp64_to_the_rounding_of_float8(rows, dtype):
    given = operands(rows, dtype=dtype)
    y, of_x, of_weight = run(float8.linear, *given)
    assert (y.dtype, of_x.dtype, of_weight.dtype) == (dtype, dtype, dtype)
    expected = in_fp64(*given)
    assert LEAST < error(y, expected[0]) < OUTPUT
    assert LEAST < error(of_x, expected[1]) < OUTPUT
    assert LEAST < error(of_weight, expected[2]) < OF_WEIGHT


def test_a_row_of_a_thousand_times_the_size_costs_no_other_row_its_bits():
    x, weight, g = operands()
    x[0, 3], g[1, 5] = x[0, 3] * 4096, g[1, 5] * 4096
    y, of_x, _ = run(float8.linear, x, weight, g)
    expected = in_fp64(x, weight, g)
    for found, right in ((y, expected[0]), (of_x, expected[1])):
        errors = [error(row, of_row) for row, of_row in zip(found.flatten(0, 1), right.flatten(0, 1), strict=True)]
        assert max(errors) < 1.5 * OUTPUT  # each of 96 or 128 values
    weight[7] = weight[7] * 4096
    assert torch.equal(float8.linear(x, weight)[:, :, :7], y[:, :, :7])


def test_the_gradient_of_a_weight_keeps_small_tokens_beside_a_large_one():
    """Columns of x that the one large token does not have get their gradient from the others."""
    x, weight, g = operands()
    x[0, 0, :64] = 0
    x[0, 0, 64:] *= 2**12
    x[:, 1:, 64:] = 0
    x[1, :, 64:] = 0
    _, _, of_weight = run(float8.linear, x, weight, g)
    expected = in_fp64(x, weight, g)[2]
    assert error(of_weight[:, :64], expected[:, :64]) < OF_WEIGHT


def test_zeros_stay_zeros():
    x, weight, g = operands()
    zero = torch.zeros_like
    y, of_x, of_weight = run(float8.linear, zero(x), weight, g)
    assert (y.abs().max(), of_weight.abs().max()) == (0, 0)
    assert of_x.isfinite().all()
    assert of_x.abs().max() > 0
    y, of_x, of_weight = run(float8.linear, x, zero(weight), zero(g))
    assert (y.abs().max(), of_x.abs().max(), of_weight.abs().max()) == (0, 0, 0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_makes_its_own_row_so_and_no_other(value):
    x, weight, g = operands()
    y = float8.linear(x, weight)
    x[1, 4, 9] = value
    found, _, of_weight = run(float8.linear, x, weight, g)
    assert not found[1, 4].isfinite().any()
    assert not of_weight.isfinite().all()
    found[1, 4] = y[1, 4]
    assert torch.equal(found, y)


def test_a_row_does_not_depend_on_the_others_not_even_in_its_rounding():
    x, weight, _ = operands()
    y = float8.linear(x, weight)
    other = torch.randn_like(x) * 1000
    other[1, 11] = x[1, 11]
    assert torch.equal(float8.linear(other, weight)[1, 11], y[1, 11])


def test_scales_are_powers_of_two_that_leave_the_largest_in_range():
    largest = torch.cat([torch.rand(1000), 2.0 ** torch.arange(-99, 120), torch.tensor([0.0, 1e-45, 1.99, 448.0])])
    scale, inverse = float8.scale_of(largest)
    assert torch.equal(scale * inverse, torch.ones_like(scale))
    assert torch.equal(scale.log2(), scale.log2().round())
    scaled = largest * inverse
    assert scaled.max() < 2**8
    assert scaled[largest >= 2.0**-100].min() >= 2**7
    assert float8.scale_of(torch.tensor([float("inf"), float("nan")]))[0].isinf().all()


def test_what_needs_no_gradient_gets_none():
    x, weight, g = operands()
    weight.requires_grad_()
    float8.linear(x, weight).backward(g)
    assert x.grad is None
    assert error(weight.grad, in_fp64(x, weight.detach(), g)[2]) < OF_WEIGHT


@pytest.mark.parametrize("rows", [64, 33])
def test_compiled_it_is_one_graph_that_the_cache_takes_and_does_the_same(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    given = operands(rows)
    compiled = torch.compile(float8.linear, fullgraph=True, dynamic=False)
    before = dict(counters["aot_autograd"])
    found = run(compiled, *given)
    # float8 of the other side of a tie, where the compiler multiplies in another order
    for ours, eager in zip(found, run(float8.linear, *given), strict=True):
        assert error(ours, eager.double()) < 5e-3
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given[:2]), found[0])
    now = counters["aot_autograd"]
    assert now["autograd_cache_bypass"] == before.get("autograd_cache_bypass", 0)
    assert now["autograd_cache_miss"] > before.get("autograd_cache_miss", 0)


def test_a_drafter_multiplies_in_float8_where_the_sides_allow_it():
    drafter = Drafter(tiny_shape(intermediate_size=88))
    drafter.use_float8()
    layers = {name: module.float8 for name, module in drafter.named_modules() if isinstance(module, Linear)}
    assert {name.rpartition(".")[2] for name, on in layers.items() if not on} == {"gate_proj", "up_proj", "down_proj"}
    assert sum(layers.values()) == 1 + 4 * len(drafter.layers)
    x = torch.randn(5, 64)
    q_proj, gate_proj = drafter.layers[0].self_attn.q_proj, drafter.layers[0].mlp.gate_proj
    assert error(q_proj(x), F.linear(x, q_proj.weight).double()) > LEAST
    assert torch.equal(gate_proj(x), F.linear(x, gate_proj.weight))
    drafter.use_float8(False)
    assert torch.equal(q_proj(x), F.linear(x, q_proj.weight))


IN_INTERPRETER = """
import sys
import torch
from draftflow.drafter import float8_kernels

cases = torch.load(sys.argv[1])
torch.save([float8_kernels.transpose(*case) for case in cases], sys.argv[2])
"""


def test_the_kernel_that_turns_a_matrix_does_what_plain_torch_does(tmp_path):
    """In Triton's interpreter, which needs no GPU: sides below, at and above a tile, with and without rows to add."""
    sizes = [(16, 48, 16), (33, 160, 48), (128, 128, 128), (270, 144, 272)]
    cases = [(torch.randn(rows, columns).to(torch.float8_e4m3fn), padded) for rows, columns, padded in sizes]
    torch.save(cases, tmp_path / "cases")
    command = [sys.executable, "-c", IN_INTERPRETER, tmp_path / "cases", tmp_path / "found"]
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source})
    for (x, padded), found in zip(cases, torch.load(tmp_path / "found"), strict=True):
        assert found.shape == (x.shape[1], padded)
        assert torch.equal(found.float(), float8.transposed(x).float())
        assert torch.equal(found.float()[:, : len(x)], x.float().t())
