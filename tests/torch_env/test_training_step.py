import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from training_cases import make_case, make_loop

from draftflow.checks.weights import drafter_checks
from draftflow.drafter.loss import Objective
from draftflow.drafter.mask import allowed
from draftflow.drafter.model import Drafter
from draftflow.errors import DraftflowError
from draftflow.training.metrics import expected_acceptance_length
from draftflow.training.optimizer import Hyperparameters, Optimizer
from draftflow.training.process import make_process, use_device
from draftflow.training.step import read_statistics

DECAY = Objective("decay", 4.0)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture
def loop(case, tmp_path):
    return make_loop(case, tmp_path)


def reference_loss(loop, drafter, batch, features):
    """The loss, written out: logits of every proposal, no chunks, no selection."""
    step = loop.process.step
    size, objective = step.plan.block_size, step.objective
    taps = len(drafter.shape.target_layer_ids) * drafter.shape.hidden_size
    embed_weight = step.target.embed_weight
    embeddings = embed_weight[batch.anchor_tokens], embed_weight[drafter.shape.mask_token_id]
    mask = allowed(batch.anchors, batch.document_ids, size)
    hidden = drafter(features[..., :taps], *embeddings, batch.position_ids, batch.block_positions, mask)
    logits = hidden.flatten(0, 1) @ step.target.head_weight.T
    labels = torch.full((len(logits),), -100)
    weights = torch.zeros(len(logits))
    labels[batch.supervised], weights[batch.supervised] = batch.labels, batch.weights
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    normalizer = weights.sum()
    if objective.kind == "dpace":
        weights, normalizer = torch.zeros_like(weights), 0
        for block, ce in enumerate(losses.detach().view(-1, size - 1)):
            places = (labels.view(-1, size - 1)[block] >= 0).nonzero().flatten().tolist()
            q = [objective.alpha + (1 - objective.alpha) * math.exp(-ce[k]) for k in places]
            reached = [math.prod(q[: i + 1]) for i in range(len(q))]
            for i, k in enumerate(places):
                weights[block * (size - 1) + k] = sum(reached[i:])
            normalizer += bool(places)
    elif objective.kind == "kl":
        losses = divergences(step, batch, logits, labels)
    return (losses * weights).sum() / normalizer, logits, labels


def divergences(step, batch, logits, labels):
    """KL from the whole target's own distribution, which is asked document by document."""
    slots, count = step.plan.block_size - 1, step.plan.anchors
    losses = []
    for place in range(len(logits)):
        row, block, k = place // (count * slots), place // slots, place % slots + 1
        if labels[place] < 0:
            losses.append(logits.new_zeros(()))
            continue
        at = int(batch.anchors.positions.flatten()[block]) + k - 1
        document = batch.document_ids[row] == batch.document_ids[row, at]
        before = int(document[:at].sum())
        target = step.target.model(batch.input_ids[row][document][None]).logits[0, before]
        losses.append(F.kl_div(logits[place].log_softmax(-1), target.softmax(-1), reduction="sum"))
    return torch.stack(losses)


@pytest.mark.parametrize("kind", ["dpace", "kl"])
def test_other_losses_have_the_gradient_of_their_formula(case, tmp_path, kind):
    loop = make_loop(case, tmp_path, loss=kind, rows_per_step=2)
    step, batch = loop.process.step, loop.process.batches.train(0)
    reference = Drafter(step.drafter.shape, torch.Generator().manual_seed(loop.hyper.seed))
    features = loop.process.source(batch)
    loss, _, _ = reference_loss(loop, reference, batch, features)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in step.drafter.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: found.__setitem__(name, parameter.grad.clone())
        )
    statistics = step.train(batch, 0)
    assert read_statistics(statistics[:-1])[0] == pytest.approx(loss.item(), rel=1e-5)
    assert statistics[-1].item() == pytest.approx(norm.item(), rel=1e-4)
    for name, parameter in reference.named_parameters():
        theirs = parameter.grad
        assert (found[name] / statistics[1] - theirs).norm() < 1e-4 * theirs.norm() + 1e-7, name


def test_three_hundred_steps_in_bf16_track_those_in_fp32(case, tmp_path):
    losses = {}
    for precision in ("fp32", "bf16"):
        loop = make_loop(case, tmp_path / precision, precision=precision, steps=300, learning_rate=1e-3)
        step = loop.process.step
        assert step.drafter.fc.weight.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        found = torch.stack([step.train(loop.process.batches.train(number), number) for number in range(300)])
        losses[precision] = found[:, 0] / found[:, 1]
    thirds = {name: values.view(3, 100).mean(1) for name, values in losses.items()}
    assert thirds["fp32"][2] < 0.7 * thirds["fp32"][0]
    # the same batches; what differs is rounding, which shifts the steep part by a step or two and does not pile up
    torch.testing.assert_close(thirds["bf16"], thirds["fp32"], rtol=0.05, atol=0)


def test_two_hundred_steps_in_float8_track_those_in_fp32(case, tmp_path):
    losses = {}
    for precision in ("fp32", "bf16"):
        loop = make_loop(case, tmp_path / precision, precision=precision, steps=200, learning_rate=1e-3)
        step = loop.process.step
        step.drafter.use_float8(precision == "bf16")
        assert step.drafter.fc.float8 == step.drafter.layers[1].mlp.down_proj.float8 == (precision == "bf16")
        found = torch.stack([step.train(loop.process.batches.train(number), number) for number in range(200)])
        held_out = read_statistics(step.evaluate(loop.process.batches.held_out()))[0]
        losses[precision] = torch.tensor([*(found[:, 0] / found[:, 1]).view(4, 50).mean(1), held_out])
    assert losses["fp32"][3] < 0.7 * losses["fp32"][0]
    # the same batches; each product is some 4 % off, the weights' gradients 6 %, and neither has a direction
    torch.testing.assert_close(losses["bf16"], losses["fp32"], rtol=0.05, atol=0)


def test_float8_is_asked_of_a_device_that_trains_and_not_of_one_that_runs_the_target(case, loop, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    plan = replace(loop.process.step.plan, device_kind="cuda", precision="bfloat16", float8=True)
    assert use_device(plan).type == "cuda"
    arguments = (loop.process.step.drafter.shape, plan, loop.hyper, (), case["target"], 0.0)
    checked = partial(drafter_checks, case["target"], case["target"], {}, plan)
    for work in (partial(make_process, *arguments), checked):
        with pytest.raises(DraftflowError, match=r"training.precision: .*NVIDIA A100 \(compute capability 8.0\)"):
            work()


def test_steps_equal_plain_autograd_clipping_and_adamw(loop):
    step, hyper = loop.process.step, loop.hyper
    reference = Drafter(step.drafter.shape, torch.Generator().manual_seed(hyper.seed))
    groups = [
        {"params": [p for p in reference.parameters() if p.dim() == 2], "weight_decay": hyper.weight_decay},
        {"params": [p for p in reference.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=hyper.betas)
    for number in range(3):
        batch = loop.process.batches.train(number)
        features = loop.process.source(batch)
        loss, logits, labels = reference_loss(loop, reference, batch, features)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), hyper.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = hyper.learning_rate_at(number)
        adamw.step()

        statistics = step.train(batch, number)
        found, accuracy = read_statistics(statistics[:-1])
        # fp32 rounding of two orders of summation
        assert found == pytest.approx(loss.item(), rel=1e-5)
        assert statistics[-1].item() == pytest.approx(norm.item(), rel=1e-4)
        right = (logits.argmax(-1) == labels).view(-1, 3)
        supervised = (labels >= 0).view(-1, 3)
        assert accuracy == pytest.approx((right.sum(0) / supervised.sum(0)).tolist())
    for (name, ours), theirs in zip(step.drafter.named_parameters(), reference.parameters(), strict=True):
        # Adam divides by the root of the second moment, so a rounding error of a small gradient grows
        assert torch.allclose(ours, theirs, atol=2e-4), name


def test_evaluation_is_the_loss_before_the_next_step_and_changes_nothing(loop):
    step, batch = loop.process.step, loop.process.batches.train(0)
    step.train(batch, 0)
    before = {name: value.clone() for name, value in step.drafter.state_dict().items()}
    loss, accuracy = read_statistics(step.evaluate([batch]))
    assert all(torch.equal(value, before[name]) for name, value in step.drafter.state_dict().items())
    assert all(parameter.grad is None for parameter in step.drafter.parameters())
    trained_loss, trained_accuracy = read_statistics(step.train(batch, 1)[:-1])
    assert (loss, accuracy) == (pytest.approx(trained_loss, rel=1e-6), trained_accuracy)


def test_filled_up_batches_do_not_count_in_evaluation(loop):
    step, (held_out,) = loop.process.step, loop.held_out
    assert held_out.indices == (0, 1, 2, 2)
    statistics = step.evaluate([held_out])
    assert statistics[1].item() == pytest.approx(held_out.weights.sum().item())
    rows = held_out.supervised // (8 * 3)
    assert rows.max() == 2


def test_a_batch_without_supervision_moves_nothing_but_by_decay(loop):
    step, (held_out,) = loop.process.step, loop.held_out
    empty = held_out.__class__(
        **{
            **vars(held_out),
            "supervised": torch.zeros(0, dtype=torch.int64),
            "labels": torch.zeros(0, dtype=torch.int64),
            "offsets": torch.zeros(0, dtype=torch.int64),
            "weights": torch.zeros(0),
            "chunks": (0,),
        }
    )
    norms = {name: value.clone() for name, value in step.drafter.state_dict().items() if value.dim() == 1}
    statistics = step.train(empty, 0)
    assert statistics[-1].item() == 0.0
    assert all(torch.equal(step.drafter.state_dict()[name], value) for name, value in norms.items())
    assert all(value.isfinite().all() for value in step.drafter.state_dict().values())


def test_equal_seeds_give_equal_weights_and_others_do_not(case, tmp_path):
    weights = [
        make_loop(case, tmp_path / str(number), seed=seed).process.step.drafter.fc.weight
        for number, seed in enumerate((0, 0, 1))
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_learning_rate_rises_and_falls_to_its_least():
    hyper = Hyperparameters(steps=100, objective=DECAY, learning_rate=1.0, warmup=0.1, min_learning_rate=0.2)
    rates = [hyper.learning_rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert all(before > after for before, after in pairwise(rates[9:]))
    assert rates[54] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 45 / 90)) / 2)
    assert rates[-1] == pytest.approx(0.2)
    assert Hyperparameters(steps=1, objective=DECAY, learning_rate=1.0, warmup=0.0).learning_rate_at(
        0
    ) == pytest.approx(0.1)


def test_gradient_is_divided_by_the_sum_of_weights_before_it_is_clipped():
    module = torch.nn.Linear(2, 2, bias=False)
    optimizer = Optimizer(module, Hyperparameters(steps=1, objective=DECAY, clip_norm=1.0), torch.float32)
    module.weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]]) * 10
    assert optimizer.step(0, torch.tensor(100.0)).item() == pytest.approx(0.5)
    assert module.weight.grad is None
    moment = optimizer.state()["weight.exp_avg"]
    assert torch.allclose(moment, 0.1 * torch.tensor([[0.3, 0.0], [0.0, 0.4]]))  # below the limit: not clipped


def test_expected_acceptance_length_is_one_and_the_products_of_accuracies():
    assert expected_acceptance_length([0.5, 0.5, 1.0]) == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    assert expected_acceptance_length([0.0, 1.0]) == 1.0
