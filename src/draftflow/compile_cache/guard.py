"""Counts what the compiler does in this process, so that nothing compiles by surprise after warm-up."""

from typing import Any, Literal

import torch._dynamo
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import counters, get_compilation_metrics

from draftflow.errors import DraftflowError
from draftflow.stage import say


class Guard:
    """Watches compilation from its making on. A process makes one, before anything is compiled.

    A function that reaches dynamo's recompile limit raises from now on; it would run eagerly, which is dense attention.

    Args:
        mode: what a surprise is: `error` raises, `warn` prints a line, once for each.
        warm: whether the cache is warm, so that a miss is a surprise.
    """

    def __init__(self, mode: Literal["error", "warn"], warm: bool = True):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._dynamo.config.suppress_errors = False
        self.mode = mode
        self._surprises = {**AFTER_WARM_UP, **(WITH_A_WARM_CACHE if warm else {})}
        self.compiles = 0
        self._sealed_at: int | None = None
        self._reported = 0
        self._counted_before = _counts()
        callback_handler.register_start_callback(self._started)

    def seal(self) -> None:
        """From now on every compile is one too many: all shapes of the plan have been seen."""
        self._sealed_at = self.compiles

    def counts(self) -> dict[str, Any]:
        """Numbers since the making of the guard.

        Returns:
            compiles: graphs that were traced; with a warm cache each is then loaded. compiles_after_warmup: those
            after `seal`. recompiles: the reason of each graph that was not the first of its function.
            graph_breaks, and hits, misses and bypasses of the caches of FX graphs and of AOT autograd.
        """
        now = _counts()
        return {
            "compiles": self.compiles,
            "compiles_after_warmup": 0 if self._sealed_at is None else self.compiles - self._sealed_at,
            "recompiles": _reasons(),
            **{name: count - self._counted_before[name] for name, count in now.items()},
        }

    def check(self) -> None:
        """Look for surprises: a compile after `seal`, a graph break, a miss of the warm cache.

        Raises:
            DraftflowError: there was one, and `mode` is `error`.
        """
        counts = self.counts()
        found = [f"{counts[name]} {words}" for name, words in self._surprises.items() if counts[name]]
        number = sum(counts[name] for name in self._surprises)
        if number <= self._reported:
            return
        self._reported = number
        reasons = "; ".join(counts["recompiles"][-2:])
        what = f"The compiler worked after warm-up: {', '.join(found)}{f' ({reasons})' if reasons else ''}."
        if self.mode == "error":
            raise DraftflowError(
                what,
                "Run `snakemake --forcerun warm_cache`; if it comes again, set checks.compile: warn and report it.",
            )
        say(f"warning: {what}")

    def _started(self, event: CallbackArgs) -> None:
        self.compiles += 1


# What must not happen, as counted by `Guard.counts`
AFTER_WARM_UP = {
    "compiles_after_warmup": "graphs compiled after every shape had been seen",
    "graph_breaks": "graph breaks",
}
WITH_A_WARM_CACHE = {
    "fx_graph_misses": "misses of the FX graph cache",
    "fx_graph_bypasses": "graphs that the FX graph cache cannot hold",
    "autograd_misses": "misses of the AOT autograd cache",
}


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
    }


def _reasons() -> list[str]:
    events = get_compilation_metrics()
    return [f"{event.co_name}: {event.recompile_reason}" for event in events if event.recompile_reason]
