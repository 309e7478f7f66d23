import itertools
import math

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from drafter_cases import anchors_at, document_ids  # noqa: E402

from draftflow.drafter.loss import block_targets, default_gamma, linear_cross_entropy, loss_weights  # noqa: E402


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
    loss, correct, ce = linear_cross_entropy(ours, head, labels, weights, chunk)
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
    _, correct, _ = linear_cross_entropy(hidden, head, labels, weights, 8)
    assert torch.equal(correct, torch.arange(37) % 2 == 1)


def test_bf16_gradient_is_the_exact_one_within_its_rounding():
    hidden, head, labels, weights = case(dtype=torch.bfloat16)
    ours, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    loss, _, ce = linear_cross_entropy(ours, head, labels, weights, 8)
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
    linear_cross_entropy(hidden, head, labels, weights, 8)[0].backward()
    assert hidden.grad[::5].eq(0).all()
    assert hidden.grad[1].abs().sum() > 0


def test_without_gradient_the_loss_is_the_same():
    hidden, head, labels, weights = case()
    with torch.no_grad():
        plain = linear_cross_entropy(hidden, head, labels, weights, 8)
    trained = linear_cross_entropy(hidden.requires_grad_(), head, labels, weights, 8)
    assert all(torch.equal(one, other) for one, other in zip(plain, trained, strict=True))
    assert not plain[0].requires_grad


def test_no_rows_are_no_loss():
    hidden, head, labels, weights = case()
    hidden = hidden[:0].requires_grad_()
    loss, correct, _ = linear_cross_entropy(hidden, head, labels[:0], weights[:0], 8)
    loss.backward()
    assert loss == 0
    assert correct.shape == (0,)


def test_a_hopeless_label_gives_a_finite_loss_and_a_nan_stays_one():
    head = torch.eye(2)
    labels, weights = torch.tensor([1, 1]), torch.ones(2)
    hidden = torch.tensor([[200.0, 0.0], [torch.nan, 0.0]])
    _, correct, ce = linear_cross_entropy(hidden, head, labels, weights, 2)
    assert ce[0].item() == pytest.approx(87.34, abs=0.01)
    assert ce[1].isnan()
    assert not correct.any()
