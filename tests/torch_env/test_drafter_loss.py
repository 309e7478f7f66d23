import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from drafter_cases import anchors_at, document_ids  # noqa: E402

from draftflow.drafter.loss import (  # noqa: E402
    Dpace,
    block_targets,
    default_gamma,
    dpace_weights,
    even_chunks,
    head_loss,
    loss_weights,
)


def test_weights_decay_from_the_first_proposal():
    weights = loss_weights(4, gamma=2.0)
    assert weights.tolist() == pytest.approx([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)])


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4.0), (10, 5.0), (16, 7.0)])
def test_default_gammas_are_the_published_ones(block_size, gamma):
    assert default_gamma(block_size) == gamma


def test_default_gamma_rises_with_the_block_size():
    gammas = [default_gamma(size) for size in range(2, 65)]
    assert all(one < other for one, other in itertools.pairwise(gammas))


def test_position_k_predicts_the_token_at_its_own_position():
    input_ids = torch.arange(100, 120)[None]
    documents = document_ids([[20]], 20)
    labels, supervised = block_targets(input_ids, torch.ones(1, 20), documents, anchors_at([[4]]), 4)
    assert labels.tolist() == [[[0, 105, 106, 107]]]
    assert supervised.tolist() == [[[False, True, True, True]]]


def test_supervision_stops_at_row_end_document_end_and_the_first_token_not_written_by_the_target():
    input_ids = torch.arange(100, 120)[None]
    documents = document_ids([[8, 12]], 20)
    loss_mask = torch.ones(1, 20, dtype=torch.uint8)
    loss_mask[0, 12] = 0  # a user's token between supervised ones
    anchors = anchors_at([[6, 10, 13, 18, None]])
    labels, supervised = block_targets(input_ids, loss_mask, documents, anchors, 4)
    assert labels[0].tolist() == [[0, 107, 0, 0], [0, 111, 0, 0], [0, 114, 115, 116], [0, 119, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(supervised, labels > 0)


def naive(hidden, head, labels, weights):
    ce = F.cross_entropy(hidden @ head.T, labels, reduction="none")
    return (weights * ce).sum(), ce


def case(rows=37, width=16, vocabulary=50, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype)
    head = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    weights[::5] = 0
    return hidden, head, labels, weights


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradient_are_those_of_cross_entropy(chunk, dtype, tolerance):
    hidden, head, labels, weights = case(dtype=dtype)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, correct, ce = head_loss(ours, head, labels, weights, even_chunks(37, chunk))
    expected_loss, expected_ce = naive(theirs, head, labels, weights.to(dtype))
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ce, expected_ce, rtol=tolerance, atol=tolerance)
    assert torch.equal(correct, (hidden @ head.T).argmax(-1) == labels)
    (loss / 7).backward()
    (expected_loss / 7).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    assert not ce.requires_grad


def test_some_labels_are_the_best_and_some_are_not():
    hidden, head, _, weights = case()
    labels = (hidden @ head.T).argmax(-1)
    labels[::2] = (labels[::2] + 1) % 50
    _, correct, _ = head_loss(hidden, head, labels, weights, even_chunks(37, 8))
    assert torch.equal(correct, torch.arange(37) % 2 == 1)


def test_bf16_gradient_is_the_exact_one_within_its_rounding():
    hidden, head, labels, weights = case(dtype=torch.bfloat16)
    ours, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    loss, _, ce = head_loss(ours, head, labels, weights, even_chunks(37, 8))
    assert loss.dtype == ce.dtype == torch.float32
    expected, _ = naive(exact, head.double(), labels, weights.double())
    (loss / weights.sum()).backward()
    (expected / weights.double().sum()).backward()
    assert ours.grad.dtype == torch.bfloat16
    # logits of size 4 to 10 are rounded by up to 2^-9 of that, probabilities by e^rounding
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=0)
    error = (ours.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.01


def test_rows_of_weight_zero_get_no_gradient():
    hidden, head, labels, weights = case()
    hidden.requires_grad_()
    head_loss(hidden, head, labels, weights, even_chunks(37, 8))[0].backward()
    assert hidden.grad[::5].eq(0).all()
    assert hidden.grad[1].abs().sum() > 0


def test_without_gradient_the_loss_is_the_same():
    hidden, head, labels, weights = case()
    with torch.no_grad():
        plain = head_loss(hidden, head, labels, weights, even_chunks(37, 8))
    trained = head_loss(hidden.requires_grad_(), head, labels, weights, even_chunks(37, 8))
    assert all(torch.equal(one, other) for one, other in zip(plain, trained, strict=True))
    assert not plain[0].requires_grad


def test_no_rows_are_no_loss():
    hidden, head, labels, weights = case()
    hidden = hidden[:0].requires_grad_()
    loss, correct, _ = head_loss(hidden, head, labels[:0], weights[:0], even_chunks(0, 8))
    loss.backward()
    assert loss == 0
    assert correct.shape == (0,)


def test_a_hopeless_label_gives_its_loss_and_a_nan_stays_one():
    head = torch.eye(2)
    labels, weights = torch.tensor([1, 1]), torch.ones(2)
    hidden = torch.tensor([[200.0, 0.0], [torch.nan, 0.0]])
    _, correct, ce = head_loss(hidden, head, labels, weights, even_chunks(2, 2))
    assert ce[0].item() == 200.0
    assert ce[1].isnan()
    assert not correct.any()


def blocks_of(lengths):
    """Offsets of blocks that are supervised at 1 .. length."""
    return torch.cat([torch.arange(1, length + 1) for length in lengths])


def naive_dpace(ce, lengths, alpha):
    weights = []
    for part in ce.split(lengths):
        confidence = [(1 - alpha) * math.exp(-value) + alpha for value in part.tolist()]
        for k in range(len(part)):
            weights.append(sum(math.prod(confidence[: j + 1]) for j in range(k, len(part))))
    return torch.tensor(weights, dtype=ce.dtype)


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0])
def test_dpace_weighs_each_position_by_the_acceptance_that_goes_through_it(alpha):
    lengths = [3, 1, 7, 7, 2]
    ce = 4 * torch.rand(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = dpace_weights(ce, blocks_of(lengths), alpha, 8)
    torch.testing.assert_close(weights, naive_dpace(ce, lengths, alpha), rtol=1e-12, atol=0)
    if alpha == 1:
        assert weights[:5].tolist() == [3, 2, 1, 1, 7]


@pytest.mark.parametrize("chunks", [(0, 37), (0, 4, 11, 37)])
def test_dpace_is_weighted_cross_entropy_with_weights_that_get_no_gradient(chunks):
    lengths = [4, 7, 7, 1, 5, 6, 7]
    hidden, head, labels, _ = case()
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    dpace = Dpace(blocks_of(lengths), 0.5, 8)
    loss, _, losses = head_loss(ours, head, labels, torch.ones(37), chunks, dpace)
    _, ce = naive(theirs, head, labels, torch.ones(37))
    expected = (naive_dpace(ce.detach(), lengths, 0.5) * ce).sum()
    torch.testing.assert_close(losses, ce)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("chunk", [8, 37])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_divergence_and_its_gradient_are_those_of_kl_div(chunk, dtype, tolerance):
    hidden, head, labels, weights = case(dtype=dtype)
    teacher = torch.randn(37, 16, generator=torch.Generator().manual_seed(2), dtype=dtype)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, correct, losses = head_loss(ours, head, labels, weights, even_chunks(37, chunk), teacher=teacher)
    log_p, log_q = (teacher @ head.T).log_softmax(-1), (theirs @ head.T).log_softmax(-1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    expected = (weights * kl).sum()
    torch.testing.assert_close(losses, kl, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(correct, (hidden @ head.T).argmax(-1) == labels)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


def test_a_teacher_that_agrees_costs_nothing():
    hidden, head, labels, weights = case()
    teacher = hidden.clone()
    loss, _, _ = head_loss(hidden.requires_grad_(), head, labels, weights, even_chunks(37, 8), teacher=teacher)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert hidden.grad.abs().max() < 1e-12


IN_INTERPRETER = """
import sys
import torch
from draftflow.drafter import softmax, softmax_kernels

def run(kernels, logits, teacher, labels, weights):
    lse, ce, correct = kernels.statistics(logits, labels)
    teacher_lse, _, _ = kernels.statistics(teacher, labels)
    kl = kernels.divergence_(logits, teacher, lse, teacher_lse, weights, False)
    of_kl, of_ce = logits.clone(), logits.clone()
    kernels.divergence_(of_kl, teacher, lse, teacher_lse, weights, True)
    kernels.gradient_(of_ce, lse, labels, weights)
    return {"lse": lse, "ce": ce, "correct": correct, "kl": kl, "of_kl": of_kl, "of_ce": of_ce}

cases = torch.load(sys.argv[1])
torch.save([[run(kernels, *case) for kernels in (softmax, softmax_kernels)] for case in cases], sys.argv[2])
"""


def test_kernels_do_what_plain_torch_does(tmp_path):
    """In Triton's interpreter, which needs no GPU: vocabularies below, at and above a kernel's block."""
    generator = torch.Generator().manual_seed(3)
    cases = []
    for dtype, vocabulary in [(torch.float32, 50), (torch.float32, 4096), (torch.bfloat16, 4097)]:
        logits, teacher = (4 * torch.randn(6, vocabulary, generator=generator).to(dtype) for _ in range(2))
        labels = torch.randint(0, vocabulary, (6,), generator=generator)
        labels[2] = logits[2].argmax()
        logits[4], logits[5, 7] = 1e4 * logits[4], -torch.inf
        cases.append((logits, teacher, labels, torch.rand(6, generator=generator)))
    torch.save(cases, tmp_path / "cases")
    command = [sys.executable, "-c", IN_INTERPRETER, tmp_path / "cases", tmp_path / "found"]
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source})
    for (logits, *_), (plain, kernels) in zip(cases, torch.load(tmp_path / "found"), strict=True):
        assert plain["correct"].sum() >= 1
        assert not plain["correct"].all()
        for name, expected in plain.items():
            rounding = 2**-7 if expected.dtype == torch.bfloat16 else 1e-6  # the interpreter truncates
            torch.testing.assert_close(kernels[name], expected, rtol=rounding, atol=1e-6, msg=f"{name} {logits.dtype}")
