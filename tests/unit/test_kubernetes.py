"""Manifests, and the commands of profiles/kubernetes through a `kubectl` that keeps what it is given."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftflow import kubernetes

ROOT = Path(__file__).parents[2]

KUBECTL = """#!/bin/sh
case "$1" in
create) cat > "$KEPT" ;;
get) [ -z "$DOWN" ] || { echo "Unable to connect to the server: EOF" >&2; exit 1; }
    if [ "$3" = draftflow-known ]; then echo "$STATUS"
    elif [ "$4" != --ignore-not-found ]; then echo 'Error from server (NotFound): jobs "'$3'" not found' >&2; exit 1
    fi ;;
esac
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the module from a project on a volume mounted at tmp_path / "shared"."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kubectl").write_text(KUBECTL)
    (tmp_path / "bin/kubectl").chmod(0o755)
    project = tmp_path / "shared/project"
    project.mkdir(parents=True)
    (project / "job.sh").write_text("true\n")

    def run(*arguments, kubectl=True, **variables):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}" if kubectl else "/nowhere"
        return subprocess.run(
            [sys.executable, "-m", "draftflow.kubernetes", *map(str, arguments)],
            cwd=project,
            env={**os.environ, "PATH": path, "KEPT": str(tmp_path / "kept.json"), **variables},
            capture_output=True,
            text=True,
        )

    run.folder = tmp_path
    return run


def submission(run, *more, script="job.sh"):
    asked = ["--image", "python:3.12", "--claim", "disk", "--mount", run.folder / "shared", "--memory-mb", 8000]
    return run("submit", *asked, "--minutes", 20, *more, script)


def test_a_script_becomes_a_job_that_sees_the_project_where_it_is(run):
    done = submission(run, "--gpus", 8, "--cpus", 64, "--gpu-product", "NVIDIA-H200")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((run.folder / "kept.json").read_text())
    assert done.stdout == manifest["metadata"]["name"] + "\n"
    assert manifest["spec"]["backoffLimit"] == 0
    pod = manifest["spec"]["template"]["spec"]
    assert pod["activeDeadlineSeconds"] == 1200
    (container,) = pod["containers"]
    assert container["command"][-1] == str(run.folder / "shared/project/job.sh")
    assert container["workingDir"] == str(run.folder / "shared/project")
    assert container["resources"]["limits"] == {"cpu": "64", "memory": "8000M", "nvidia.com/gpu": "8"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes["project"]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert mounts["project"] == str(run.folder / "shared")
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}


def test_a_job_without_gpus_asks_for_none_and_runs_anywhere(run):
    assert submission(run, "--gpu-product", "NVIDIA-H200").returncode == 0
    pod = json.loads((run.folder / "kept.json").read_text())["spec"]["template"]["spec"]
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["limits"]
    assert "nodeSelector" not in pod


def test_two_jobs_have_two_names(run):
    assert submission(run).stdout != submission(run).stdout


def test_a_script_that_no_pod_sees_is_refused(run):
    (run.folder / "job.sh").write_text("true\n")
    done = submission(run, script=run.folder / "job.sh")
    assert done.returncode == 1
    assert f"{run.folder / 'job.sh'} is not below {run.folder / 'shared'}" in done.stderr
    assert not (run.folder / "kept.json").exists()


def test_several_nodes_are_refused(run):
    done = submission(run, "--nodes", 2)
    assert done.returncode == 1
    assert "A job of 2 nodes is asked for, and a pod has one." in done.stderr


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], "running"),
        ([{"type": "SuccessCriteriaMet", "status": "True"}], "running"),
        ([{"type": "Complete", "status": "True"}], "success"),
        ([{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}], "failed"),
        ([{"type": "Failed", "status": "False"}], "running"),
    ],
)
def test_the_state_of_a_job_is_one_of_three_words(run, conditions, expected):
    done = run("status", "draftflow-known", STATUS=json.dumps({"status": {"conditions": conditions}}))
    assert done.stdout == f"{expected}\n", done.stderr


def test_a_job_that_somebody_removed_has_failed(run):
    assert run("status", "draftflow-other").stdout == "failed\n"


def test_a_cluster_that_does_not_answer_does_not_end_the_workflow(run):
    done = run("status", "draftflow-known", DOWN="1")
    assert (done.stdout, done.returncode) == ("running\n", 0)
    assert "Unable to connect to the server: EOF." in done.stderr


STAGE = """\
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit("told"))
print("ready", flush=True)
time.sleep(20)
"""


@pytest.mark.parametrize("pause", ["", "; sleep 0.5"], ids=["at once", "the stage has ended before anyone looks"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a process the first one of its namespace")
def test_the_end_of_a_pod_is_told_to_the_stage_and_ends_nothing_else(run, pause):
    (run.folder / "stage.py").write_text(STAGE)
    script = run.folder / "shared/project/job.sh"
    script.write_text(f"{sys.executable} {run.folder}/stage.py; status=$?\necho and then\nexit $status\n")
    assert submission(run).returncode == 0
    pod = json.loads((run.folder / "kept.json").read_text())["spec"]["template"]["spec"]
    command = [word.replace("kill -USR1 -1", f"kill -USR1 -1{pause}") for word in pod["containers"][0]["command"]]
    command = ["unshare", "--pid", "--fork", "--kill-child", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as container:
        assert container.stdout.readline() == "ready\n"
        (first,) = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        output, errors = container.communicate(timeout=120)
    assert (output, errors, container.returncode) == ("and then\n", "told\n", 1)


def test_without_kubectl_that_is_said(run):
    assert "There is no kubectl here." in run("status", "draftflow-known", kubectl=False).stderr


def test_the_profile_fills_in_what_submit_takes():
    profile = yaml.safe_load((ROOT / "profiles/kubernetes/config.yaml").read_text())
    command = profile["cluster-generic-submit-cmd"]
    for placeholder, value in {"resources.gpus_per_node": 8, "resources.nodes": 1, "threads": 64}.items():
        command = command.replace(f"{{{placeholder}}}", str(value))
    command = command.replace("{resources.mem_mb}", "8000").replace("{resources.runtime}", "20")
    done = subprocess.run(
        [sys.executable, *command.split()[1:], "/shared/job.sh"], capture_output=True, text=True, cwd=ROOT
    )
    # all of it was understood, and the project is not on the volume that the profile names
    assert "is not below /shared" in done.stderr
    assert kubernetes.state({}) == "running"
