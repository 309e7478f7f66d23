"""Linear layers in float8 where the fast products are: their numbers, and training with them beside bf16."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "torch_env"))

import torch.nn.functional as F  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from training_cases import FOR_GPU, make_case, make_settings  # noqa: E402

from draftflow.compile_cache.exercise import kernels_of  # noqa: E402
from draftflow.drafter import float8  # noqa: E402
from draftflow.environment.builds import detect_gpus  # noqa: E402
from draftflow.training.data import read_rows  # noqa: E402
from draftflow.training.devices import resolve_devices  # noqa: E402
from draftflow.training.plan import FLOAT8_CAPABILITY, plan_of_run  # noqa: E402
from draftflow.training.process import make_process  # noqa: E402
from draftflow.training.step import read_statistics  # noqa: E402
from draftflow.training.worker import hyperparameters  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.get_device_capability() < FLOAT8_CAPABILITY, reason="needs float8 products"),
]

LENGTH, STEPS, LAYERS = 1024, 100, 2


def run(function, x, weight, g):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight)
    y.backward(g)
    return y.detach(), x.grad, weight.grad


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("rows", [1024, 513])  # 513 is no multiple of 16
@pytest.mark.parametrize("compiled", [False, True])
def test_output_and_gradients_are_those_of_fp64_to_the_rounding_of_float8(rows, compiled):
    generator = torch.Generator("cuda").manual_seed(0)
    x, g = (torch.randn(1, rows, size, generator=generator, device="cuda") for size in (512, 768))
    x = x * torch.randn(1, rows, 1, generator=generator, device="cuda").exp()
    weight = torch.randn(768, 512, generator=generator, device="cuda") * 0.02
    given = [value.bfloat16() for value in (x, weight, g * 1e-5)]
    linear = torch.compile(float8.linear, fullgraph=True, dynamic=False) if compiled else float8.linear
    found = run(linear, *given)
    expected = run(F.linear, *(value.double() for value in given))
    for name, ours, right, limit in zip(("y", "dX", "dW"), found, expected, (0.05, 0.05, 0.08), strict=True):
        assert 0.01 < error(ours, right) < limit, name


def test_what_a_row_is_divided_by_is_what_its_result_is_multiplied_by():
    """Also where the row is made in the same graph and its largest value rounds up to a power of two."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, factor = (torch.randn(8192, 256, generator=generator, device="cuda").bfloat16() for _ in range(2))
    x[:, 7], factor[:, 7] = 32 * 1.984375, 1.0078125  # 63.996: 64 in bf16
    weight = (torch.randn(512, 256, generator=generator, device="cuda") * 0.02).bfloat16()
    compiled = torch.compile(lambda x, factor: float8.linear(x * factor, weight), fullgraph=True, dynamic=False)
    expected = F.linear((x * factor).double(), weight.double())
    off = (compiled(x, factor).double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert off.max() < 0.1


@pytest.mark.parametrize("shape", [(512, 256), (513, 4096), (130, 48)])
def test_the_kernel_that_turns_a_matrix_turns_it(shape):
    x, _ = float8.round_rows(torch.randn(shape, device="cuda"))
    found = float8.transposed(x)
    assert torch.equal(found.float()[:, : shape[0]], x.float().t())
    assert found.shape[1] % 16 == 0
    assert not found.float()[:, shape[0] :].any()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A target whose heads fit the GPU's attention, and rows of whole tiles."""
    rows = {"train": 60, "held_out": 6, "length": LENGTH}
    return make_case(tmp_path_factory.mktemp("case"), rows, **FOR_GPU)


def process_in(precision, case):
    devices = resolve_devices(1, detect_gpus())
    changes = {"steps": STEPS, "learning_rate": 1.5e-4, "rows_per_step": 2, "anchors_per_row": 64}
    settings = {**make_settings(devices, precision=precision, **changes), "row_length": LENGTH}
    shape, plan = plan_of_run(settings, case["target"], "cuda", 1)
    rows = read_rows(case["rows"], LENGTH)
    return make_process(shape, plan, hyperparameters(settings), rows, case["target"], 0.0)


def products_of(process, batch):
    """Float8 products that a step calls which is not replayed."""
    process.step.forget()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        process.step.train(batch, STEPS - 1)
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages() if event.key == "aten::_scaled_mm")


def test_a_hundred_steps_track_those_in_bf16_and_the_products_are_float8(case):
    losses, products = {}, {}
    for precision in ("bf16", "fp8"):
        torch._dynamo.reset()
        process = process_in(precision, case)
        batches = process.batches
        found = [process.step.train(batches.train(n).to(process.device), n) for n in range(STEPS)]
        found = torch.stack(found).cpu()
        held_out = read_statistics(process.step.evaluate(batches.held_out()))[0]
        losses[precision] = torch.tensor([*(found[:, 0] / found[:, 1]).view(4, -1).mean(1), held_out])
        batch = batches.train(0).to(process.device)
        products[precision] = products_of(process, batch)
        kernels = kernels_of(lambda p=process, b=batch: p.step.train(b, STEPS - 1))
        assert ("draftflow_float8_transpose" in kernels) == (precision == "fp8")
    assert losses["bf16"][3] < 0.1 * losses["bf16"][0]
    # The same batches; each product is some 4 % off, the weights' gradients 6 %, and neither has a direction: the steep
    # part shifts by a step or two. In the end the loss is next to nothing.
    torch.testing.assert_close(losses["fp8"], losses["bf16"], rtol=0.1, atol=0.05)
    # q, k and v of the context and of the rows, o, and three of the MLP, each of them forward and twice backward; fc,
    # whose features need no gradient
    assert products == {"bf16": 0, "fp8": LAYERS * 3 * 9 + 2}
