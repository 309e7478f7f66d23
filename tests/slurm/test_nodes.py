"""Training on two nodes of a Slurm, started by its srun."""

import json
import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

NODES = {
    "run": "nodes",
    "dataset": {"row_length": 256},
    "training": {"devices": {"nodes": 2, "per_node": "cpu"}},
}


def test_training_gets_as_many_nodes_as_it_asks_for_and_the_other_stages_one(on_slurm, slurm):
    workflow = on_slurm(slurm)
    (workflow.folder / "nodes.yaml").write_text(yaml.safe_dump(NODES))
    files = [*workflow.arguments[2:], str(workflow.folder / "nodes.yaml")]
    on_nodes = type(workflow)(workflow.project, workflow.cluster, files).with_profile("nodes", {})
    on_nodes.run("train_drafter")
    (record,) = workflow.folder.glob("results/runs/nodes/*/train.json")
    topology = json.loads(record.read_text())["topology"]
    assert (topology["nodes"], len(topology["ranks"])) == (2, 2)
    nodes = workflow.cluster.run("sacct", "-X", "-n", "-P", "--format=NNodes").split()
    assert (nodes.count("2"), nodes.count("1")) == (1, len(nodes) - 1)


CASE = """
import json, sys
from pathlib import Path
from training_cases import make_case, make_settings
from draftflow.training.devices import Devices

make_case(Path.cwd())
print(json.dumps(make_settings(Devices("cpu", (0,), "cpu", nodes=2, allotted=True), steps=4)))
"""


class OfTwoKinds:
    """The stages as the workflow calls them, on a cluster whose nodes the fingerprint tells apart."""

    def __init__(self, folder, python, cluster):
        self.folder, self.python, self.cluster = folder, python, cluster
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/torch_env")])
        self.environment = {**cluster.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        made = subprocess.run([python, "-c", CASE], cwd=folder, env=self.environment, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        self.settings = made.stdout.splitlines()[-1]

    def stage(self, module, **options):
        words = [word for name, value in options.items() for word in (f"--{name}", *value.split())]
        return shlex.join([str(self.python), "-m", f"draftflow.{module}", *words])

    def submit(self, name, script, *options):
        options = ["--mem=1000", f"--output={self.folder}/{name}.log", f"--chdir={self.folder}", *options]
        command = ["sbatch", *options, f"--wrap={script} && touch {name}.done"]
        subprocess.run(command, check=True, env=self.environment, stdout=subprocess.DEVNULL)

    def end(self, name):
        """Whether a job came to its end, and what it said, once all jobs are over."""
        self.cluster.wait(lambda: not self.cluster.jobs(), "end of the jobs", 300)
        return (self.folder / f"{name}.done").exists(), (self.folder / f"{name}.log").read_text()

    def warm(self, kind):
        fingerprint = self.stage("environment.fingerprint", install="install.json", output=f"fingerprint-{kind}.json")
        options = {"fingerprint": f"fingerprint-{kind}.json", "record": f"step/warm-{kind}.json", "cache": "cache"}
        warm = (
            self.stage("compile_cache.warm", target="target", **options) + f" --settings {shlex.quote(self.settings)}"
        )
        self.submit(kind, f"{fingerprint} && {warm}", f"--constraint={kind}")

    def train(self, *kinds):
        """Whether training on both nodes came to its end, and what it said."""
        warmed = {"fingerprint": "fingerprint-{}.json", "warm": "step/warm-{}.json", "kinds": "{}"}
        inputs = {name: " ".join(map(form.format, kinds)) for name, form in warmed.items()}
        inputs |= {"rows": "rows.safetensors", "target": "target"}
        outputs = {name: name for name in ("checkpoints", "tensorboard")}
        outputs |= {"metrics": "metrics.jsonl", "record": "train.json"}
        script = self.stage("training.train", **inputs, **outputs) + f" --settings {shlex.quote(self.settings)}"
        name = "-".join(["train", *kinds])
        self.submit(name, script, "--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
        return self.end(name)


def test_nodes_of_two_kinds_train_together_once_each_was_warmed(slurm_of_two_kinds, tiny_folder, tmp_path):
    python = os.environ.get("DRAFTFLOW_TEST_PYTHON") or next(
        tiny_folder[0].glob("results/environments/torch-2.11.0-*/venv/bin/python")
    )
    stages = OfTwoKinds(tmp_path, python, slurm_of_two_kinds)
    for kind in ("old", "new"):
        stages.warm(kind)
    for kind in ("old", "new"):
        finished, said = stages.end(kind)
        assert finished, said
    keys = {kind: json.loads((tmp_path / f"step/warm-{kind}.json").read_text())["key"] for kind in ("old", "new")}
    assert keys["old"] != keys["new"]

    finished, said = stages.train("old")
    assert not finished
    (line,) = [line for line in said.splitlines() if line.startswith("draftflow: error: ")]
    assert line.startswith(f"draftflow: error: config key cluster.kinds: Node 1 ({socket.gethostname()}): ")
    assert "The compile cache was not warmed for this kind of device. Of what was warmed, " in line
    assert f"old (key {keys['old']}) differs in TRITON_OF_NODE old -> new. Name each kind of node there" in line

    finished, said = stages.train("old", "new")
    assert finished, said
    record = json.loads((tmp_path / "train.json").read_text())
    assert [rank["kind"] for rank in record["topology"]["ranks"]] == ["old", "new"]
    assert {name: kind["key"] for name, kind in record["kinds"].items()} == keys
    assert [(guard["fx_graph_hits"] > 0, guard["fx_graph_misses"]) for guard in record["guard"]] == [(True, 0)] * 2
