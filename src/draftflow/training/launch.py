"""Start the node processes of a run on several nodes through the launcher, and see them to their end.

No torch in this process, and no signal to the launcher while nodes may still act: srun answers SIGTERM by killing all.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftflow.compile_cache.warm import CacheInUse
from draftflow.errors import DraftflowError
from draftflow.stage import end_with_parent, say, write_json
from draftflow.training.devices import Devices
from draftflow.training.exchange import Notes
from draftflow.training.node import LAUNCH, LAUNCHER, TICK_SECONDS, Ending, note, on_stop

KEY = "config key cluster.launcher"

# For so long a node process may be silent after the launcher ended, before it is taken for ended too
LAST_WORDS_SECONDS = 5.0

# Where draftflow and its packages are found, and how processes talk. Not every launcher hands variables on.
HANDED_ON = ("DRAFTFLOW_SRC", "DRAFTFLOW_NODE_LOCAL", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONNOUSERSITE")
HANDED_ON_BEGIN = ("GLOO_", "NCCL_", "TORCH_NCCL_")


@dataclass(frozen=True)
class Cluster:
    """How a run starts on several nodes: `cluster` of the configuration.

    Attributes:
        launcher: `auto`, or the words of a command that runs its arguments once on each node.
        node_timeout: seconds without a sign of life after which a node is lost.
    """

    launcher: str | list[str] = "auto"
    node_timeout: float = 120.0


@dataclass
class Nodes:
    """What is known of the nodes of a run, by number.

    Attributes:
        hosts: their names; `?` of those that were never heard of.
        endings: how their processes ended; None where they did not say.
        silent: those without a sign of life, for longer than the timeout.
    """

    hosts: list[str]
    endings: list[Ending | None]
    silent: set[int] = field(default_factory=set)

    def name(self, node: int) -> str:
        """A node by number and host: `1 (gpu07)`."""
        return f"{node} ({self.hosts[node]})"


def command_of(cluster: Cluster, nodes: int) -> list[str]:
    """The words of the launcher.

    Raises:
        DraftflowError: none is known here.
    """
    if cluster.launcher != "auto":
        return list(cluster.launcher)
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise DraftflowError(
            f"{nodes} nodes are asked for, and this is no Slurm job.",
            "Run the workflow with `--profile profiles/slurm`, or name the launcher of another scheduler.",
            KEY,
        )
    # one task on each node beside what runs there already, with all cores and GPUs of the job, unbound; a task that
    # fails does not end the others before they have said their last words
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--cpu-bind=none"]
    return [*words, "--kill-on-bad-exit=0", "--wait=0"]


def run_nodes(
    exchange: Path, devices: Devices, cluster: Cluster, cache: CacheInUse, node_local: str | None = None
) -> Nodes:
    """Run the workers on all nodes, pass a stop on to them, and tell how they ended.

    Args:
        exchange: an empty folder that all nodes see, but for `job.json`.
        devices: of the run.
        cluster: how to start.
        cache: the compile cache; let go once all workers have taken a step.
        node_local: the folder on each node's own disk, where nodes unpack the bundle of the cache and read it there.

    Raises:
        DraftflowError: there is no launcher, or it started nothing.
    """
    words = command_of(cluster, devices.nodes)
    launch = {"environment": cache.environment, "folders": cache.folders, "node_local": node_local}
    write_json(exchange / LAUNCH, {**launch, "node_timeout": cluster.node_timeout})
    handed_on = [
        f"{name}={value}" for name, value in os.environ.items() if name in HANDED_ON or name.startswith(HANDED_ON_BEGIN)
    ]
    python = os.environ.get("DRAFTFLOW_PYTHON", sys.executable)
    command = [*words, "env", *handed_on, python, "-m", "draftflow.training.node", "--exchange", str(exchange)]
    watched = _Watched(Notes(exchange), devices.nodes, cluster.node_timeout)
    watched.look()
    try:
        launcher = subprocess.Popen(command, env=_variables(cluster), start_new_session=True, preexec_fn=_as_launcher)
    except OSError as error:
        raise DraftflowError(f"{words[0]}: {error.strerror}.", "Name a command that is there.", KEY) from None
    with on_stop(watched.stop):
        loading, over = True, None
        while launcher.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(timeout=TICK_SECONDS)
            watched.look()
            if loading and watched.stepped:
                cache.hold.release()
                loading = False
            if over is None and watched.over:
                over = time.monotonic()
            if over is not None and time.monotonic() - over > watched.patience:
                _end(launcher)
        while not watched.settled(LAST_WORDS_SECONDS):  # a launcher that was killed leaves node processes behind
            time.sleep(TICK_SECONDS)
            watched.look()
    found = watched.nodes()
    if not watched.heard and watched.stopping:
        found.endings = [Ending(status=1, stopping=True) for _ in range(devices.nodes)]
    elif not watched.heard:
        raise DraftflowError(
            f"`{shlex.join(words)}` ended with status {launcher.returncode} and started nothing.",
            "What it said is above.",
            KEY,
        )
    return found


@dataclass
class _Watched:
    """The notes of the nodes, as they were seen last."""

    notes: Notes
    count: int
    timeout: float
    beats: int = 0
    stopping: bool = False
    notes_of_nodes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.notes_of_nodes = [{} for _ in range(self.count)]

    def stop(self) -> None:
        """All nodes shall stop."""
        self.stopping = True
        self.look()

    def look(self) -> None:
        """Give a sign of life, and read those of the nodes."""
        self.beats += 1
        self.notes.write(LAUNCHER, {"beat": self.beats, "stop": self.stopping})
        for node in range(self.count):
            self.notes_of_nodes[node] = self.notes.read(note(node)) or self.notes_of_nodes[node]
            self._silence(node)

    @property
    def stepped(self) -> bool:
        """Whether all workers have taken a step."""
        return all(told.get("stepped") for told in self.notes_of_nodes)

    @property
    def heard(self) -> bool:
        """Whether any node gave a sign of life."""
        return any(self.notes_of_nodes)

    @property
    def over(self) -> bool:
        """Whether one node failed, or all came to their end or are lost; or none is there that could stop."""
        if self.stopping and not self.heard:
            return True
        endings = [told.get("ending") for told in self.notes_of_nodes]
        failed = any(ending is not None and ending["status"] != 0 for ending in endings)
        return failed or (all(self.notes_of_nodes) and self.settled(self.timeout))

    @property
    def patience(self) -> float:
        """Seconds for which the launcher may go on after that."""
        return LAST_WORDS_SECONDS if self.settled(self.timeout) else self.timeout

    def settled(self, seconds: float) -> bool:
        """Whether no more is to come: of each node its ending, or nothing for so long."""
        return not any("ending" not in told and self._silence(node) <= seconds for node, told in self._known())

    def nodes(self) -> Nodes:
        """What is known."""
        endings = [told.get("ending") for told in self.notes_of_nodes]
        return Nodes(
            [told.get("host", "?") for told in self.notes_of_nodes],
            [None if ending is None else Ending(**ending) for ending in endings],
            {node for node, told in self._known() if "ending" not in told and self._silence(node) > self.timeout},
        )

    def _known(self) -> list[tuple[int, dict[str, Any]]]:
        """Nodes that gave a sign of life."""
        return [(node, told) for node, told in enumerate(self.notes_of_nodes) if told]

    def _silence(self, node: int) -> float:
        return self.notes.silence(note(node), self.notes_of_nodes[node].get("beat"))


def _as_launcher() -> None:
    """What the launcher is from its start: it ends with this process, and a scheduler's warning is not for it."""
    end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _variables(cluster: Cluster) -> dict[str, str]:
    """The variables of the launcher. Those that a step of Slurm has would bind another to the same node and cores."""
    kept = ("SLURM_CONF", "SLURM_JOB_ID") if cluster.launcher == "auto" else tuple(os.environ)
    return {
        name: value for name, value in os.environ.items() if name in kept or not name.startswith(("SLURM_", "SRUN_"))
    }


def _end(launcher: "subprocess.Popen[bytes]") -> None:
    """End a launcher that waits for what is lost."""
    launcher.terminate()
    try:
        launcher.wait(timeout=LAST_WORDS_SECONDS)
    except subprocess.TimeoutExpired:
        say("the launcher does not end; killing it")
        launcher.kill()
