import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from draftflow.drafter.loss import Objective  # noqa: E402
from draftflow.training.optimizer import Hyperparameters, Optimizer  # noqa: E402

FP32, BF16 = torch.float32, torch.bfloat16


def hyperparameters(**values):
    return Hyperparameters(steps=20, objective=Objective("decay", 4.0), learning_rate=0.05, weight_decay=0.1, **values)


def module(seed=0):
    """Matrices, of which three are of one shape when turned, and a vector."""
    torch.manual_seed(seed)
    sizes = [(7, 5), (5, 7), (7, 5), (5, 3)]
    layers = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=size == sizes[0]) for size in sizes))
    return layers.requires_grad_()


def gradients(number, sizes):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(size, generator=generator) for size in sizes]


def run(optimizer, steps, normalizer=10.0, first=0):
    """Steps with gradients that are sums over `normalizer`; the norms."""
    norms = []
    for number in range(first, steps):
        sizes = [parameter.shape for parameter in optimizer.parameters]
        for parameter, gradient in zip(optimizer.parameters, gradients(number, sizes), strict=True):
            parameter.grad = (normalizer * gradient).to(parameter.dtype)
        norms.append(optimizer.step(number, torch.tensor(normalizer)))
    return norms


def reference(kind, steps, dtype, **values):
    """torch's own optimizers on fp32 weights, with gradients rounded to `dtype`."""
    hyper, layers = hyperparameters(**values), module()
    parameters = list(layers.parameters())
    matrices, vectors = ([p for p in parameters if (p.dim() == 2) == wanted] for wanted in (True, False))
    adamw = {"betas": hyper.betas, "eps": 1e-8}
    if kind == "muon":
        made = [
            torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, weight_decay=0.0, **adamw),
        ]
    else:
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        made = [torch.optim.AdamW(groups, **adamw)]
    for number in range(steps):
        found = gradients(number, [parameter.shape for parameter in parameters])
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = (10 * gradient).to(dtype).float() / 10
        torch.nn.utils.clip_grad_norm_(parameters, hyper.clip_norm)
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = hyper.learning_rate_at(number)
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("kind", "tolerance"), [("adamw", 1e-5), ("muon", 2e-3)])  # Muon iterates in bf16
def test_updates_are_those_of_torch_on_fp32_weights(kind, tolerance, dtype):
    optimizer = Optimizer(module(), hyperparameters(optimizer=kind), dtype)
    run(optimizer, 20)
    expected, start = reference(kind, 20, dtype), list(module().parameters())
    for ours, theirs, before in zip(optimizer.masters, expected, start, strict=True):
        assert (theirs - before).norm() > 0.1 * before.norm()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
        assert parameter.dtype == dtype
        assert master.dtype == FP32
        assert torch.equal(parameter, master.to(dtype))


def test_small_updates_are_not_lost_in_bf16():
    """A thousandth of a weight is below half of bf16's distance to the next number."""
    layers = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layers.weight)
    hyper = Hyperparameters(steps=1, objective=Objective("decay", 4.0), warmup=0.0, min_learning_rate=1.0)
    optimizer = Optimizer(layers, hyper, BF16)
    for _ in range(20):
        layers.weight.grad = torch.ones(1, 1, dtype=BF16)
        optimizer.step(0, torch.tensor(1.0))
    assert optimizer.masters[0].item() == pytest.approx(1 - 20 * 6e-4, abs=1e-3)
    assert layers.weight.item() < 1


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_saved_state_goes_on_as_if_never_stopped(kind, dtype):
    straight = Optimizer(module(), hyperparameters(optimizer=kind), dtype)
    run(straight, 8)
    stopped = Optimizer(module(), hyperparameters(optimizer=kind), dtype)
    run(stopped, 5)
    state = {name: value.clone() for name, value in stopped.state().items()}
    weights = {name: value.clone() for name, value in stopped.weights().items()}
    resumed = Optimizer(module(seed=1), hyperparameters(optimizer=kind), dtype)
    resumed.load_weights(weights)
    resumed.load(state)
    run(resumed, 8, first=5)
    for one, other in zip(
        (*straight.masters, *straight.parameters), (*resumed.masters, *resumed.parameters), strict=True
    ):
        assert torch.equal(one, other)
    assert straight.state().keys() == resumed.state().keys()


IN_INTERPRETER = """
import sys
import torch
from draftflow.training.adamw_kernel import Kernel

cases = torch.load(sys.argv[1])
for case in cases:
    kernel = Kernel(case["copies"], case["weights"], case["moments"], case["squares"], case["decays"])
    for number, gradients in enumerate(case["gradients"], 1):
        kernel([gradient.clone() for gradient in gradients], torch.tensor(0.1), 0.05, (0.9, 0.95), 1e-8, number)
torch.save(cases, sys.argv[2])
"""


def test_the_kernel_does_what_plain_torch_does(tmp_path):
    """In Triton's interpreter, which needs no GPU: tensors below and above a block, in both precisions."""
    from draftflow.training.optimizer import AdamW

    cases, expected = [], []
    for dtype in (FP32, BF16):
        generator = torch.Generator().manual_seed(4)
        sizes = [(3,), (70, 60), (4096,)]
        weights = [torch.randn(size, generator=generator) for size in sizes]
        copies = weights if dtype == FP32 else [weight.to(dtype) for weight in weights]
        steps = [[torch.randn(size, generator=generator).to(dtype) for size in sizes] for _ in range(3)]
        decays = [0.0, 0.1, 0.1]
        case = {"weights": weights, "copies": copies, "gradients": steps, "decays": decays}
        case |= {name: [torch.zeros(size) for size in sizes] for name in ("moments", "squares")}
        cases.append(case)
        mine = [weight.clone() for weight in weights]
        plain = AdamW(mine if dtype == FP32 else [copy.clone() for copy in copies], mine, decays, hyperparameters())
        expected.append(plain)
    torch.save(cases, tmp_path / "cases")
    command = [sys.executable, "-c", IN_INTERPRETER, tmp_path / "cases", tmp_path / "found"]
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source})
    for plain, case, found in zip(expected, cases, torch.load(tmp_path / "found"), strict=True):
        for step in case["gradients"]:
            plain.step(step, torch.tensor(0.1), 0.05)
        for name, values in (("weights", plain.weights), ("copies", plain.copies)):
            for ours, theirs in zip(found[name], values, strict=True):
                rounding = 2**-7 if ours.dtype == BF16 else 1e-5  # the interpreter truncates
                torch.testing.assert_close(ours, theirs, rtol=rounding, atol=1e-6)
        moments = (found["moments"], found["squares"])
        for ours, theirs in zip(moments, plain.moments.values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
