"""What is recorded of a step, on a CPU: a stand-in for CUDA's graphs runs the step once and then nothing.

That a replay gives the numbers of a launch is tested on a GPU (tests/gpu/test_captured.py).
"""

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from training_cases import make_case, make_loop

from draftflow.compile_cache.guard import Guard
from draftflow.drafter.model import EAGER, Runs


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture
def graphs(monkeypatch):
    """Names of what was recorded and replayed, in order."""
    found = []

    class Stream:
        def wait_stream(self, other):
            pass

    class Graph:
        def replay(self):
            found.append("replay")

    @contextlib.contextmanager
    def record(graph, pool, stream, mode):
        found.append("record")
        yield

    for name, value in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": contextlib.nullcontext,
        "graph_pool_handle": object,
        "CUDAGraph": Graph,
        "graph": record,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("draftflow.training.step.worth_capturing", lambda plan: True)
    return found


@pytest.mark.parametrize("loss", ["decay", "kl"])
def test_a_step_that_is_recorded_compiles_nothing_more(case, graphs, tmp_path, loss):
    """With `kl` what the drafter reads are the first of wider features, for whose strides code was compiled."""
    torch._dynamo.reset()
    process = make_loop(case, tmp_path, loss=loss).process
    step, batches = process.step, process.batches
    step.drafter.apart = True  # as on a GPU
    step.drafter._run = Runs(*(torch.compile(run, dynamic=False, fullgraph=True, backend="eager") for run in EAGER))
    guard = Guard("error", warm=False)
    step.train(batches.train(0), 0)
    assert graphs == []
    assert guard.compiles
    step.evaluate(batches.held_out())
    guard.seal()
    for number in (1, 2):
        step.train(batches.train(number), number)
        guard.check()
    assert graphs == ["record", "record", *("replay",) * 4]
    guard.close()


def test_what_is_recorded_is_fed_with_each_batch(case, graphs, tmp_path):
    process = make_loop(case, tmp_path).process
    step, batches = process.step, process.batches
    for number in range(2):
        step.train(batches.train(number), number)
    recorded, batch = step._captured, batches.train(2)
    features = process.source(batch)
    recorded.forward(batch, features)
    for fixed, given in zip(recorded._inputs, recorded._read(batch, features), strict=True):
        assert torch.equal(fixed, given)
        assert fixed.data_ptr() != given.data_ptr()
    gradient = torch.ones(len(batch.supervised), step.drafter.shape.hidden_size)
    recorded.backward(batch.supervised, gradient)
    assert recorded._gradient.sum() == gradient.sum()
    assert torch.equal(recorded._gradient[batch.supervised], gradient)


@pytest.fixture
def two_ranks(monkeypatch):
    """As if there were another rank, whose gradients are all ones; sizes of what was summed, in order."""
    sizes = []

    def all_reduce(value, group, async_op):
        sizes.append(value.numel())

        def wait():
            value.add_(1)

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return sizes


def test_gradients_of_a_replayed_step_are_summed_over_ranks_as_one_tensor(case, graphs, tmp_path, request):
    """In the memory that is replayed into."""
    process = make_loop(case, tmp_path).process
    step, batches = process.step, process.batches
    for number in range(2):
        step.train(batches.train(number), number)
    fixed = step._captured._gradients
    alone = [gradient.clone() for gradient in fixed]  # and a stand-in's replay leaves them as they were
    sizes, batch = request.getfixturevalue("two_ranks"), batches.train(2)
    step.forward_backward(batch, process.source(batch))
    step.sums.end()
    parameters = list(step.drafter.parameters())
    assert sizes == [sum(parameter.numel() for parameter in parameters)]
    for parameter, gradient, before in zip(parameters, fixed, alone, strict=True):
        assert parameter.grad is gradient
        torch.testing.assert_close(gradient, before + 1)


def test_gradients_are_summed_when_they_are_there_and_small_ones_together(case, tmp_path, request):
    process = make_loop(case, tmp_path).process
    step, batch = process.step, process.batches.train(0)
    features = process.source(batch)
    step.forward_backward(batch, features)
    parameters = list(step.drafter.parameters())
    alone = [parameter.grad.clone() for parameter in parameters]
    limit = max(parameter.numel() for parameter in parameters) * 4  # bytes of the largest, which is fc's
    step.sums.at_least = limit
    for parameter in parameters:
        parameter.grad = None
    sizes = request.getfixturevalue("two_ranks")
    step.forward_backward(batch, features)
    whole = sum(parameter.numel() for parameter in parameters)
    assert sum(sizes) == whole
    assert step.drafter.fc.weight.numel() in sizes
    # each but the last as large as is asked for, and no larger than it may become by one more that is small
    assert all(limit <= 4 * size < 2 * limit for size in sizes[:-1])
    assert 1 < len(sizes) < len(parameters)
    step.sums.end()
    for parameter, before in zip(parameters, alone, strict=True):
        torch.testing.assert_close(parameter.grad, before + 1)
    assert not step.sums._begun
    assert not step.sums._waiting
