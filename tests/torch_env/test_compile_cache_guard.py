import importlib

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
def fresh_dynamo(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
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


def test_a_new_shape_after_warm_up_is_an_error_with_its_place_and_reason():
    guard, function = Guard("error"), compiled()
    function(torch.ones(3))
    guard.seal()
    function(torch.ones(5))
    place = r"double \(torch_env/test_compile_cache_guard.py:\d+\)"
    with pytest.raises(DraftflowError, match=rf"1 graphs compiled after.*{place}.*size mismatch.*expected 3, actual 5"):
        guard.check()
    (reason,) = guard.counts()["reasons"]
    assert "size mismatch" in reason
    assert len(guard.counts()["recompiles"]) == 1


def test_a_first_call_after_warm_up_is_an_error_too():
    guard = Guard("error")
    guard.seal()
    compiled()(torch.ones(3))
    with pytest.raises(DraftflowError, match=r"1 graphs compiled after .* \(double"):
        guard.check()


def test_a_backward_after_warm_up_is_told_from_a_forward():
    guard, function = Guard("error"), compiled()
    guard.seal()
    function(torch.ones(3, requires_grad=True)).sum().backward()
    assert [reason.endswith(", backward") for reason in guard.counts()["reasons"]] in ([False, True], [False])


def test_a_closed_guard_counts_no_more():
    guard = Guard("error")
    guard.seal()
    guard.close()
    compiled()(torch.ones(3))
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


def test_a_kernel_that_comes_into_the_warm_cache_is_a_surprise(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    (tmp_path / "inductor/ab").mkdir(parents=True)
    (tmp_path / "inductor/ab/known.so").touch()
    guard, cold = Guard("error"), Guard("error", warm=False)
    guard.check(files=True)
    (tmp_path / "inductor/ab/new.so").touch()
    cold.check(files=True)
    with pytest.raises(DraftflowError, match="1 kernels or choices that were not in the cache"):
        guard.check(files=True)
    assert guard.counts()["kernels_built"] == cold.counts()["kernels_built"] == 1


def test_graph_breaks_are_surprises():
    guard = Guard("error", warm=False)

    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(broken, backend="eager")(torch.ones(3))
    with pytest.raises(DraftflowError, match="graph breaks"):
        guard.check()


def test_a_miss_is_told_with_the_function_that_missed():
    guard = Guard("error")

    @torch.compile(backend="inductor", dynamic=False)
    def triple(x):
        return x * 3 + 1

    triple(torch.ones(17))
    with pytest.raises(DraftflowError, match=r"1 misses of the FX graph cache.*[(]triple \(.*guard.py:\d+\): misses"):
        guard.check()


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("torch._dynamo.config", "error_on_nested_fx_trace", False),
        ("torch._dynamo.config", "suppress_errors", True),
        ("torch._dynamo.config", "disable", True),
        ("torch._inductor.config", "force_disable_caches", True),
        ("torch.nn.attention.flex_attention", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ],
)
def test_a_switch_that_makes_attention_dense_is_refused_at_the_start_and_when_it_is_set_later(module, name, value):
    guard, holder = Guard("error"), importlib.import_module(module)
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        with pytest.raises(DraftflowError, match=f"{name} = {value} .* Take it out"):
            Guard("error")
        with pytest.raises(DraftflowError, match=name):
            guard.seal()
    finally:
        setattr(holder, name, before)


def test_the_recompile_limit_raises_and_does_not_run_eagerly():
    Guard("warn")
    torch._dynamo.config.recompile_limit = 2
    function = compiled()
    function(torch.ones(3)), function(torch.ones(4))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        function(torch.ones(5))
