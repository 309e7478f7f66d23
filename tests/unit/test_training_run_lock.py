"""The lock of a run: refused while its holder lives, taken over when it is dead, whichever way that is known."""

import contextlib
import errno
import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from draftflow import processes, scheduler
from draftflow.errors import DraftflowError
from draftflow.processes import Process
from draftflow.training import run_lock


@pytest.fixture
def run(tmp_path):
    return tmp_path / "checkpoints/0123456789ab"


@pytest.fixture
def slurm(monkeypatch):
    """What squeue answers, by job; a job that is not here is unknown to it."""
    states = {}
    monkeypatch.setattr(scheduler, "state_of", lambda job: states.get(job, ""))
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return states


def left(run, holder, silent=0.0):
    """A lock that `holder` has, renewed so many seconds ago."""
    run.parent.mkdir(parents=True)
    lock = run.with_name(f"{run.name}.lock-0007")
    lock.write_text(json.dumps(holder.facts()))
    now = lock.stat().st_mtime
    os.utime(lock, (now - silent, now - silent))


ELSEWHERE = Process("node7", "another machine", 4711, 1, None, 0)
IN_JOB_12 = replace(ELSEWHERE, job="12")


def refused(run):
    with pytest.raises(DraftflowError) as refusal, run_lock.held(run):
        pass
    return str(refusal.value)


def taken_over(run, capsys):
    with run_lock.held(run):
        (lock,) = run.parent.glob("*.lock-*")
        assert Process.read(json.loads(lock.read_text())) == Process.here()
    assert list(run.parent.iterdir()) == []
    return capsys.readouterr().out


def test_a_run_that_nobody_holds_is_held_in_silence_and_let_go(run, capsys):
    assert taken_over(run, capsys) == ""


def test_it_is_let_go_after_a_failure_as_well(run):
    with contextlib.suppress(KeyError), run_lock.held(run):
        raise KeyError
    assert list(run.parent.iterdir()) == []


def test_a_living_process_of_this_host_keeps_it(run, slurm):
    left(run, Process.here())
    line = refused(run)
    assert f"process {os.getpid()} on " in line
    assert "is training this run" in line
    assert len(list(run.parent.iterdir())) == 1  # its lock alone


def test_a_process_of_this_host_that_is_gone_is_succeeded(run, capsys):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left(run, replace(Process.here(), pid=int(gone.stdout)))
    assert f"process {int(gone.stdout)} on {Process.here().host} held it and is over" in taken_over(run, capsys)


def test_another_process_of_the_same_number_is_not_the_holder(run, capsys):
    left(run, replace(Process.here(), started=1))
    assert "is over" in taken_over(run, capsys)


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SUSPENDED", "REQUEUED"])
def test_a_job_in_the_queue_keeps_it_however_silent(run, slurm, state):
    slurm["12"] = state
    left(run, IN_JOB_12, silent=9999)
    line = refused(run)
    assert "Slurm job 12, process 4711 on node7" in line
    assert "scancel 12" in line


@pytest.mark.parametrize("state", ["", "TIMEOUT", "CANCELLED", "NODE_FAIL"])
def test_a_job_that_is_over_is_succeeded_at_once(run, slurm, capsys, state):
    slurm["12"] = state
    left(run, IN_JOB_12)
    assert "Slurm job 12, process 4711 on node7 held it and is over" in taken_over(run, capsys)


def test_a_job_that_is_being_taken_down_is_waited_for(run, slurm, capsys, monkeypatch):
    slurm["12"] = "COMPLETING"
    left(run, IN_JOB_12)
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: slurm.clear())
    assert "is over" in taken_over(run, capsys)


def test_but_not_for_ever(run, slurm, monkeypatch):
    slurm["12"] = "COMPLETING"
    left(run, IN_JOB_12)
    monkeypatch.setattr(run_lock, "PATIENCE", 0.0)
    assert "Slurm job 12" in refused(run)


def test_a_job_that_slurm_started_again_succeeds_itself(run, slurm, capsys, monkeypatch):
    slurm["12"] = "RUNNING"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    left(run, IN_JOB_12)
    assert "is over" in taken_over(run, capsys)


def renews(run, after):
    """A `sleep` during which the holder renews its lock, at the given call."""
    calls = itertools.count(1)
    return lambda _: next(calls) == after and os.utime(next(run.parent.glob("*.lock-*")))


def test_a_process_elsewhere_keeps_it_once_it_is_heard_of(run, slurm, monkeypatch, capsys):
    left(run, ELSEWHERE, silent=20)
    monkeypatch.setattr(run_lock.time, "sleep", renews(run, after=3))
    assert "process 4711 on node7 is training this run" in refused(run)
    assert capsys.readouterr().out.count("waiting until it is heard of") == 1


def test_a_process_elsewhere_that_falls_silent_is_waited_for(run, slurm, capsys, monkeypatch):
    # tried again at once after a kill or a reboot, a run goes on by itself
    left(run, ELSEWHERE, silent=10)
    monkeypatch.setattr(run_lock, "SILENT_AT_MOST", 12.0)
    assert "process 4711 on node7 held it and has not been heard of for" in taken_over(run, capsys)


def test_a_process_elsewhere_that_fell_silent_is_succeeded(run, slurm, capsys):
    left(run, ELSEWHERE, silent=run_lock.SILENT_AT_MOST + 1)
    assert "process 4711 on node7 held it and has not been heard of for 301 s" in taken_over(run, capsys)


def test_where_slurm_does_not_answer_silence_decides(run, slurm, capsys, monkeypatch):
    slurm["12"] = None
    left(run, IN_JOB_12, silent=100)
    monkeypatch.setattr(run_lock.time, "sleep", renews(run, after=1))
    assert "Slurm job 12" in refused(run)
    os.utime(next(run.parent.glob("*.lock-*")), (0, 0))
    assert "has not been heard of" in taken_over(run, capsys)


def test_the_holder_is_heard_of(run, monkeypatch):
    monkeypatch.setattr(run_lock, "RENEWED_EVERY", 0.01)
    renewed = threading.Event()
    utime = os.utime
    monkeypatch.setattr(run_lock.os, "utime", lambda path: (utime(path), "lock-" in path.name and renewed.set()))
    with run_lock.held(run):
        assert renewed.wait(10)


def test_a_holder_that_was_taken_for_dead_stops(run, monkeypatch):
    monkeypatch.setattr(run_lock, "RENEWED_EVERY", 0.01)
    told = threading.Event()
    monkeypatch.setattr(run_lock.os, "kill", lambda process, number: told.set())
    with run_lock.held(run):
        (lock,) = run.parent.glob("*.lock-*")
        lock.rename(lock.with_name("away"))
        assert not told.wait(0.1)  # a folder that is away for a moment has no other's lock
        lock.with_name("away").rename(run.with_name(f"{run.name}.lock-0002"))
        assert told.wait(10)


def test_where_files_have_one_name_a_run_is_held_all_the_same(run, monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(run_lock.os, "link", refuse)
    left(run, replace(Process.here(), started=1))
    with run_lock.held(run):
        assert "is training this run" in refused(run)
    assert list(run.parent.iterdir()) == []


def test_of_many_that_take_over_at_once_one_gets_it(run):
    left(run, replace(Process.here(), started=1))
    together, outcomes = threading.Barrier(8), []

    def contend():
        together.wait()
        try:
            with run_lock.held(run):
                outcomes.append("held")
                hold.wait()
        except DraftflowError:
            outcomes.append("refused")

    hold = threading.Event()
    contenders = [threading.Thread(target=contend) for _ in range(8)]
    for contender in contenders:
        contender.start()
    for _ in range(500):
        if len(outcomes) == 8:
            break
        threading.Event().wait(0.02)
    hold.set()
    for contender in contenders:
        contender.join()
    assert sorted(outcomes) == ["held", *["refused"] * 7]


def test_a_lock_of_the_same_number_that_came_meanwhile_is_another(run, monkeypatch):
    left(run, replace(Process.here(), started=1))
    (lock,) = run.parent.glob("*.lock-*")
    judge = run_lock._left_by

    def slow(*arguments, **more):
        words = judge(*arguments, **more)
        lock.write_text(json.dumps(Process.here().facts()))
        return words

    monkeypatch.setattr(run_lock, "_left_by", slow)
    assert "is training this run" in refused(run)
    assert list(run.parent.iterdir()) == [lock]


def test_a_machine_is_one_boot_of_one_kernel_and_one_container():
    boot = open("/proc/sys/kernel/random/boot_id").read().strip()  # noqa: SIM115, PTH123
    assert processes._machine() == f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
