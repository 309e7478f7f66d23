"""Trials of one torch build; run by threads.py with the interpreter of that build.

A trial is three threads (or processes) that one barrier releases and that call one compiled function, each in a shape
of its own and again and again, until the last of them has made its first call: so later calls of one meet the first
calls of the others. Every result is compared with that of plain torch. Each trial is forked from a process that has
imported torch and compiled nothing: what an error leaves behind ends with its trial, and none finds anything compiled.
"""

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draftflow.compile_cache.threads import one_at_a_time

WORKERS = 3
CALLS = 20  # the fewest of a worker
MASKS = 5  # before each call, where masks are made
# Seconds after which a thread must let another run: Python's own, and for every other trial one as on a busy machine
SWITCHES = (5e-3, 1e-4)
TIME_LIMIT = {"aot_eager": 60.0, "inductor": 300.0}  # seconds of a trial
STARTING = {"cpu": 0.0, "cuda": 30.0}  # seconds that a process may take for its device
TILES = {"cpu": 32, "cuda": 128}  # of a mask
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-3}  # kernels of a GPU may round products to fewer bits

# Kind of device on which workers call; of several GPUs each has its own. Children are forked, and find it here.
device_kind = "cpu"

fork = multiprocessing.get_context("fork")
first_calls = threading.Lock()

# What is held around the making of a mask and around a compiled call, given whether it is the worker's first
Hold = Callable[[bool], contextlib.AbstractContextManager[Any]]
nothing: Hold = lambda first: contextlib.nullcontext()  # noqa: E731
only_first: Hold = lambda first: first_calls if first else contextlib.nullcontext()  # noqa: E731
guard: Hold = lambda first: one_at_a_time()  # noqa: E731
CONDITIONS: dict[str, tuple[Hold, Hold]] = {
    "unguarded": (nothing, nothing),
    "lock around first calls": (nothing, only_first),
    "one_at_a_time, not around masks": (nothing, guard),
    "one_at_a_time": (guard, guard),
    "processes": (nothing, nothing),
}


def function(x: Tensor) -> Tensor:
    """Nothing in particular."""
    for _ in range(4):
        x = (x * 1.5 + 1).sin() + x.mean(-1, keepdim=True)
    return x


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """flex_attention, which must not be called uncompiled."""
    return flex_attention(q, k, v, block_mask=mask)


def causal(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask of flex_attention."""
    return q >= k


def make_call(kind: str, backend: str, number: int) -> tuple[Callable[[], Any], Callable[[Any], Tensor], Tensor]:
    """What makes a mask (or nothing), a compiled call with it in the shape of this number, and what that must give."""
    flex, tile, device = kind in ("flex", "masks"), TILES[device_kind], torch.device(device_kind)
    if device_kind == "cuda":
        device = torch.device("cuda", number % torch.cuda.device_count())
    compiled = torch.compile(attention if flex else function, backend=backend, dynamic=False, fullgraph=True)
    generator = torch.Generator().manual_seed(number)
    if flex:
        length = tile * (2 + number)
        q, k, v = (torch.randn(1, 1, length, 16, generator=generator).to(device) for _ in range(3))
        blocks = create_block_mask(causal, None, None, length, length, device=str(device), BLOCK_SIZE=tile)
        lists = (blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices)

        def make_mask() -> BlockMask:
            for _ in range(MASKS if kind == "masks" else 0):
                BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=tile, mask_mod=causal)
            return blocks

        return make_mask, lambda mask: compiled(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = torch.randn(8 + number, 16, generator=generator).to(device)
    if kind == "function":
        return lambda: None, lambda _: compiled(x), function(x)
    x.requires_grad_()

    def gradient(of: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(of(x).square().sum(), x)[0]

    return lambda: None, lambda _: gradient(compiled), gradient(function)


def work(case: Any, condition: str, barrier: Any, compiling: list[int]) -> str | None:
    """What a worker does.

    Args:
        case: of `make_call`.
        compiling: one entry for each thread of this process that has not made its first call.

    Returns:
        The traceback of what went wrong, or None.
    """
    (make_mask, call, expected), (around_mask, around_call), number = case, CONDITIONS[condition], 0
    barrier.wait()
    try:
        while number < CALLS or compiling:
            try:
                with around_mask(number == 0):
                    mask = make_mask()
                with around_call(number == 0):
                    found = call(mask)
            finally:
                if number == 0:
                    compiling.pop()
            torch.testing.assert_close(found, expected, rtol=TOLERANCE[device_kind], atol=TOLERANCE[device_kind])
            number += 1
    except Exception:
        return traceback.format_exc()
    return None


def count_dense() -> list[int]:
    """From now on, each call of flex_attention's dense path on real tensors adds an entry to the list returned."""
    operator: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    dense, calls = operator.math_attention, []

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(query) is Tensor:
            calls.append(1)
        return dense(query, *args, **kwargs)

    operator.math_attention = counted
    return calls


def child(connection: Connection, workers: list[int], kind: str, backend: str, condition: str, barrier: Any) -> None:
    """A process of a trial, in which each worker is a thread; sends errors, dense calls and loaded modules."""
    dense_calls = count_dense()
    errors: list[str | None] = []
    compiling = list(workers)

    def run(case: Any) -> None:
        errors.append(work(case, condition, barrier, compiling))

    threads = [threading.Thread(target=run, args=(make_call(kind, backend, worker),)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.send(([error for error in errors if error], len(dense_calls), list(sys.modules)))
    os._exit(0)  # what the parent would do at its end is not ours


def trial(kind: str, backend: str, condition: str, number: int = 0) -> tuple[list[str], int, list[str]]:
    """Errors, dense calls and modules that were loaded, of all processes of one trial."""
    apart = condition == "processes"
    barrier = fork.Barrier(WORKERS) if apart else threading.Barrier(WORKERS)
    groups = [[worker] for worker in range(WORKERS)] if apart else [list(range(WORKERS))]
    errors: list[str] = []
    modules: list[str] = []
    dense = 0
    sys.setswitchinterval(SWITCHES[number % len(SWITCHES)])  # the children have it from here
    with tempfile.TemporaryDirectory(prefix="draftflow-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        processes: dict[Any, Any] = {}
        for group in groups:
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=child, args=(theirs, group, kind, backend, condition, barrier))
            process.start()
            theirs.close()
            processes[ours] = process
        end = time.monotonic() + TIME_LIMIT[backend] + STARTING[device_kind]
        waiting = list(processes)
        while waiting:
            ready: list[Any] = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                waiting.remove(connection)
                try:
                    found = connection.recv()
                except EOFError:
                    processes[connection].join()
                    found = ([f"process ended with {processes[connection].exitcode}"], 0, [])
                errors, dense, modules = errors + found[0], dense + found[1], modules + found[2]
        for connection, process in processes.items():
            if connection in waiting:
                errors.append("time limit")
                process.kill()
            process.join()
    return errors, dense, modules


def short(error: str) -> str:
    """A traceback in a few words: of a known kind, or the line that names its exception."""
    for pattern, words in {
        "using FX to symbolically trace": "FX_NESTED",
        r"Metric\(s\) .* already been set": "Metric(s) already set",
        "KeyError: 'custom'": "KeyError 'custom'",
        "fullgraph=True found no compiled frames": "no compiled frames",
        "Tensor-likes are not close": "wrong numbers",
    }.items():
        if re.search(pattern, error):
            return words
    named = re.findall(r"^[\w.]+(?:Error|Exception|Failed)\b.*", error, re.MULTILINE)
    return (named or error.splitlines())[-1][:100]


def import_ahead(kind: str, backend: str) -> None:
    """Import what a trial imports, so that the next need not; nothing is compiled here."""
    errors, _, modules = trial(kind, backend, "processes")
    if errors:
        sys.exit(f"{kind} with {backend} fails in a process of its own:\n{errors[0]}")
    for name in modules:
        if name.startswith(("torch", "sympy", "mpmath", "triton")) and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def main() -> None:
    """Run the trials of a plan and print a line of JSON for each of its entries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=json.loads, required=True, help="[[kind, backend, condition, trials], ...]")
    parser.add_argument("--device", choices=TILES, default="cpu", help="where workers call")
    arguments = parser.parse_args()
    plan = arguments.plan
    global device_kind
    device_kind = arguments.device
    torch.set_num_threads(1)
    for kind, backend in sorted({(kind, backend) for kind, backend, _, _ in plan}):
        import_ahead(kind, backend)
    gc.freeze()  # or each collection in a child would copy the memory that it shares
    for kind, backend, condition, trials in plan:
        start, bad, dense, words = time.perf_counter(), 0, 0, Counter[str]()
        for number in range(trials):
            errors, dense_calls, _ = trial(kind, backend, condition, number)
            bad += bool(errors)
            dense += dense_calls
            words.update({short(error) for error in errors})
        result = {"kind": kind, "backend": backend, "condition": condition, "trials": trials, "bad": bad}
        result |= {"errors": words, "dense": dense, "seconds": time.perf_counter() - start}
        print(json.dumps({"torch": torch.__version__, **result}), flush=True)


if __name__ == "__main__":
    main()
