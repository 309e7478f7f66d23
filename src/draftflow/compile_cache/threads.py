"""For a process in which several threads run compiled code: one of them at a time.

torch.compile keeps state that belongs to the process and that it does not lock. While one thread traces, a flag makes
every call of compiled code in every other thread fail, calls of code that was compiled long ago included (torch 2.10
to 2.12); what annotates the nodes of a graph is shared in later versions too. So a lock around compiling is not enough:
whoever calls compiled code must hold it. `docs/threads.md` has the figures.

Processes share none of this. One process per device, which is how draftflow trains, needs no guard.

Import this module in the main thread. Where there is no GPU, CUDA builds of torch up to 2.11 keep a pointer into the
thread that was the first to trace, and crash when another traces after that one has ended; the import makes it the
importing thread's.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch._dynamo
from torch._subclasses import FakeTensorMode

# Each of these, set otherwise, turns a failed compile into an eager run without an error, which is dense attention.
_SETTINGS = {
    "fail_on_recompile_limit_hit": True,
    "suppress_errors": False,
    "error_on_nested_fx_trace": True,
}

_lock = threading.RLock()

with FakeTensorMode():
    pass


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """While this holds, no other thread that asks for it runs; to be held around every call of compiled code.

        with one_at_a_time():  # around the backward as well: its graph is compiled at its first run
            loss = step(batch)
            loss.backward()

    or, for a function whose every call shall hold it, `train = one_at_a_time()(train)`. A thread may enter again what
    it holds. Not for use inside of compiled code: guard the outermost call.

    In the thread that enters:
    - Dynamo's settings that would let attention run dense are set back, and stay so: from torch 2.12 on a thread
      does not see what another thread set.
    - Until it leaves, a backward runs in this thread, for all devices. torch's own threads, one for each GPU, would
      compile two parts of one graph at once, and would wait for ever for the lock that their caller holds as soon as a
      backward calls guarded code (a checkpoint that computes its forward again).

    Costs 5 to 8 µs for each entry (two CPU cores, torch 2.10 to 2.14), beside the waiting. Kernels that are queued on
    a GPU run on when the next thread enters; only their launching takes turns. Other eager code needs no guard.

    Make a BlockMask inside too: that looks at the state that a trace sets. Does not cover compiled code that is called
    outside of it, `flex_attention` called plainly included, which compiles a wrapper of its own. Never wait
    inside for another thread that must enter too (a queue that it fills, a collective between threads): neither would
    go on.
    """
    with _lock:
        for name, value in _SETTINGS.items():
            if getattr(torch._dynamo.config, name) is not value:
                setattr(torch._dynamo.config, name, value)
        with torch.autograd.set_multithreading_enabled(False):
            yield
