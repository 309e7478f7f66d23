import pytest

pytest.importorskip("torch")

import torch
import torch._dynamo
from torch._dynamo.utils import counters

from draftflow.compile_cache.guard import Guard
from draftflow.errors import DraftflowError


def double(x):
    return x * 2


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 8


def compiled():
    return torch.compile(double, backend="aot_eager", dynamic=False, fullgraph=True)


def test_known_shapes_are_no_surprise():
    guard, function = Guard("error"), compiled()
    function(torch.ones(3)), function(torch.ones(4))
    guard.seal()
    function(torch.ones(3)), function(torch.ones(4))
    guard.check()
    assert guard.counts()["compiles"] == 2
    assert guard.counts()["compiles_after_warmup"] == 0


def test_a_new_shape_after_warm_up_is_an_error_with_its_reason():
    guard, function = Guard("error"), compiled()
    function(torch.ones(3))
    guard.seal()
    function(torch.ones(5))
    with pytest.raises(DraftflowError, match=r"1 graphs compiled after.*double.*size mismatch.*expected 3, actual 5"):
        guard.check()


def test_a_warning_is_said_once_for_each_surprise(capsys):
    guard, function = Guard("warn"), compiled()
    function(torch.ones(3))
    guard.seal()
    function(torch.ones(5))
    guard.check(), guard.check()
    assert capsys.readouterr().out.count("warning") == 1
    function(torch.ones(6))
    guard.check()
    assert "2 graphs compiled after" in capsys.readouterr().out
    assert guard.counts()["compiles_after_warmup"] == 2


def test_a_miss_is_a_surprise_only_with_a_warm_cache():
    cold, warm = Guard("error", warm=False), Guard("error")
    counters["inductor"]["fxgraph_cache_miss"] += 1
    cold.check()
    with pytest.raises(DraftflowError, match="1 misses of the FX graph cache"):
        warm.check()
    assert cold.counts()["fx_graph_misses"] == 1


def test_graph_breaks_are_surprises():
    guard = Guard("error", warm=False)

    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(broken, backend="eager")(torch.ones(3))
    with pytest.raises(DraftflowError, match="graph breaks"):
        guard.check()


def test_the_recompile_limit_raises_and_does_not_run_eagerly():
    Guard("warn")
    torch._dynamo.config.recompile_limit = 2
    function = compiled()
    function(torch.ones(3)), function(torch.ones(4))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        function(torch.ones(5))
