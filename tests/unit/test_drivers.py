"""What a killed Snakemake left: its lock goes, and what its jobs still do is not submitted again."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from draftflow import drivers, scheduler
from draftflow.errors import DraftflowError
from draftflow.processes import Process

FIRST, SECOND = "d79077d3-526c-440c-8d2f-956d56e60980", "0f2b8f0e-1c5e-4a6e-9d0a-3a1a5f0e7c11"

# squeue --format=%i|%T|%j|%Z|%k, of Slurm 22.05
LISTING = f"""\
14|RUNNING|{FIRST}|FOLDER|rule_train_drafter
15|PENDING|{FIRST}|FOLDER|rule_records_check_records_collect_checks
16|RUNNING|{FIRST}|FOLDER|rule_fingerprint_wildcards_torch-2.11.0-cu130-py311
17|RUNNING|bash|FOLDER|(null)
18|RUNNING|{SECOND}|/another/folder|rule_warm_cache
19|RUNNING|mine|FOLDER|a comment | with a bar
"""

OUTPUTS = {"train_drafter": ["results/runs/a/train.json", "results/runs/a/metrics.jsonl"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scheduler, "_ask", lambda *_: None)
    return tmp_path


@pytest.fixture
def queued(folder):
    return scheduler.read_jobs(LISTING.replace("FOLDER", str(folder)))


@pytest.fixture
def killed():
    """A process of this host that is gone."""
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    return replace(Process.here(), pid=int(done.stdout), started=1)


def test_the_queue_is_read_whatever_a_comment_holds(queued, folder):
    assert [job.id for job in queued] == ["14", "15", "16", "17", "18", "19"]
    assert queued[0] == scheduler.Job("14", "RUNNING", FIRST, "rule_train_drafter", str(folder))
    assert queued[5].comment == "a comment | with a bar"


def test_what_a_job_of_the_queue_makes_is_not_submitted_again(queued, killed):
    drivers.register(killed, FIRST, OUTPUTS)
    with pytest.raises(DraftflowError) as refusal:
        drivers.require_not_submitted(OUTPUTS, queued)
    line = str(refusal.value)
    assert "Job 14 (running)" in line
    assert "train_drafter" in line
    assert "scancel 14" in line


def test_the_same_rule_for_another_run_is_submitted(queued, killed):
    drivers.register(killed, FIRST, OUTPUTS)
    drivers.require_not_submitted({"train_drafter": ["results/runs/b/train.json"]}, queued)


def test_another_job_that_makes_one_of_the_files_is_enough(queued, killed):
    drivers.register(killed, FIRST, {"records_check_records_collect_checks": ["results/runs/a/checks.json"]})
    with pytest.raises(DraftflowError, match=r"Job 15 \(pending\)"):
        drivers.require_not_submitted({"collect_checks": ["results/runs/a/checks.json"]}, queued)


@pytest.mark.parametrize("name", ["train_drafter", "fingerprint"])
def test_without_a_record_of_its_driver_a_job_is_known_by_its_rule(queued, name):
    with pytest.raises(DraftflowError, match=f"already does {name}"):
        drivers.require_not_submitted({name: ["results/anything"]}, queued)


def test_jobs_of_another_folder_and_of_other_programs_are_no_concern(queued):
    drivers.require_not_submitted({"warm_cache": ["results/compile-cache/warm.json"], "bash": [], "null": []}, queued)


def test_the_lock_of_a_killed_snakemake_is_removed(folder, killed):
    lock = lock_of(folder)
    drivers.register(killed, FIRST, OUTPUTS)
    assert f"process {killed.pid}" in drivers.remove_stale_locks()
    assert not lock.exists()


def lock_of(folder):
    lock = folder / ".snakemake/locks/0.output.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text("results/runs/a/train.json\n")
    return lock


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_the_lock_of_one_that_may_live_stays(folder, killed, host):
    living = Process.here() if host == "here" else replace(killed, machine="another machine")
    lock = lock_of(folder)
    drivers.register(killed, FIRST, OUTPUTS)
    drivers.register(living, SECOND, OUTPUTS)
    assert drivers.remove_stale_locks() is None
    assert lock.exists()


def test_a_lock_that_is_younger_than_the_record_is_of_another(folder, killed):
    drivers.register(killed, FIRST, OUTPUTS)
    (record,) = (folder / ".snakemake/draftflow").iterdir()
    past = record.stat().st_mtime - 10
    os.utime(record, (past, past))
    lock = lock_of(folder)
    assert drivers.remove_stale_locks() is None
    assert lock.exists()


def test_records_of_the_dead_go_with_their_last_job(folder, killed, queued, monkeypatch):
    drivers.register(killed, FIRST, OUTPUTS)
    monkeypatch.setattr(scheduler, "queued_jobs", lambda: queued)
    drivers.register(killed, "third", {})
    assert {path.stem for path in drivers.RECORDS.iterdir()} == {FIRST, "third"}
    monkeypatch.setattr(scheduler, "queued_jobs", list)
    drivers.register(Process.here(), "fourth", {})
    assert {path.stem for path in drivers.RECORDS.iterdir()} == {"fourth"}


@pytest.mark.parametrize(("locks", "left"), [(1, {SECOND}), (2, {FIRST, SECOND})])
def test_a_record_of_another_host_goes_once_no_lock_but_ones_own_is_there(folder, killed, locks, left):
    drivers.register(replace(killed, machine="another machine"), FIRST, OUTPUTS)
    lock_of(folder)
    if locks == 2:
        (folder / drivers.LOCKS / "1.output.lock").touch()
    drivers.register(killed, SECOND, OUTPUTS)
    assert {path.stem for path in drivers.RECORDS.iterdir()} == left


CONFIG = """\
Configuration data as of 2026-11-30T19:44:41
AccountingStorageHost   = localhost
AccountingStorageType   = {storage}
ClusterName             = loopback
MinJobAge               = {age} sec
"""


class Settings:
    status_command = "sacct"
    init_seconds_before_status_checks = 10


@pytest.mark.parametrize(
    ("storage", "age", "command", "seconds", "warned"),
    [
        ("accounting_storage/slurmdbd", 300, "sacct", 10, False),
        ("accounting_storage/none", 300, "squeue", 10, False),
        ("(null)", 300, "squeue", 10, False),  # newer versions
        ("accounting_storage/none", 12, "squeue", 4, True),
    ],
)
def test_without_accounting_squeue_tells_what_became_of_a_job(monkeypatch, storage, age, command, seconds, warned):
    answer = subprocess.CompletedProcess([], 0, CONFIG.format(storage=storage, age=age), "")
    monkeypatch.setattr(scheduler, "_ask", lambda *_: answer)
    settings = Settings()
    warning = scheduler.make_jobs_visible(settings)
    assert (settings.status_command, settings.init_seconds_before_status_checks) == (command, seconds)
    assert (warning is not None) == warned
    assert warning is None or "12 s after its end" in warning


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (("RUNNING\n", "", 0), "RUNNING"),
        (("", "slurm_load_jobs error: Invalid job id specified\n", 1), ""),
        (("", "", 0), ""),
        (("", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", 1), None),
    ],
)
def test_a_state_is_only_known_where_slurm_answers(monkeypatch, answer, state):
    output, error, code = answer
    monkeypatch.setattr(scheduler, "_ask", lambda *_: subprocess.CompletedProcess([], code, output, error))
    assert scheduler.state_of("14") == state


@pytest.mark.parametrize(("variable", "answer", "restarts"), [("2", "", 2), (None, "1      \n", 1), (None, "", 0)])
def test_how_often_a_job_was_started_again_is_asked_where_its_step_is_not_told(monkeypatch, variable, answer, restarts):
    monkeypatch.setenv("SLURM_JOB_ID", "14")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if variable is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", variable)
    monkeypatch.setattr(scheduler, "_ask", lambda *_: subprocess.CompletedProcess([], 0, answer, ""))
    assert scheduler.own_job() == ("14", restarts)
