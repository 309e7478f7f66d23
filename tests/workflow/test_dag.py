"""Dry runs: which jobs each target needs, and which of them a change of the configuration causes."""

import re
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ENVIRONMENT = {"install": 1, "fingerprint": 1, "environment": 1}
# the environment of the dataset stages, and the target's package
DATASET = {"install": 1, "install_target_package": 1, "prepare_target": 1, "read_conversations": 1, "pack_rows": 1}
TRAINING = {"warm_cache": 1, "train_drafter": 1, "export_drafter": 1}
CHECKS = {
    "check_weights": 1,
    "check_generation": 1,
    "check_records": 1,
    "collect_checks": 1,
    "plot_run": 1,
    "require_checks": 1,
}
# what is compiled depends on shapes and on the target, on no dataset
UP_TO_WARM = {"install": 2, "install_target_package": 1, "prepare_target": 1, "fingerprint": 1, "warm_cache": 1}
WHOLE = {**DATASET, **UP_TO_WARM, **TRAINING, **CHECKS}


@pytest.mark.parametrize(
    ("target", "jobs"),
    [
        ("train", {**WHOLE, "train": 1}),
        ("check", {**WHOLE, "check": 1}),
        ("environment", ENVIRONMENT),
        ("dataset", {**DATASET, "dataset": 1}),
        ("warm_cache", UP_TO_WARM),
        ("bundle_cache", {**UP_TO_WARM, "bundle_cache": 1}),
        ("lock", {"lock": 1}),
    ],
)
def test_a_fresh_folder_needs_exactly_these_jobs(project, target, jobs):
    assert project.run("--dry-run", target).jobs == jobs


def test_train_is_the_default_target(project):
    assert project.run("--dry-run").jobs == {**WHOLE, "train": 1}


def test_regenerated_responses_need_the_target_and_an_environment_with_torch(project):
    jobs = project.run("--dry-run", "dataset", "--config", "dataset={responses: regenerate}").jobs
    assert jobs == {**DATASET, "install": 2, "regenerate_responses": 1, "dataset": 1}


def folders(project, *arguments):
    """First folders below results/ of all outputs of a dry run of everything, by kind."""
    result = project.run("--dry-run", *arguments).output
    words = {word.strip(",") for line in result.splitlines() for word in line.split() if word.startswith("results/")}
    return {
        kind: {word.split("/")[2] for word in words if word.startswith(f"results/{kind}/")}
        for kind in ("environments", "datasets", "targets")
    }


def test_another_torch_version_is_another_environment_and_the_same_dataset(project):
    before, after = folders(project), folders(project, "--config", "torch={version: 2.10.0}")
    assert before["datasets"] == after["datasets"]
    assert before["targets"] == after["targets"]
    assert set(before["environments"] ^ after["environments"]) == {
        *(name for name in before["environments"] if name.startswith("torch-2.11.0-cu130-")),
        *(name for name in after["environments"] if name.startswith("torch-2.10.0-cu128-")),
    }


@pytest.mark.parametrize(
    "change",
    ["dataset={seed: 1}", "dataset={row_length: 512}", "dataset={held_out: 0.2}", "dataset={responses: regenerate}"],
)
def test_what_decides_the_dataset_changes_its_identity(project, change):
    before, after = folders(project), folders(project, "--config", change)
    assert before["datasets"].isdisjoint(after["datasets"])
    assert before["targets"] == after["targets"]


def test_where_packages_come_from_changes_nothing(project):
    assert folders(project) == folders(project, "--config", "torch={index: pypi}")


def test_nodes_copy_the_environment_and_the_cache_and_the_workflow_itself_does_not(project):
    node_local = ("--config", "environment={node_local: '$SCRATCH/it'}")
    result = project.run("--dry-run", "--printshellcmds", "train", *node_local)
    assert result.jobs == {**WHOLE, "pack_environment": 1, "bundle_cache": 1, "train": 1}
    commands = [line for line in result.output.splitlines() if line.startswith("Shell command:")]
    copied = {word for line in commands if "DRAFTFLOW_NODE_LOCAL='$SCRATCH/it'" in line for word in line.split()}
    stages = {"environment.fingerprint", "compile_cache.warm", "training.train", "compile_cache.within"}
    stages |= {"checks.generation"}
    found = {word for word in copied if word.startswith("draftflow.")}
    assert found == {*(f"draftflow.{stage}" for stage in stages), "draftflow.checks.weights"}
    (training,) = [line for line in commands if "draftflow.training.train" in line]
    assert "--node-local '$SCRATCH/it' --bundle results/compile-cache/" in training


def test_where_nodes_run_from_is_no_reason_to_write_responses_anew(project):
    def inputs(*blocks):
        output = project.run("--dry-run", "train", "--config", "dataset={responses: regenerate}", *blocks).output
        rules = re.findall(r"^(?:local)?rule (\w+):\n    input: (.*)$", output, re.MULTILINE)
        return {rule for rule in rules if rule[0] in (*DATASET, "regenerate_responses")}

    before = inputs()
    assert "regenerate_responses" in dict(before)
    assert inputs("environment={node_local: /scratch}") == before


def test_an_interpreter_of_somebody_else_is_not_copied_and_that_is_said_once(project):
    # what is looked at of an interpreter before anything runs is in reach of one with a torch of two files
    venv.create(project.folder / "external")
    site = project.only("external/lib/python3*/site-packages")
    for path, text in {
        "torch/version.py": "__version__ = '2.11.0'\n",
        "torch-2.11.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n",
    }.items():
        (site / path).parent.mkdir()
        (site / path).write_text(text)
    torch = "torch={version: 2.11.0, build: external, interpreter: external/bin/python}"
    result = project.run("--dry-run", "train", "--config", torch, "environment={node_local: /scratch}")
    assert "pack_environment" not in result.jobs
    assert result.jobs["bundle_cache"] == 1
    assert result.output.count("an external interpreter is not copied") == 1


def test_each_kind_of_node_is_warmed_once_by_a_job_on_such_a_node(project):
    kinds = "cluster={kinds: {h100: {constraint: h100}, a100: {constraint: a100}, l4: {constraint: l4}}}"
    asked = ["--profile", str(ROOT / "profiles/slurm"), "--set-resources", "train_drafter:constraint=[h100*1&a100*1]"]
    blocks = ["training={devices: {nodes: 2, per_node: 4}}", "environment={node_local: /scratch}", kinds]
    result = project.run("--dry-run", "--printshellcmds", "train", *asked, "--config", *blocks)
    several = {"fingerprint_kind": 2, "warm_kind": 2, "bundle_kind": 2}
    assert result.jobs == {**WHOLE, **several, "pack_environment": 1, "bundle_cache": 1, "train": 1}
    _, *jobs = re.split(r"^ *(?:local)?rule (\w+):$", result.output, flags=re.MULTILINE)
    facts = zip(jobs[::2], jobs[1::2], strict=True)
    on = {(rule, kind) for rule, text in facts for kind in re.findall(r"constraint=([^,\n]+)", text)}
    of_each = {(f"{stage}_kind", kind) for stage in ("fingerprint", "warm") for kind in ("a100", "l4")}
    first = ("fingerprint", "warm_cache", "check_weights", "check_generation")
    assert on == {*of_each, *((rule, "h100") for rule in first), ("train_drafter", "[h100*1&a100*1]")}
    (training,) = [line for line in result.output.splitlines() if "draftflow.training.train" in line]
    assert " --kinds h100 a100 l4 " in training
    for name, suffix in (("fingerprint", "json"), ("warm", "json"), ("bundle", "tar.xz")):
        assert re.search(rf"/{name}\.{suffix} \S+/{name}-a100\.{suffix} \S+/{name}-l4\.{suffix} ", training)


@pytest.mark.parametrize("profile", ["slurm", "cluster-generic", "kubernetes"])
def test_each_profile_s_dry_run_has_all_jobs_and_refuses_devices_that_it_cannot_know(project, profile):
    asked = ["--dry-run", "train", "--profile", str(ROOT / "profiles" / profile), "--config"]
    assert project.run(*asked, "training={devices: {nodes: 1, per_node: 8}}").jobs == {**WHOLE, "train": 1}
    (line,) = project.snakemake(*asked, "training={devices: auto}").errors
    assert "depends on the GPUs of the host that reads it" in line
