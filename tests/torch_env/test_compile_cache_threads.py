import contextlib
import functools
import multiprocessing
import threading
import traceback

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from drafter_cases import document_ids, position_ids, tiny_shape  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from draftflow.compile_cache.threads import one_at_a_time  # noqa: E402
from draftflow.drafter.anchors import sample_anchors  # noqa: E402
from draftflow.drafter.attention import attend, forbid_dense  # noqa: E402
from draftflow.drafter.mask import allowed  # noqa: E402
from draftflow.drafter.model import Drafter  # noqa: E402

WORKERS, TRIALS, TIME_LIMIT = 3, 20, 120
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    names = ("fail_on_recompile_limit_hit", "suppress_errors", "error_on_nested_fx_trace", "recompile_limit")
    before = {name: getattr(torch._dynamo.config, name) for name in names}
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    for name, value in before.items():
        setattr(torch._dynamo.config, name, value)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class Worker:
    """A drafter of its own and one packed row, of another length than those of the other workers."""

    def __init__(self, number, drafter):
        self.drafter, length = drafter, 40 + 8 * number
        documents = document_ids([[20, length - 20]], length)
        anchors = sample_anchors(torch.ones_like(documents), documents, 3, seeded(number))
        block_size, hidden = drafter.shape.block_size, drafter.shape.hidden_size
        positions = position_ids(documents)
        offsets = torch.arange(block_size)
        self.inputs = (
            torch.randn(1, length, 3 * hidden, generator=seeded(number)),
            torch.randn(1, 3, hidden, generator=seeded(number)),
            torch.randn(hidden, generator=seeded(number)),
            positions,
            (positions.gather(1, anchors.positions)[:, :, None] + offsets).flatten(1),
            allowed(anchors, documents, block_size),
        )
        self.direction = torch.randn(1, 3 * (block_size - 1), hidden, generator=seeded(number))

    def step(self):
        """Hidden states and gradients."""
        hidden = self.drafter(*self.inputs)
        return [hidden.detach(), *torch.autograd.grad((hidden * self.direction).mean(), self.drafter.parameters())]


def in_threads(*functions):
    """Run each in a thread, at once; what they returned, in order. An exception in one is raised, as is a deadlock."""
    barrier, results, errors = threading.Barrier(len(functions)), {}, []

    def run(number, function):
        try:
            barrier.wait()
            results[number] = function()
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise RuntimeError(errors[0])
    return [results[number] for number in range(len(functions))]


def function(x):
    for _ in range(4):
        x = (x * 1.5 + 1).sin() + x.mean(-1, keepdim=True)
    return x


def gradient(of, number):
    """By the input of worker `number`."""
    x = torch.randn(8 + number, 16, generator=seeded(number)).requires_grad_()
    return torch.autograd.grad(of(x).square().sum(), x)[0]


def trial(hold):
    """Forward and backward in three threads at once, from nothing compiled, until all have compiled."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True)
    compiling = list(range(WORKERS))

    def work(number):
        calls = 0
        while calls < 5 or compiling:
            with hold():
                try:
                    found = gradient(compiled, number)
                finally:
                    if calls == 0:
                        compiling.pop()
            torch.testing.assert_close(found, gradient(function, number))
            calls += 1

    in_threads(*(functools.partial(work, number) for number in range(WORKERS)))


def unguarded_error(answer):
    """The first error of unguarded trials."""
    error = None
    for _ in range(TRIALS):
        try:
            trial(contextlib.nullcontext)
        except RuntimeError as found:
            error = str(found)
            break
    answer.put(error)


def in_process(function, *arguments):
    """Run a function of this module in a process of its own, since it may leave torch in a bad state."""
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=function, args=(answer, *arguments))
    process.start()
    process.join(TIME_LIMIT)
    assert process.exitcode == 0
    return answer.get()


@pytest.mark.slow
def test_guarded_threads_compile_and_call_in_every_trial():
    for _ in range(TRIALS):
        trial(one_at_a_time)


@pytest.mark.slow
def test_the_same_trials_fail_without_the_guard():
    error = in_process(unguarded_error)
    if error is None:
        pytest.skip(f"torch {torch.__version__} stands {TRIALS} trials of unguarded threads; CUDA was not tried")
    assert "symbolically trace a dynamo-optimized" in error or "already been set" in error or "KeyError" in error


@pytest.mark.slow
def test_the_drafters_own_compiled_layers_give_the_numbers_of_one_thread():
    workers = [Worker(number, Drafter(tiny_shape(layers=2), seeded(number))) for number in range(2)]
    eager = [worker.step() for worker in workers]
    workers[0].drafter.compile_layers()
    for worker in workers:
        worker.drafter._run = workers[0].drafter._run
    guarded = in_threads(*(one_at_a_time()(worker.step) for worker in workers))
    alone = [worker.step() for worker in workers]
    for found, one, plain in zip(guarded, alone, eager, strict=True):
        assert all(map(torch.equal, found, one))
        for value, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_flex_attention_compiled_by_threads_is_not_dense():
    def work(number):
        length = 64 + 32 * number
        q, k, v = (torch.randn(1, 2, length, 16, generator=seeded(number + part)) for part in (0, 10, 20))
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu", BLOCK_SIZE=32)
        # its kernels hold the number of threads that they were built for, which is not in the cache's key
        with one_at_a_time(), torch._inductor.config.patch(force_disable_caches=True):
            found = compiled(q, k, v, mask)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)
    with forbid_dense("cpu"):
        in_threads(*(functools.partial(work, number) for number in range(2)))


def test_the_thread_that_enters_has_the_safe_settings():
    def work():
        torch._dynamo.config.fail_on_recompile_limit_hit = False
        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.error_on_nested_fx_trace = False
        with one_at_a_time():
            pass
        return [
            torch._dynamo.config.fail_on_recompile_limit_hit,
            torch._dynamo.config.suppress_errors,
            torch._dynamo.config.error_on_nested_fx_trace,
        ]

    assert in_threads(work) == [[True, False, True]]


def test_a_guarded_thread_does_not_run_eagerly_past_the_recompile_limit():
    def work():
        torch._dynamo.config.recompile_limit = 2
        function = torch.compile(torch.sin, backend="aot_eager", dynamic=False)
        with one_at_a_time():
            for size in (3, 4, 5):
                function(torch.ones(size))

    with pytest.raises(RuntimeError, match="FailOnRecompileLimitHit"):
        in_threads(work)


def test_one_thread_at_a_time_is_inside():
    inside, leave, entered = threading.Event(), threading.Event(), threading.Event()

    def first():
        with one_at_a_time():
            inside.set()
            early = entered.wait(0.5)
            leave.set()
        return early

    def second():
        inside.wait()
        with one_at_a_time():
            entered.set()
            return leave.is_set()

    assert in_threads(first, second) == [False, True]


def test_a_thread_enters_again_what_it_holds_and_an_error_lets_the_next_one_in():
    @one_at_a_time()
    def fail():
        with one_at_a_time():
            raise ValueError

    for _ in range(2):
        with pytest.raises(RuntimeError, match="ValueError"):
            in_threads(fail)
    assert in_threads(lambda: one_at_a_time()(threading.get_ident)()) != [threading.get_ident()]


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_that_calls_guarded_code_runs_in_the_thread_that_holds_the_guard(device):
    guarded = one_at_a_time()(torch.compile(lambda x: (x * 3).sin(), backend="aot_eager", dynamic=False))

    def work(size):
        x = torch.ones(size, device=device, requires_grad=True)
        threads = []
        with one_at_a_time():
            loss = checkpoint(guarded, x, use_reentrant=False).sum()
            loss.register_hook(lambda gradient: threads.append(threading.get_ident()))
            loss.backward()
        torch.testing.assert_close(x.grad, 3 * (3 * x.detach()).cos())
        return threads == [threading.get_ident()]

    assert in_threads(functools.partial(work, 3), functools.partial(work, 4)) == [True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_compiled_outside_is_not_compiled_again_inside(device):
    function = torch.compile(lambda x: x * 2, backend="aot_eager", dynamic=False)
    x = torch.ones(3, device=device, requires_grad=True)
    function(x).sum().backward()
    with one_at_a_time(), torch.compiler.set_stance("fail_on_recompile"):
        function(x).sum().backward()
    assert x.grad.tolist() == [4.0] * 3


def compile_in_threads_that_end(answer):
    compiled = torch.compile(torch.sin, backend="aot_eager", dynamic=False)
    for size in range(3, 8):
        in_threads(lambda size=size: one_at_a_time()(compiled)(torch.ones(size)))
    answer.put(None)


@pytest.mark.slow
def test_threads_may_end_after_they_compiled():
    in_process(compile_in_threads_that_end)
