"""Where the time of compiling and loading goes: seconds by phase, none counted twice.

torch times its parts by nested events. Each moment belongs to the innermost event that has a phase; what no event
covers (running, importing, starting the device) belongs to none. Threads that only build kernels are not counted: what
is waited for counts, where it is waited for.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Phase of torch's events, by the beginning of their names. An event without one belongs to the event around it.
PHASES = {
    "trace": (
        "entire_frame_compile",
        "_compile.compile_inner",
        "entire_backward_compile",
        "backend_compile",
        "create_aot_dispatcher_function",
    ),
    "lower": ("compile_fx_inner", "inductor_compile", "fx_codegen_and_compile", "compile_fx.", "backward._backward"),
    # Triton's and the C++ compiler's work, and waiting for it
    "build": ("async_compile.", "compile_file", "AotCodeCompiler", "reload_kernel_in_parent"),
    "autotune": (
        "CachingAutotuner.benchmark",
        "CachingAutotuner.coordinate",
        "benchmark_",
        "flex_attention_template_",
        "mm_template_",
        "pad_mm_",
    ),
    "load": (
        "AOTAutogradCache.",
        "PyCodeCache.",
        "TritonBundler.",
        "StaticAutotunerFuture.",
        "after_deserialization",
        "inductor_codecache_torch_key",
    ),
}


# The phase of what runs in a thread that only builds
_ASIDE = "aside"


class Phases:
    """Seconds by phase, of the threads that trace, lower or run.

    Attributes:
        seconds: phase -> seconds.
        events: torch's event -> how often it happened.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: Counter[str] = Counter()
        self._threads = threading.local()

    def begin(self, event: str) -> None:
        """An event begins; its phase goes on from the one around it if it has none of its own."""
        stack = self._stack()
        self._account(stack)
        self.events[event] += 1
        around = stack[-1][1] if stack else None
        phase = around if around == _ASIDE else _phase(event) or around
        stack.append((event, _ASIDE if phase == "build" and not stack else phase))

    def end(self, event: str) -> None:
        """An event ends, and with it those inside that were left by an exception."""
        stack = self._stack()
        if event not in (name for name, _ in stack):
            return
        self._account(stack)
        while stack.pop()[0] != event:
            pass

    def rounded(self) -> dict[str, float]:
        """Seconds of every phase, to a millisecond."""
        return {phase: round(self.seconds[phase], 3) for phase in PHASES}

    def _stack(self) -> list[tuple[str, str | None]]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        return self._threads.stack

    def _account(self, stack: list[tuple[str, str | None]]) -> None:
        """Give the time since the last change in this thread to the phase that holds."""
        now = time.perf_counter()
        if stack and (phase := stack[-1][1]) in PHASES:
            self.seconds[phase] += now - self._threads.since
        self._threads.since = now


@contextmanager
def phases() -> Iterator[Phases]:
    """Account for what the compiler does while this holds, in every thread of the process."""
    from torch._dynamo.utils import ChromiumEventLogger

    found = Phases()
    begin, end = ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end

    def log_event_start(self: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
        found.begin(event_name)
        return begin(self, event_name, *args, **kwargs)

    def log_event_end(self: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
        found.end(event_name)
        return end(self, event_name, *args, **kwargs)

    ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end = log_event_start, log_event_end  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end = begin, end  # type: ignore[method-assign]


def _phase(event: str) -> str | None:
    return next((phase for phase, names in PHASES.items() if event.startswith(names)), None)
