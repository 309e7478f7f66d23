"""Training on two nodes of a Slurm, started by its srun."""

import json

import pytest
import yaml

pytestmark = pytest.mark.slow

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
