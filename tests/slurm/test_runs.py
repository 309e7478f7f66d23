"""The workflow on a Slurm with accounting: a whole run, and what befalls long jobs. The tests share one folder."""

import json
import os
import signal
import subprocess
import time

import pytest
import yaml

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workflow(on_slurm, slurm):
    return on_slurm(slurm)


def test_a_whole_run_goes_through_the_queue_in_few_jobs(workflow):
    for warm in workflow.folder.glob("results/compile-cache/torch-2.11.0-*/cpu/*/warm.json"):
        warm.unlink()  # what is compiled stays
    # where only one account and QOS may use a partition
    paid = ["slurm_partition=paid", "slurm_account=test", "qos=normal", "mem_mb=500", "runtime=10"]
    result = workflow.run("train", "--default-resources", *paid)
    (checks,) = workflow.folder.glob("results/runs/slurm/*/checks.json")
    assert json.loads(checks.read_text())["passed"]
    listing = workflow.cluster.run("sacct", "-X", "-n", "-P", "--format=State,ExitCode,Partition,Account,QOS")
    assert set(listing.split()) == {"COMPLETED|0:0|paid|test|normal"}
    assert result.output.count("has been submitted with SLURM jobid") == len(listing.split())
    # in turn the dataset, the compile cache, training, and three for what comes after it
    rules = set(result.jobs) - {"train", "require_checks", "install", "prepare_target"}
    shared = {"export_drafter", "plot_run", "collect_checks"}  # with the stage before them
    assert len(listing.split()) == len(rules - shared)
    assert rules >= {"pack_rows", "warm_cache", "train_drafter", "check_weights", "check_generation", *shared}
    assert not list(workflow.folder.glob("logs/slurm/**/*.log"))  # those of jobs that succeeded are of no use


LONG = {
    "run": "long",
    "training": {"steps": {"cpu": 1000000}, "evaluate_every": 1000000, "checkpoint_every": 1000000},
}


@pytest.fixture(scope="module")
def long_run(workflow):
    """A training that would take hours."""
    (workflow.folder / "long.yaml").write_text(yaml.safe_dump(LONG))
    limits = {"train_drafter": {"runtime": 60, "slurm_extra": "--signal=USR1@10"}}
    files = [*workflow.arguments[2:], str(workflow.folder / "long.yaml")]
    long = type(workflow)(workflow.project, workflow.cluster, files).with_profile("long", limits)
    long.run("train_drafter", "--until", "warm_cache", "pack_rows")
    return long


class Driver:
    """A Snakemake that runs beside the test, and the log of its training."""

    def __init__(self, workflow):
        self.workflow = workflow
        self.output = workflow.folder / "driver.txt"
        for log in workflow.folder.glob("logs/runs/long/*/train.log"):
            log.unlink()  # of the driver before
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                workflow.command("train_drafter"),
                cwd=workflow.folder,
                env={**os.environ, **workflow.project.variables},
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                # a shell that runs the tests in the background has them ignore it
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def log(self):
        return "".join(path.read_text() for path in self.workflow.folder.glob("logs/runs/long/*/train.log"))

    def wait(self, words, seconds=1200):
        """Until the log of the training has these words."""
        end = time.monotonic() + seconds
        while words not in self.log():
            assert time.monotonic() < end, f"no {words!r} in: {self.log()}\n{self.output.read_text()[-3000:]}"
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            time.sleep(0.5)


def test_a_long_job_goes_on_after_its_time_a_kill_a_requeue_and_the_death_of_its_node(long_run):
    first = Driver(long_run)
    try:
        first.wait("ms a step")
        _end_soon(long_run.cluster)
        first.wait("resuming from step")
        text = first.output.read_text()
        assert "Trying to restart job" in text
        assert "stopped after step" in text  # the log of the job that was told to end

        # the driver is killed: its job goes on, and nobody submits another
        first.process.kill()
        first.process.wait()
        ((job, state, comment),) = long_run.cluster.jobs()
        assert (state, comment) == ("RUNNING", "rule_train_drafter")
        again = long_run.snakemake("train_drafter")
        assert again.code != 0
        assert (
            f"draftflow: the Snakemake that drove this folder was killed (process {first.process.pid}" in again.output
        )
        (line,) = again.errors
        assert f"Job {job} (running)" in line
        assert f"scancel {job}" in line
        assert "LockException" not in again.output
        assert [entry[0] for entry in long_run.cluster.jobs()] == [job]

        # cancelled, it writes a checkpoint, from which the same command goes on
        resumed_at = _resumed_at(first.log())
        first.workflow.cluster.run("scancel", job)
        long_run.cluster.wait(lambda: not long_run.cluster.jobs(), "end of the job", 300)
    finally:
        first.process.kill()
    second = Driver(long_run)
    try:
        second.wait("resuming from step")
        assert _resumed_at(second.log()) > resumed_at

        # put back into the queue, the job writes a checkpoint, and goes on from it
        resumed_at = _resumed_at(second.log())
        ((job, _, _),) = long_run.cluster.jobs()
        long_run.cluster.run("scontrol", "requeue", job)
        _start_again(second, job)
        assert _resumed_at(second.log()) > resumed_at

        # where its node dies, it goes on from there on another
        resumed_at = _resumed_at(second.log())
        node = long_run.cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
        long_run.cluster.lose(node)
        _start_again(second, job)
        assert _resumed_at(second.log()) == resumed_at  # nobody could write another
        assert long_run.cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip() != node
        long_run.cluster.bring_back(node)

        # and interrupted, Snakemake takes its job with it
        second.process.send_signal(signal.SIGINT)
        long_run.cluster.wait(lambda: not long_run.cluster.jobs(), "end of the job", 300)
        assert second.process.wait(300) != 0
    finally:
        second.process.kill()


def _end_soon(cluster):
    """Have the time of the one job be over in one to two minutes: however slow the machine, it trains by then.

    Slurm looks at the times of jobs twice a minute: one whose time is over at the next look gets no warning before.
    """
    ((job, used),) = [line.split() for line in cluster.run("squeue", "-h", "-o", "%i %M").splitlines()]
    minutes = sum(int(part) * 60**power for power, part in enumerate(reversed(used.split(":")[:-1])))
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")


def _start_again(driver, job):
    """Wait until Slurm has started a job again, at once and not after the minutes that it lets pass, and it trains."""
    cluster = driver.workflow.cluster
    cluster.wait(lambda: [state for _, state, _ in cluster.jobs("-j", job)] == ["PENDING"], "job in the queue", 300)
    for log in driver.workflow.folder.glob("logs/runs/long/*/train.log"):
        log.unlink()
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    driver.wait("resuming from step")


def _resumed_at(log):
    return int(log.rpartition("resuming from step ")[2].split()[0])
