"""The workflow on a Slurm without accounting: failures, submission from a job, and ways to ask for GPUs."""

import subprocess
import sys

import pytest

from draftflow.config import Config
from draftflow.workflow import Workflow

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workflow(on_slurm, slurm_without_accounting):
    return on_slurm(slurm_without_accounting)


def seed(number):
    """Another dataset of given conversations: one job."""
    return ["--config", f"dataset={{sources: [given.jsonl], responses: given, seed: {number}}}"]


def test_without_accounting_the_end_of_a_job_is_seen(workflow):
    result = workflow.run("dataset", *seed(1), timeout=900)
    assert result.output.count("has been submitted with SLURM jobid") == 1


def test_a_failed_job_shows_its_log_and_is_not_tried_again(workflow):
    (workflow.folder / "bad.jsonl").write_text('{"messages": [\n')
    before = set(workflow.folder.glob("logs/slurm/**/*.log"))
    result = workflow.snakemake("dataset", "--config", "dataset={sources: [bad.jsonl], responses: given}", timeout=900)
    assert result.code != 0
    (line,) = result.errors
    assert "bad.jsonl:1" in line
    assert result.output.count("has been submitted with SLURM jobid") == 1
    (log,) = set(workflow.folder.glob("logs/slurm/**/*.log")) - before
    assert str(log) in result.output
    log.unlink()


def test_snakemake_may_itself_run_in_a_job(workflow):
    done = subprocess.run(
        ["srun", "--ntasks=1", "--mem=1000", *workflow.command("dataset", *seed(2))],
        cwd=workflow.folder,
        env=workflow.cluster.environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert (done.stdout + done.stderr).count("has been submitted with SLURM jobid") == 1


def ask(workflow, folder, resources, command):
    """What a job with these resources prints."""
    (folder / "Snakefile").write_text(
        f"""
rule job:
    output: "seen.txt"
    resources: mem_mb=200, runtime=5, **{resources!r}
    shell: "{command} > {{output}}"
"""
    )
    settings = ["--executor", "slurm", "--jobs", "1", "--latency-wait", "10", "--slurm-status-command", "squeue"]
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", *settings, "--slurm-init-seconds-before-status-checks", "1"],
        cwd=folder,
        env=workflow.cluster.environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return sorted((folder / "seen.txt").read_text().splitlines())


@pytest.mark.parametrize("form", ["gpus", "gres"])
def test_a_job_gets_all_gpus_that_it_asks_for_on_one_node(workflow, tmp_path, form):
    asked = Workflow(Config(cluster={"gpus": form, "gpu_model": "fake"}), tmp_path, remote=True).resources(2)
    assert ask(workflow, tmp_path, asked, "echo $SLURM_STEP_NUM_NODES $CUDA_VISIBLE_DEVICES") == ["1 0,1"]


def test_a_job_of_several_nodes_calls_srun_itself_and_has_as_many_gpus_on_each(workflow, tmp_path):
    asked = Workflow(Config(), tmp_path, remote=True).resources(2, nodes=2)
    seen = ask(workflow, tmp_path, asked, "srun --quiet sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'")
    assert seen == ["node1 0,1", "node2 0,1"]
