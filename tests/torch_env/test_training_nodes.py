"""Training on several nodes, which here are processes of one machine that a launcher of the tests starts."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from training_cases import Stage, make_case, make_settings, read_metrics

from draftflow.training.checkpoint import latest
from draftflow.training.devices import Devices
from draftflow.training.node import killed_worker

pytestmark = pytest.mark.slow

NODES = Devices("cpu", (0,), "cpu", nodes=2, allotted=True)
ONE_NODE = Devices("cpu", (0, 1), "cpu")

LAUNCHER = """#!/bin/bash
# runs its arguments twice, and hands SIGTERM on
trap 'kill $(jobs -p)' TERM
for node in 0 1; do NODE=$node "$@" & done
while [ "$(jobs -r)" ]; do wait; done
"""


def settings_of(devices, **training):
    return make_settings(devices, **{"steps": 8, "checkpoint_every": 4, "evaluate_every": 4, **training})


ENDLESS = {"steps": 100_000, "checkpoint_every": 100_000, "evaluate_every": 100_000}


class Cluster:
    """A stage, and the launcher that makes two nodes of this machine."""

    def __init__(self, folder: Path):
        self.stage = Stage(folder, make_case(folder), settings_of(NODES))
        self.launcher = folder / "launcher"
        self.launcher.write_text(LAUNCHER)
        self.launcher.chmod(0o755)

    def start(self, run: Path, devices=NODES, launcher=None, timeout=120.0, paths=None, **training):
        cluster = {"launcher": launcher or [str(self.launcher)], "node_timeout": timeout}
        paths = {"cluster": json.dumps(cluster), **(paths or {})}
        return self.stage.training(settings_of(devices, **training), run, **paths)

    def finish(self, run: Path, **how):
        """Status and output of a run."""
        with self.start(run, **how) as process:
            output = process.communicate(timeout=900)[0]
        return process.returncode, output


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    return Cluster(tmp_path_factory.mktemp("cluster"))


def exchange(run: Path) -> Path:
    (folder,) = run.glob("checkpoints/*/.nodes-*")
    return folder


def wait_for_steps(process, run):
    """Until both workers train."""
    deadline, metrics = time.monotonic() + 900, run / "metrics.jsonl"
    while not (metrics.exists() and '"loss"' in metrics.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)


def workers(run: Path) -> list[int]:
    return [int((exchange(run) / f"{rank}.pid").read_text()) for rank in range(2)]


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def same_run(run, other):
    assert read_metrics(run / "metrics.jsonl") == read_metrics(other / "metrics.jsonl")
    (one,), (two,) = ([latest(folder) for folder in path.glob("checkpoints/*")] for path in (run, other))
    assert one.step == two.step == 8
    assert all(torch.equal(value, two.weights()[name]) for name, value in one.weights().items())
    assert all(torch.equal(value, two.trainer()[name]) for name, value in one.trainer().items())


@pytest.fixture(scope="module")
def on_two_nodes(cluster, tmp_path_factory):
    """A whole run."""
    run = tmp_path_factory.mktemp("two")
    status, output = cluster.finish(run)
    assert status == 0, output
    assert "training on 2 nodes of 1 x cpu, 8 steps" in output
    assert not list(run.glob("checkpoints/*/.nodes-*"))
    return run


def go_on(cluster, run, other, devices):
    """Train the last steps of a run again, on other devices; the step from which."""
    shutil.copytree(run / "checkpoints", other / "checkpoints")
    *_, before, last = sorted(other.glob("checkpoints/*/step-*"))
    shutil.rmtree(last)
    remains = last.with_name(".nodes-dead")  # of a run that was killed
    remains.mkdir(exist_ok=True)
    (remains / "node-0").write_text('{"beat": 7, "host": "gone", "ending": null, "stop": true}')
    status, output = cluster.finish(other, devices=devices, checkpoint_every=2)
    assert status == 0, output
    step = int(before.name.removeprefix("step-"))
    assert f"resuming from step {step}" in output
    return step


def test_nodes_and_processes_are_the_same_bit_for_bit_and_each_goes_on_from_the_other(cluster, on_two_nodes, tmp_path):
    """Steps 5 to 8 on one node with two processes, and of these again steps 7 and 8 on two nodes."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    assert go_on(cluster, on_two_nodes, one, ONE_NODE) == 4
    same_run(one, on_two_nodes)
    assert go_on(cluster, one, two, NODES) == 6
    same_run(two, on_two_nodes)
    host = socket.gethostname()
    ranks = [{"rank": rank, "role": "drafter and target", "device": "cpu", "host": host} for rank in range(2)]
    for run, nodes in ((on_two_nodes, 2), (one, 1), (two, 2)):
        record = json.loads((run / "train.json").read_text())
        assert record["topology"] == {"kind": "colocated", "nodes": nodes, "ranks": ranks}
        assert {guard["fx_graph_misses"] + guard["compiles_after_warmup"] for guard in record["guard"]} == {0}


def test_a_warning_to_every_process_stops_all_after_one_step_with_a_checkpoint(cluster, tmp_path):
    """As Slurm sends it before the end of a job. What starts one process of these is the next."""
    with cluster.start(tmp_path, **ENDLESS) as process:
        wait_for_steps(process, tmp_path)
        everyone = {process.pid}
        for worker in workers(tmp_path):
            while worker != process.pid:
                everyone.add(worker)
                worker = parent(worker)
        assert len(everyone) == 2 * 3 + 2  # worker, torchrun and node process; launcher; stage
        for one in everyone:
            os.kill(one, signal.SIGUSR1)
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert "Traceback" not in output
    (found,) = (latest(folder) for folder in tmp_path.glob("checkpoints/*"))
    assert f"stopped after step {found.step}; resume by running the same command" in output


def test_a_killed_worker_ends_all_nodes_within_seconds(cluster, tmp_path):
    with cluster.start(tmp_path, **ENDLESS) as process:
        wait_for_steps(process, tmp_path)
        everyone = workers(tmp_path)
        start = time.monotonic()
        os.kill(everyone[1], signal.SIGKILL)
        output = process.communicate(timeout=600)[0]
    assert time.monotonic() - start < 15
    assert process.returncode == 1
    assert not any(map(lives, everyone))
    assert f"A training process on node 1 ({socket.gethostname()}) was killed by signal 9" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("codes", "later", "found"),
    [
        ({0: 1, 1: -9}, 0, (1, 9)),  # rank 0 lost its connection, and torchrun takes it for the cause
        ({0: -6, 1: -9}, 1, (1, 9)),
        ({0: -9, 1: 1}, 0, (0, 9)),
        ({0: -11, 1: -9}, 0, (0, 11)),
        ({2: -6}, 0, (2, 6)),
        ({0: 1, 1: 1}, 0, None),
        # what torchrun ends itself
        ({0: 1, 1: -15}, 0, None),
        ({0: 1, 1: -6}, 0, None),
        ({0: 1, 1: -9}, 30, None),
        ({0: -11, 1: -9, 2: -9}, 30, (0, 11)),
    ],
)
def test_the_worker_that_was_killed_is_found_in_what_torchrun_says(codes, later, found, tmp_path):
    """`later`: seconds after the first of them for the others."""
    failures = {rank: ProcessFailure(rank, 4000 + rank, code, str(tmp_path / "none")) for rank, code in codes.items()}
    for rank, failure in failures.items():
        failure.timestamp = 1_800_000_000 + (later if rank != min(codes) else 0)
    log = str(ChildFailedError("draftflow.training.worker", failures))
    assert killed_worker(log) == found
    if found is not None:
        assert killed_worker(log, {4000 + rank for rank in codes}) is None


def test_nodes_that_differ_are_refused_with_node_and_field(cluster, tmp_path):
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER.replace("NODE=$node", "SLURM_NODEID=$node TRITON_OF_NODE=$node"))
    launcher.chmod(0o755)
    (tmp_path / "run").mkdir()
    fingerprint = json.loads(cluster.stage.paths["fingerprint"].read_text())
    fingerprint["compile"]["fields"]["TRITON_OF_NODE"] = "0"
    (tmp_path / "install.json").write_text('{"packages": {}}')
    (tmp_path / "fingerprint.json").write_text(json.dumps(fingerprint))
    paths = {"fingerprint": tmp_path / "fingerprint.json"}
    status, output = cluster.finish(tmp_path / "run", launcher=[str(launcher)], paths=paths)
    assert status == 1
    key = cluster.stage.cache.name
    assert output.splitlines()[-1].startswith(
        f"draftflow: error: config key cluster.kinds: Node 1 ({socket.gethostname()}): "
        "The compile cache was not warmed for this kind of device. Of what was warmed, "
        f"cpu (key {key}) differs in TRITON_OF_NODE 0 -> 1. "
    )
