"""Identities of a configuration, against a folder of locks."""

import json
import shutil
from pathlib import Path

import pytest

from draftflow.config import load
from draftflow.environment.builds import Gpu
from draftflow.errors import DraftflowError
from draftflow.workflow import Workflow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path):
    """A project folder with the committed locks and the starter data."""
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    shutil.copytree(ROOT / "data", tmp_path / "data")
    return tmp_path


def workflow(root, **blocks):
    return Workflow(load({"training": {"devices": "cpu"}, **blocks}), root)


def test_a_build_of_another_index_needs_its_own_lock_and_no_other(root):
    lock = root / "envs/locks/train-2.11.0-cpu-pytorch.txt"
    torch = {"build": "cpu", "index": "pytorch"}
    with pytest.raises(DraftflowError, match=r"train-2\.11\.0-cpu-pytorch\.txt"):
        _ = workflow(root, torch=torch).environments
    lock.write_text("torch==2.11.0+cpu --hash=sha256:" + "0" * 64 + "\n")
    flow = workflow(root, torch=torch)
    assert {name.rsplit("-", 2)[0] for name in flow.environments} == {"torch-2.11.0-cpu", "dataset"}


def test_the_locks_that_are_written_are_those_that_are_needed(root):
    for torch in ({}, {"version": "2.10.0"}, {"build": "cpu", "index": "pytorch"}):
        for responses in ("given", "regenerate"):
            flow = Workflow(load({"torch": torch, "dataset": {"responses": responses}}), root, locking=True)
            needed = {e.settings["choice"]["build"] for e in flow.environments.values() if e.settings["choice"]}
            assert {choice.build for choice in flow.locked_choices} == needed


def test_a_target_that_is_saved_anew_in_its_place_is_another(root, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(b"a" * 8)
    before = workflow(root, target={"source": str(folder)}).target_id
    weights.write_bytes(b"b" * 8)
    assert workflow(root, target={"source": str(folder)}).target_id != before


def test_an_edited_source_is_another_dataset_and_edited_back_the_former(root):
    source = root / "data/starter/smollm2-135m-instruct.jsonl"
    text = source.read_text()
    blocks = {"dataset": {"sources": [str(source)]}}
    before = workflow(root, **blocks).dataset_id
    source.write_text(text.replace("Add 8", "Add 9", 1))
    assert workflow(root, **blocks).dataset_id != before
    source.write_text(text)
    assert workflow(root, **blocks).dataset_id == before


def test_packing_differently_keeps_what_the_target_wrote(root):
    first, second = (workflow(root, dataset={"responses": "regenerate", "row_length": n}) for n in (256, 512))
    assert first.conversations_id == second.conversations_id
    assert first.dataset_id != second.dataset_id
    other = workflow(root, dataset={"responses": "regenerate", "regenerate": {"temperature": 0.7}})
    assert other.conversations_id != first.conversations_id


def test_settings_of_training_do_not_change_what_is_compiled(root):
    first, second = (workflow(root, training={"devices": "cpu", "learning_rate": rate}) for rate in (1e-3, 1e-4))
    assert first.warm_record == second.warm_record
    assert workflow(root, drafter={"layers": 3}).warm_record != first.warm_record
    assert workflow(root, dataset={"seed": 5}).warm_record == first.warm_record


def test_a_split_topology_compiles_what_its_drafter_devices_would_compile_alone(root):
    split = workflow(root, training={"devices": {"target": "cpu:3", "drafter": "cpu:2"}})
    devices = {"kind": "cpu", "ids": (0, 1), "slug": "cpu", "target_ids": (2, 3, 4), "nodes": 1, "allotted": False}
    assert split.step_settings["devices"] == devices
    assert split.compile_cache == workflow(root).compile_cache
    assert split.training_settings["training"]["stream_depth"] == 2


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"devices": {"target": "cpu", "drafter": "cpu:3"}}, "8 rows per step do not divide among 3 devices"),
        ({"devices": {"target": "cpu:3", "drafter": "cpu"}}, "3 target devices never work at a time.*Use 3"),
        ({"devices": {"target": "cpu", "drafter": [0]}}, "One role is on GPUs"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_before_anything_runs(root, training, words):
    with pytest.raises(DraftflowError, match=words):
        _ = workflow(root, training=training).training_settings


def test_float8_on_a_gpu_without_it_is_refused_before_anything_runs(root, monkeypatch):
    gpus = [
        Gpu(0, "NVIDIA A100", "GPU-0", 81920, "580.65.06", "8.0"),
        Gpu(1, "NVIDIA H100", "GPU-1", 81920, "580.65.06", "9.0"),
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("draftflow.environment.builds.detect_gpus", lambda: gpus)
    with pytest.raises(DraftflowError, match=r"training.precision: .*NVIDIA A100 \(compute capability 8.0\)"):
        _ = workflow(root, training={"precision": "fp8", "devices": [0]}).training_settings
    assert workflow(root, training={"precision": "fp8", "devices": [1]}).training_settings["precision"] == "fp8"


def remote(root, **blocks):
    return Workflow(load({"training": {"devices": "cpu:2"}, **blocks}), root, remote=True)


def test_on_a_cluster_nothing_depends_on_the_gpus_of_this_host(root, monkeypatch):
    here = remote(root)
    paths = [here.environment.id, here.compile_cache, here.warm_record]
    old = Gpu(0, "An old one", "GPU-0", 8192, "525.60.13", "7.0")  # auto would take cu126 for this driver
    monkeypatch.setattr("draftflow.environment.builds.detect_gpus", lambda: [old])
    there = remote(root)
    assert [there.environment.id, there.compile_cache, there.warm_record] == paths
    assert there.gpus == []


def test_on_a_cluster_devices_are_named_and_not_looked_for(root):
    with pytest.raises(DraftflowError, match="depends on the GPUs of the host that reads it"):
        _ = remote(root, training={"devices": "auto"}).devices


@pytest.mark.parametrize(
    ("cluster", "asked"),
    [
        ({}, {"gpu": 8, "nodes": 1}),
        ({"gpu_model": "h100"}, {"gpu": 8, "gpu_model": "h100", "nodes": 1}),
        ({"gpus": "gres"}, {"gres": "gpu:8", "nodes": 1}),
        ({"gpus": "gres", "gpu_model": "h100"}, {"gres": "gpu:h100:8", "nodes": 1}),
    ],
)
def test_a_job_asks_for_gpus_as_the_cluster_takes_it(root, cluster, asked):
    assert remote(root, cluster=cluster).resources(8) == {**asked, "gpus_per_node": 8}
    assert remote(root, cluster=cluster).resources(0) == {"gpu": 0, "nodes": 1}
    assert Workflow(load({"cluster": cluster}), root).resources(8) == {"gpu": 8, "nodes": 1}


def test_a_job_of_several_nodes_asks_for_gpus_by_node(root):
    spread = {"nodes": 2, "tasks": 2, "tasks_per_gpu": 0, "mpi": "srun"}
    assert remote(root).resources(8, nodes=2) == {"gres": "gpu:8", "gpus_per_node": 8, **spread}
    assert remote(root).resources(0, nodes=2) == {"gpu": 0, **spread}


def test_a_job_on_one_node_asks_for_the_first_kind_and_one_on_several_for_none(root):
    kinds = {"b": {"constraint": "b"}, "a": {"constraint": "a"}}
    flow = remote(root, cluster={"kinds": kinds})
    assert flow.resources(8) == {"gpu": 8, "gpus_per_node": 8, "nodes": 1, "constraint": "b"}
    assert flow.resources(0) == {"gpu": 0, "nodes": 1, "constraint": "b"}
    assert "constraint" not in flow.resources(8, nodes=2)
    assert flow.other_kinds == ["a"]
    assert flow.warm_record == remote(root).warm_record
    assert "constraint" not in Workflow(load({"cluster": {"kinds": kinds}}), root).resources(8)
    with pytest.raises(DraftflowError, match="do not ask for the same resources"):
        _ = remote(root, cluster={"kinds": {"a": {"constraint": "a"}, "b": {"slurm_partition": "b"}}}).kinds


def test_a_job_asks_for_cores_by_device(root):
    assert remote(root, cluster={"cores_per_device": 6}).cores(4) == 24


def test_devices_of_a_scheduler_are_asked_for_and_not_looked_for(root):
    blocks = {"training": {"devices": {"nodes": 2, "per_node": 8}, "rows_per_step": 16}}
    blocks["cluster"] = {"gpu_model": "h200", "launcher": ["mpirun"]}
    flow = Workflow(load(blocks), root, remote=True)
    assert (flow.devices.kind, flow.devices.count, flow.compile_cache.name) == ("cuda", 16, "h200")
    assert flow.choice.build == "cu130"
    assert flow.resources(flow.devices.gpus) == {"gpu": 8, "gpu_model": "h200", "gpus_per_node": 8, "nodes": 1}
    assert flow.resources(flow.devices.gpus, flow.devices.nodes)["gres"] == "gpu:h200:8"
    assert flow.cluster_settings == {"launcher": ["mpirun"], "node_timeout": 120.0}
    assert "mpirun" not in json.dumps([flow.training_settings, flow.step_settings])
