"""Resuming and the number of processes do not change the numbers. Eager: what is compiled is tested in its own file."""

import pytest

pytest.importorskip("torch")

import torch
import torch.multiprocessing as mp
from training_cases import make_case, make_loop, read_metrics, train_as_rank

from draftflow.training.checkpoint import latest


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def uninterrupted(case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert make_loop(case, folder).run()
    return folder


def stop_after(loop, step):
    """Have the loop's signal arrive while it works on `step`."""
    train = loop.process.step.train

    def wrapped(batch, number):
        if number + 1 == step:
            loop.stop()
        return train(batch, number)

    loop.process.step.train = wrapped


def same_run(folder, other):
    assert read_metrics(folder / "metrics.jsonl") == read_metrics(other / "metrics.jsonl")
    one, two = latest(folder / "checkpoints"), latest(other / "checkpoints")
    assert one.step == two.step == 12
    assert all(torch.equal(value, two.weights()[name]) for name, value in one.weights().items())
    assert all(torch.equal(value, two.trainer()[name]) for name, value in one.trainer().items())


@pytest.mark.parametrize("step", [1, 3, 6, 10, 11])
def test_a_stopped_run_that_resumes_is_exactly_the_uninterrupted_one(case, uninterrupted, tmp_path, step):
    loop = make_loop(case, tmp_path)
    stop_after(loop, step)
    assert not loop.run()
    assert latest(tmp_path / "checkpoints").step == step
    again = make_loop(case, tmp_path)
    assert again.run()
    assert again.facts["resumed_from"] == step
    same_run(tmp_path, uninterrupted)


def test_a_killed_run_goes_on_from_its_last_checkpoint_and_its_metrics_hold_no_step_twice(
    case, uninterrupted, tmp_path
):
    loop = make_loop(case, tmp_path)
    train = loop.process.step.train
    loop.process.step.train = lambda batch, number: train(batch, number) if number < 11 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        loop.run()
    assert latest(tmp_path / "checkpoints").step == 10
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 11, "loss": 1.0, "half of a li')
    assert make_loop(case, tmp_path).run()
    same_run(tmp_path, uninterrupted)


def test_a_damaged_newest_checkpoint_costs_its_steps_only(case, uninterrupted, tmp_path):
    loop = make_loop(case, tmp_path)
    stop_after(loop, 11)
    loop.run()
    (tmp_path / "checkpoints/step-000011/trainer.safetensors").write_bytes(b"damaged")
    again = make_loop(case, tmp_path)
    assert again.step == 10
    assert again.run()
    same_run(tmp_path, uninterrupted)


def test_the_loss_falls(uninterrupted):
    lines = read_metrics(uninterrupted / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 1


def test_a_smaller_feature_cache_gives_the_same_run(case, uninterrupted, tmp_path):
    assert make_loop(case, tmp_path, feature_cache_gb=0.0002).run()
    same_run(tmp_path, uninterrupted)


@pytest.mark.slow
def test_two_processes_train_as_one_does(case, uninterrupted, tmp_path):
    mp.spawn(train_as_rank, (2, case, tmp_path, {}), nprocs=2)
    one, two = read_metrics(uninterrupted / "metrics.jsonl"), read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for before, after in zip(one, two, strict=True):
        for name in {"loss", "held_out_loss"} & before.keys():
            # sums in another order, which 12 updates of Adam amplify
            assert before[name] == pytest.approx(after[name], rel=1e-3)
    weights, others = (latest(folder / "checkpoints").weights() for folder in (uninterrupted, tmp_path))
    for name, value in weights.items():
        assert torch.allclose(value, others[name], atol=2e-3), name


@pytest.mark.slow
def test_a_run_may_go_on_with_another_number_of_processes(case, uninterrupted, tmp_path):
    loop = make_loop(case, tmp_path)
    stop_after(loop, 6)
    loop.run()
    mp.spawn(train_as_rank, (2, case, tmp_path, {}), nprocs=2)
    one, two = read_metrics(uninterrupted / "metrics.jsonl"), read_metrics(tmp_path / "metrics.jsonl")
    assert one[-1]["held_out_loss"] == pytest.approx(two[-1]["held_out_loss"], rel=1e-3)
