"""Counts what the compiler does in this process, so that nothing compiles by surprise after warm-up."""

import importlib
from pathlib import Path
from typing import Any, Literal

import torch._dynamo
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import counters, get_compilation_metrics

from draftflow.compile_cache import location
from draftflow.compile_cache.caches import artefacts
from draftflow.errors import DraftflowError
from draftflow.stage import say


class Guard:
    """Watches compilation from its making on. A process makes one, before anything is compiled.

    A function that reaches dynamo's recompile limit raises from now on; it would run eagerly, which is dense attention.

    Args:
        mode: what a surprise is: `error` raises, `warn` prints a line, once for each.
        warm: whether the cache is warm, so that a miss is a surprise.

    Raises:
        DraftflowError: a switch of torch is set that makes attention dense or hides that it is.
    """

    def __init__(self, mode: Literal["error", "warn"], warm: bool = True):
        require_safe_switches()
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        self.mode = mode
        self.warm = warm
        self._surprises = {**AFTER_WARM_UP, **(WITH_A_WARM_CACHE if warm else {})}
        self.events: list[dict[str, Any]] = []
        self._open: list[dict[str, int]] = []
        self._sealed = False
        self._sealed_at = 0
        self._reported = 0
        self._counted_before = _counts()
        self._breaks_before = dict(counters["graph_break"])
        self._folder = location.folder_in_use()
        self._artefacts_before = _artefacts(self._folder)
        callback_handler.register_start_callback(self._started)
        callback_handler.register_end_callback(self._ended)

    def close(self) -> None:
        """Stop watching."""
        callback_handler.remove_start_callback(self._started)
        callback_handler.remove_end_callback(self._ended)

    @property
    def compiles(self) -> int:
        """Graphs that were traced; with a warm cache each was then loaded."""
        return len(self.events)

    def seal(self) -> None:
        """From now on every compile is one too many: all shapes of the plan have been seen."""
        require_safe_switches()
        self._sealed, self._sealed_at = True, self.compiles

    def counts(self) -> dict[str, Any]:
        """Numbers since the making of the guard.

        Returns:
            compiles: graphs that were traced; with a warm cache each is then loaded. compiles_after_warmup: those
            after `seal`. graph_breaks, benchmarks (of kernels, while tuning), and hits, misses and bypasses of the
            caches of FX graphs and of AOT autograd. recompiles: the reason of each graph that was not the first of its
            function. reasons: in words, what was not foreseen. kernels_built: libraries, binaries and choices that came
            into the cache folder, whoever put them there.
        """
        now = _counts()
        return {
            "kernels_built": len(_artefacts(self._folder) - self._artefacts_before),
            "compiles": self.compiles,
            "compiles_after_warmup": self.compiles - self._sealed_at if self._sealed else 0,
            **{name: count - self._counted_before[name] for name, count in now.items()},
            "recompiles": [_named(event) for event in self.events if _metrics(event).get("recompile_reason")],
            "reasons": self._reasons(),
        }

    def check(self, files: bool = False) -> None:
        """Look for surprises: a compile after `seal`, a graph break, a miss of the warm cache.

        Args:
            files: look into the cache folder as well, which takes milliseconds.

        Raises:
            DraftflowError: there was one, and `mode` is `error`.
        """
        now = _counts()
        number = sum(now[name] - self._counted_before[name] for name in self._surprises if name in now)
        number += self.compiles - self._sealed_at if self._sealed else 0
        if files and self.warm:
            number += len(_artefacts(self._folder) - self._artefacts_before)
        if number <= self._reported:
            return
        self._reported = number
        counts = self.counts()
        found = [f"{counts[name]} {words}" for name, words in self._surprises.items() if counts[name]]
        reasons = "; ".join(counts["reasons"][-3:])
        what = f"The compiler worked after warm-up: {', '.join(found)}{f' ({reasons})' if reasons else ''}."
        if self.mode == "error":
            raise DraftflowError(
                what,
                "Run `snakemake --forcerun warm_cache`; if it comes again, set checks.compile: warn and report it.",
            )
        say(f"warning: {what}")

    def _started(self, event: CallbackArgs) -> None:
        self._open.append(_counts())
        self.events.append({"id": event.compile_id, "by": event.callback_trigger.name, "sealed": self._sealed})

    def _ended(self, event: CallbackArgs) -> None:
        before, now = self._open.pop(), _counts()
        self.events[-1]["missed"] = [name for name in WITH_A_WARM_CACHE if now.get(name, 0) > before.get(name, 0)]

    def _reasons(self) -> list[str]:
        found = []
        for event in self.events:
            why = [WITH_A_WARM_CACHE[name] for name in event.get("missed", ())] if self.warm else []
            if event["sealed"] or why:
                found.append(": ".join([_named(event), *why]))
        breaks = {
            reason: count - self._breaks_before.get(reason, 0) for reason, count in counters["graph_break"].items()
        }
        return found + [f"graph break: {' '.join(str(reason).split())}" for reason, count in breaks.items() if count]


# What must not happen, as counted by `Guard.counts`
AFTER_WARM_UP = {
    "compiles_after_warmup": "graphs compiled after every shape had been seen",
    "graph_breaks": "graph breaks",
}
WITH_A_WARM_CACHE = {
    "fx_graph_misses": "misses of the FX graph cache",
    "fx_graph_bypasses": "graphs that the FX graph cache cannot hold",
    "autograd_misses": "misses of the AOT autograd cache",
    "autograd_bypasses": "graphs that the AOT autograd cache cannot hold",
    "benchmarks": "timings of kernels, to tune them",
    "kernels_built": "kernels or choices that were not in the cache",
}


def require_safe_switches() -> None:
    """See that no switch of torch, set in this process, makes attention dense or hides that it is.

    Raises:
        DraftflowError: naming the switch and what it does.
    """
    dynamo, inductor = torch._dynamo.config, importlib.import_module("torch._inductor.config")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    dangers = [
        (
            "torch._dynamo.config.error_on_nested_fx_trace = False",
            not dynamo.error_on_nested_fx_trace,
            "runs compiled attention dense, without an error, while another thread traces",
        ),
        (
            "torch._dynamo.config.suppress_errors = True",
            dynamo.suppress_errors,
            "hides a failed compile and runs dense attention in its place",
        ),
        ("torch._dynamo.config.disable = True", dynamo.disable, "switches compilation off, so that attention is dense"),
        (
            "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True",
            getattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False),
            "runs attention dense",
        ),
        (
            "torch._inductor.config.force_disable_caches = True",
            inductor.force_disable_caches,
            "switches the compile cache off",
        ),
    ]
    for switch, is_set, effect in dangers:
        if is_set:
            raise DraftflowError(
                f"{switch} {effect}.", "Take it out of what runs in this interpreter (sitecustomize, a plugin).", switch
            )


def _counts() -> dict[str, int]:
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    return {
        "graph_breaks": sum(counters["graph_break"].values()),
        "fx_graph_hits": inductor["fxgraph_cache_hit"],
        "fx_graph_misses": inductor["fxgraph_cache_miss"],
        "fx_graph_bypasses": inductor["fxgraph_cache_bypass"],
        "autograd_hits": autograd["autograd_cache_hit"],
        "autograd_misses": autograd["autograd_cache_miss"],
        "autograd_bypasses": autograd["autograd_cache_bypass"],
        "benchmarks": sum(count for name, count in inductor.items() if name.startswith("benchmarking.")),
    }


def _artefacts(folder: Path | None) -> frozenset[str]:
    """Kernels and choices in the cache folder, where this process has one."""
    if folder is None:
        return frozenset()
    found = artefacts(folder)
    return found.triton | found.cpp | found.autotune


def _metrics(event: dict[str, Any]) -> dict[str, Any]:
    """torch's own record of a compile; it comes after the callbacks, and only the last few are kept."""
    found = [vars(record) for record in get_compilation_metrics() if record.compile_id == event["id"]]
    # numbers begin anew when dynamo is reset; a backward has that of its forward
    return next((facts for facts in reversed(found) if facts["is_forward"] is not False), {})


def _named(event: dict[str, Any]) -> str:
    """`run_layer (drafter/model.py:176), backward: size mismatch ...`."""
    facts = _metrics(event)
    file = "/".join((facts.get("co_filename") or "").split("/")[-2:])
    place = f" ({file}:{facts.get('co_firstlineno')})" if file else ""
    name = f"{facts.get('co_name') or event['id']}{place}"
    if event["by"] == "LAZY_BACKWARD":
        return f"{name}, backward"
    reason = facts.get("recompile_reason") or ""
    return f"{name}: {' '.join(reason.split())}" if reason else name
