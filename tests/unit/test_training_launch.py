"""Node processes that a launcher starts, with a stand-in for torchrun (fake_torchrun.py): what ends them, and how."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

import draftflow
from draftflow.errors import DraftflowError
from draftflow.training.devices import Devices
from draftflow.training.exchange import Notes, take_number
from draftflow.training.launch import Cluster, command_of
from draftflow.training.network import address_among

HOST = socket.gethostname()

TWICE = """#!/bin/bash
# runs its arguments as two nodes, and hands SIGTERM on
trap 'kill $(jobs -p)' TERM
for node in 0 1; do NODE=$node "$@" & done
while [ "$(jobs -r)" ]; do wait; done
"""

# A run as the stage starts it, once the cache is in hand
RUN = """
import json, sys
from pathlib import Path
from draftflow.compile_cache import location
from draftflow.compile_cache.warm import CacheInUse
from draftflow.stage import run_stage
from draftflow.training.devices import from_settings
from draftflow.training.launch import Cluster
from draftflow.training.train import STOPPED, _exchange, _run
from draftflow.training.worker import Job

def main():
    folder, settings, cluster = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    job, devices = Job(settings, *[folder / "run" for _ in range(5)]), from_settings(settings)
    with location.held(folder / "cache/key", alone=False) as hold, _exchange(job, devices) as exchange:
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache/key/inductor")}
        print("step", _run(job, devices, Cluster(**cluster), CacheInUse(variables, hold), None, Path(exchange))["step"])
        raise SystemExit(STOPPED)

run_stage(main)
"""


class Run:
    """A run on two nodes with two workers each."""

    def __init__(self, folder: Path, launcher: str = TWICE, timeout: float = 30.0, worker: str = ""):
        self.folder = folder
        for package in ("torch", "torch/distributed"):
            (folder / "packages" / package).mkdir(parents=True)
            (folder / "packages" / package / "__init__.py").touch()
        shutil.copy(Path(__file__).with_name("fake_torchrun.py"), folder / "packages/torch/distributed/run.py")
        (folder / "launcher").write_text(launcher)
        (folder / "launcher").chmod(0o755)
        devices = Devices("cpu", (0, 1), "cpu", nodes=2, allotted=True)
        settings = json.dumps({"devices": asdict(devices)})
        cluster = json.dumps({"launcher": [str(folder / "launcher")], "node_timeout": timeout})
        path = os.pathsep.join([str(folder / "packages"), str(Path(draftflow.__file__).parents[1])])
        self.seen: list[int] = []
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, str(folder), settings, cluster],
                env={**os.environ, "PYTHONPATH": path, "WORKER": worker},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [self.process.pid, *self.seen]:
            if lives(process):
                os.kill(process, signal.SIGKILL)

    @property
    def exchange(self) -> Path:
        (folder,) = self.folder.glob("run/.nodes-*")
        return folder

    def wait_for_workers(self) -> None:
        """Until all workers are at work; remembers all processes."""
        wait_for(lambda: len(list(self.folder.glob("run/.nodes-*/*.stepped"))) == 4 or self.process.poll() is not None)
        assert self.process.poll() is None, self.output
        self.workers = [int((self.exchange / f"{rank}.pid").read_text()) for rank in range(4)]
        self.torchruns = [parent(self.workers[0]), parent(self.workers[2])]
        self.nodes = [parent(process) for process in self.torchruns]
        self.launcher = parent(self.nodes[0])
        self.seen = [*self.workers, *self.torchruns, *self.nodes, self.launcher]

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def end(self, but: Sequence[int] = ()) -> tuple[int, str]:
        """Status and output, once it ended; of what it started nothing is left, but for those."""
        self.process.wait(timeout=300)
        wait_for(lambda: not any(map(lives, {*self.seen} - {*but})))
        return self.process.returncode, self.output


def parent(process: int) -> int:
    return int(_stat(process)[1])


def lives(process: int) -> bool:
    try:
        return _stat(process)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stat(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def wait_for(condition, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        ("process", signal.SIGTERM),
        ("process", signal.SIGINT),
        ("process", signal.SIGUSR1),
        ("node", signal.SIGTERM),
        ("node", signal.SIGUSR1),
        ("worker", signal.SIGUSR1),
    ],
)
def test_a_signal_anywhere_stops_all(tmp_path, whom, number):
    with Run(tmp_path) as run:
        run.wait_for_workers()
        os.kill({"process": run.process.pid, "node": run.nodes[1], "worker": run.workers[3]}[whom], number)
        status, output = run.end()
    assert (status, output.splitlines()[-1]) == (143, "step 7")
    assert "stopping after this step" in output or whom != "process"
    assert not list(tmp_path.glob("run/.nodes-*"))


def test_a_warning_to_every_process_kills_none_before_the_stop(tmp_path):
    with Run(tmp_path) as run:
        run.wait_for_workers()
        for process in [run.process.pid, *run.seen]:
            os.kill(process, signal.SIGUSR1)
        status, output = run.end()
    assert (status, output.splitlines()[-1]) == (143, "step 7")


@pytest.mark.parametrize("other", ["hang:0", "lose:0"])
def test_a_killed_worker_ends_all_at_once(tmp_path, other):
    """Whether the others wait for it, or lose their connection and are noticed first."""
    with Run(tmp_path, worker=other) as run:
        run.wait_for_workers()
        start = time.monotonic()
        os.kill(run.workers[3], signal.SIGKILL)
        status, output = run.end()
    assert time.monotonic() - start < 10
    assert status == 1
    assert output == (
        f"draftflow: error: A training process on node {node_of(3)} was killed by signal 9, perhaps for want of memory."
        " See `dmesg`; checkpoints are kept, and the same command resumes.\n"
    )


def node_of(rank: int) -> str:
    return f"{rank // 2} ({HOST})"


def test_a_refusal_names_its_node(tmp_path):
    with Run(tmp_path, worker="refuse:2") as run:
        status, output = run.end()
    assert status == 1
    assert output == (
        f"draftflow: error: Node 1 ({HOST}): This is not what was fingerprinted: driver 580 -> 570. Restore it.\n"
    )


def test_a_node_that_gives_no_sign_of_life_ends_the_run(tmp_path):
    with Run(tmp_path, timeout=2.0, worker="hang:0") as run:
        run.wait_for_workers()
        gone = [run.nodes[1], run.torchruns[1], *run.workers[2:]]
        for process in gone:
            os.kill(process, signal.SIGSTOP)
        status, output = run.end(but=gone)
    assert status == 1
    assert output.endswith(
        f"draftflow: error: Node 1 ({HOST}) is lost: it gave no sign of life for too long."
        " See that host and its scheduler's log; checkpoints are kept, and the same command resumes.\n"
    )


def test_a_node_process_that_is_killed_takes_its_workers_along(tmp_path):
    with Run(tmp_path) as run:
        run.wait_for_workers()
        os.kill(run.nodes[1], signal.SIGKILL)
        status, output = run.end()
    assert status == 1
    assert f"Node 1 ({HOST}) is lost: it ended without a word." in output


def test_nodes_stop_when_the_run_is_killed(tmp_path):
    with Run(tmp_path) as run:
        run.wait_for_workers()
        run.process.kill()
        run.process.wait()
        wait_for(lambda: not any(map(lives, run.seen)))
        assert (run.exchange / "outcome.json").exists()  # in good order


def test_nodes_stop_when_the_launcher_is_killed(tmp_path):
    with Run(tmp_path) as run:
        run.wait_for_workers()
        os.kill(run.launcher, signal.SIGKILL)
        status, output = run.end()
    assert (status, output.splitlines()[-1]) == (143, "step 7")


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("#!/bin/sh\necho no such partition; exit 3\n", "ended with status 3 and started nothing"),
        ('#!/bin/sh\nexec "$@"\n', "1 of 2 nodes did not start within 2 s."),
    ],
)
def test_a_launcher_that_does_not_start_all_nodes_is_told(tmp_path, launcher, words):
    with Run(tmp_path, launcher, timeout=2.0) as run:
        status, output = run.end()
    assert status == 1
    assert words in output
    assert "Traceback" not in output


def test_how_processes_talk_is_told_to_every_node_by_any_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    with Run(tmp_path, launcher='#!/bin/sh\necho "$@"; exit 3\n') as run:
        _, output = run.end()
    assert " NCCL_SOCKET_IFNAME=ib0 " in output


def test_a_launcher_that_waits_is_ended_by_a_stop(tmp_path):
    with Run(tmp_path, launcher=f"#!/bin/sh\ntouch {tmp_path}/waits\nexec sleep 600\n") as run:
        wait_for((tmp_path / "waits").exists)
        run.process.terminate()
        status, output = run.end()
    assert status == 143
    assert "stopped before the first step" in output


def test_a_launcher_that_starts_too_many_processes_does_no_harm(tmp_path):
    with Run(tmp_path, TWICE.replace("0 1", "0 1 2")) as run:
        run.wait_for_workers()
        run.process.terminate()
        status, output = run.end()
    assert status == 143
    assert "the launcher starts more than 2 processes; this one is not needed" in output


def test_outside_a_slurm_job_a_launcher_must_be_named(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(DraftflowError, match="2 nodes are asked for, and this is no Slurm job") as error:
        command_of(Cluster(), 2)
    assert error.value.where == "config key cluster.launcher"
    assert command_of(Cluster(["mpirun", "--pernode"]), 2) == ["mpirun", "--pernode"]


def test_inside_a_slurm_job_it_is_srun(monkeypatch, tmp_path):
    (tmp_path / "srun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert command_of(Cluster(), 2)[:3] == ["srun", "--nodes=2", "--ntasks=2"]


def test_numbers_are_taken_once_and_a_scheduler_s_own_first(tmp_path):
    assert [take_number(tmp_path, 3, first) for first in (1, 7, 0, 0)] == [1, 0, 2, None]


def test_a_note_is_what_was_written_last_also_when_that_is_shorter(tmp_path):
    notes = Notes(tmp_path)
    assert notes.read("a") == {}
    for facts in ({"beat": 1, "host": "x" * 5000}, {"beat": 2}):
        notes.write("a", facts)
        assert Notes(tmp_path).read("a") == facts
    (tmp_path / "a").write_text('{"beat": 3, "ho')
    assert notes.read("a") == {}


def test_silence_is_since_the_last_change(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    notes = Notes(tmp_path)
    assert notes.silence("a", 1) == 0
    now[0] += 5
    assert notes.silence("a", 1) == 5
    assert notes.silence("a", 2) == 0


def test_the_address_is_that_on_the_way_to_another_host(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert address_among([HOST, HOST], 0) == ("127.0.0.1", {})
    assert address_among([HOST, "127.0.0.1"], 0) == ("127.0.0.1", {"GLOO_SOCKET_IFNAME": "lo"})
    with pytest.raises(DraftflowError, match=r"There is no way from .* to no-such-host.invalid"):
        address_among([HOST, "no-such-host.invalid"], 0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert address_among([HOST, "no-such-host.invalid"], 0) == ("127.0.0.1", {})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(DraftflowError, match="eth77 is no network interface"):
        address_among([HOST], 0)
