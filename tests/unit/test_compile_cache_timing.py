import threading

import pytest

from draftflow.compile_cache import timing
from draftflow.compile_cache.timing import PHASES, Phases


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` lets that much time pass."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


def test_each_moment_belongs_to_the_innermost_event_with_a_phase(clock):
    found = Phases()
    found.begin("_compile.compile_inner"), clock(1)
    found.begin("bytecode_tracing"), clock(2)  # no phase of its own: tracing
    found.end("bytecode_tracing"), clock(4)
    found.begin("compile_fx_inner"), clock(8)
    found.begin("async_compile.wait"), clock(16)
    found.end("async_compile.wait"), clock(32)
    found.end("compile_fx_inner"), clock(64)
    found.end("_compile.compile_inner"), clock(128)
    assert found.rounded() == {**dict.fromkeys(PHASES, 0.0), "trace": 71.0, "lower": 40.0, "build": 16.0}
    assert found.events["bytecode_tracing"] == 1


def test_an_event_that_an_exception_left_open_ends_with_the_one_around_it(clock):
    found = Phases()
    found.begin("_compile.compile_inner"), found.begin("compile_fx_inner"), clock(1)
    found.end("_compile.compile_inner"), clock(2)
    found.end("compile_fx_inner")
    found.begin("PyCodeCache.load"), clock(4)
    found.end("PyCodeCache.load")
    assert found.rounded() == {**dict.fromkeys(PHASES, 0.0), "lower": 1.0, "load": 4.0}


def test_a_thread_that_only_builds_is_not_counted(clock):
    found = Phases()
    found.begin("_compile.compile_inner")

    def build():
        found.begin("compile_file"), found.begin("PyCodeCache.load"), clock(5)
        found.end("PyCodeCache.load"), found.end("compile_file")

    thread = threading.Thread(target=build)
    thread.start(), thread.join()
    found.end("_compile.compile_inner")
    assert found.rounded() == {**dict.fromkeys(PHASES, 0.0), "trace": 5.0}  # it went by in the thread that traces
