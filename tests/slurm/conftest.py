"""The workflow in a folder with a tiny target, sent to a Slurm on loopback through profiles/slurm."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import cluster
import pytest
import yaml

ROOT = Path(__file__).parents[2]
BUILD = "torch-2.11.0"
HURRIED = (str(Path(__file__).with_name("hurried_snakemake.py")),)

# What a small cluster of small jobs wants otherwise; everything else is as users get it.
SIZES = {"mem_mb": 500, "runtime": 10}
CONFIG = {
    "run": "slurm",
    "torch": {"version": "2.11.0"},
    "dataset": {"seed": 4},  # packed anew; what the target wrote is there if tests/workflow has been run before
    "cluster": {"cores_per_device": 1},
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Two nodes of two GPUs, with accounting."""
    yield from cluster.bring_up(tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="module")
def slurm_without_accounting(tmp_path_factory):
    """Two nodes of three GPUs, without accounting."""
    yield from cluster.bring_up(tmp_path_factory.mktemp("slurm"), accounting=False, gpus=3)


@pytest.fixture(scope="module")
def slurm_of_two_kinds(tmp_path_factory):
    """Two nodes, which the fingerprint tells apart."""
    folder = tmp_path_factory.mktemp("slurm")
    yield from cluster.bring_up(folder, accounting=False, gpus=0, min_job_age=30, kinds=("old", "new"))


@dataclass(frozen=True)
class OnSlurm:
    """The workflow in a folder, whose jobs go to a cluster."""

    project: object
    cluster: cluster.Cluster
    arguments: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.project.folder

    def with_profile(self, name: str, changes: Mapping[str, dict]) -> "OnSlurm":
        """With profiles/slurm as a user edits it: `changes` to its resources, by rule."""
        profile = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())
        profile["default-resources"] |= SIZES
        for rule, resources in profile["set-resources"].items():
            resources |= {"mem_mb": 2500, "runtime": 10} | changes.get(rule, {})
        profile |= {"slurm-init-seconds-before-status-checks": 1, "latency-wait": 10}
        folder = self.folder / f"profile-{name}"
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(profile))
        return replace(self, arguments=["--profile", str(folder), *self.arguments])

    def command(self, *arguments: str) -> list[str]:
        return self.project.command(*arguments, *self.arguments)

    def snakemake(self, *arguments: str, timeout: float = 1800):
        return self.project.snakemake(*arguments, *self.arguments, timeout=timeout)

    def run(self, *arguments: str, timeout: float = 1800):
        return self.project.run(*arguments, *self.arguments, timeout=timeout)


@pytest.fixture(scope="session")
def tiny_folder(shared_project, tmp_path_factory):
    """A folder with an environment, the tiny target and some conversations: (folder, its configuration files).

    DRAFTFLOW_TEST_PYTHON names an interpreter with the training environment, in place of one that is installed.
    """
    python, config = os.environ.get("DRAFTFLOW_TEST_PYTHON"), dict(CONFIG)
    project = shared_project
    if python:
        project = type(shared_project)(tmp_path_factory.mktemp("project"))
        config["torch"] = {**config["torch"], "build": "external", "interpreter": python}
    (project.folder / "slurm.yaml").write_text(yaml.safe_dump(config))
    talk = [{"prompt": f"Count on from {n}.", "response": f"{n + 1}, {n + 2} and {n + 3}."} for n in range(48)]
    lines = (ROOT / "data/starter/prompts.jsonl").read_text().splitlines()
    (project.folder / "prompts.jsonl").write_text("\n".join([line for line in lines if len(line) < 160][:48]) + "\n")
    (project.folder / "given.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in talk))
    files = ["--configfile", str(ROOT / "tests/tiny.yaml"), str(project.folder / "slurm.yaml")]
    project.run("environment", *files)
    if not (project.folder / "tiny-target").exists():
        if python:
            subprocess.run([python, ROOT / "tests/torch_env/tiny.py", project.folder / "tiny-target"], check=True)
        else:
            made = project.python(BUILD, ROOT / "tests/torch_env/tiny.py", project.folder / "tiny-target")
            assert made.returncode == 0
    return project.folder, files


@pytest.fixture(scope="session")
def on_slurm(tiny_folder, shared_project):
    """The workflow on a cluster."""
    folder, files = tiny_folder

    def make(running: cluster.Cluster) -> OnSlurm:
        project = type(shared_project)(folder, running.environment, HURRIED)
        return OnSlurm(project, running, files).with_profile("as-shipped", {})

    return make
