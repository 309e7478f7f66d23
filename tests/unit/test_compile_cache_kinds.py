"""Several kinds of devices in one run: which are one, which is that of a process, and what is said of any other."""

import copy
import json
from pathlib import Path

import pytest

from draftflow.compile_cache import bundle, key, kinds, location, manifest
from draftflow.compile_cache.kinds import kind_of_this_process, kinds_of_run, read_kind, unlike
from draftflow.compile_cache.local import local_caches
from draftflow.compile_cache.warm import all_in_use
from draftflow.environment import fingerprint
from draftflow.errors import DraftflowError
from draftflow.stage import Record, write_json
from draftflow.training.plan import make_plan

SHAPE = {"block_size": 8, "vocab_size": 49152, "target_layer_ids": (1, 7)}
SETTINGS = {"row_length": 256, "rows_per_step": 8, "anchors_per_row": 32, "precision": "auto"}
PLAN = make_plan(SHAPE, SETTINGS, "cuda", 2)
H100, A100 = "NVIDIA H100, capability 9.0", "NVIDIA A100, capability 8.0"


def part(gpu, driver="580.1"):
    fields = {"torch": "2.11.0", "GPUs": [gpu], "driver": driver}
    return {"digest": f"{gpu} {driver}", "fields": fields}


class Project:
    """Warmed caches of one file each, as warm-up leaves them."""

    def __init__(self, folder, plan=PLAN):
        self.folder, self.plan = folder, plan
        self.names, self.fingerprints, self.records = [], [], []

    def warm(self, name, compile_part, cpu=()):
        write_json(self.folder / "install.json", {"packages": {}})
        held = {**key.contents(compile_part, self.plan), "CPU": list(cpu)}
        cache = self.folder / "cache" / key.cache_key(held)
        (cache / "inductor").mkdir(parents=True, exist_ok=True)
        (cache / "inductor/kernel.so").write_text(name)
        manifest.write(cache)
        self.names.append(name)
        self.fingerprints.append(self.folder / f"fingerprint-{name}.json")
        self.records.append(self.folder / f"step/warm-{name}.json")
        write_json(self.fingerprints[-1], {"compile": compile_part})
        facts = {"key": cache.name, "holds": held, "devices": [], "folder": f"../cache/{cache.name}"}
        write_json(self.records[-1], facts)
        return cache

    def kinds(self):
        return kinds_of_run(self.names, self.fingerprints, self.records, [], self.plan)


@pytest.fixture
def project(tmp_path):
    found = Project(tmp_path)
    found.warm("new", part(H100))
    found.warm("old", part(A100, "570.2"))
    return found


@pytest.mark.parametrize(
    ("here", "name"), [(part(H100), "new"), (part(A100, "570.2"), "old"), (part(A100, "580.1"), None)]
)
def test_a_process_finds_the_kind_of_its_device_and_none_is_told_with_all_keys(project, monkeypatch, here, name):
    monkeypatch.setattr(fingerprint, "take", lambda record: {"compile": here})
    found = project.kinds()
    if name is not None:
        assert kind_of_this_process(found, 2).name == name
        return
    keys = {kind.name: key.cache_key(kind.holds) for kind in found}
    assert keys["new"] != keys["old"]
    with pytest.raises(DraftflowError) as refusal:
        kind_of_this_process(found, 2)
    assert refusal.value.where == "config key cluster.kinds"
    assert f"new (key {keys['new']}) differs in GPUs {H100} -> {A100}; old (key" in refusal.value.what
    assert f"old (key {keys['old']}) differs in driver 570.2 -> 580.1." in refusal.value.what


def test_a_process_need_not_see_all_gpus_of_its_node(project):
    (kind, _) = project.kinds()
    both = copy.deepcopy(kind.holds)
    both["fingerprint"]["fields"]["GPUs"] = [H100, A100]
    mixed = kinds.Kind("mixed", kind.fingerprint, kind.warm, None, both)
    assert unlike(mixed, part(A100)) == []


def test_on_cpus_instructions_tell_kinds_apart(tmp_path, monkeypatch):
    project = Project(tmp_path, make_plan(SHAPE, SETTINGS, "cpu", 2))
    here = {"digest": "same", "fields": {"torch": "2.11.0"}}
    project.warm("wide", here, ["avx2", "avx512f"])
    project.warm("narrow", here, ["avx2"])
    wide, narrow = project.kinds()
    monkeypatch.setattr(key, "cpu_instructions", lambda: ["avx2"])
    assert unlike(narrow, here) == []
    assert unlike(wide, here) == ["another CPU, without avx512f"]


def test_two_names_of_one_kind_are_one(project):
    project.warm("again", part(H100))
    assert [kind.name for kind in project.kinds()] == ["new", "old"]


def test_a_kind_is_read_as_it_was_written(project):
    written = [json.loads(json.dumps(kind.written())) for kind in project.kinds()]
    again = [read_kind(kind) for kind in written]
    assert [kind.written() for kind in again] == written
    assert again[0].warm == project.records[0]
    assert again[0].bundle is None


def test_a_kind_that_was_not_warmed_is_refused_with_the_command_to_run(project):
    project.records[1].unlink()
    with pytest.raises(DraftflowError, match=r"was not warmed\. Run `snakemake --forcerun warm_cache`"):
        project.kinds()


def test_all_caches_are_verified_and_held(project):
    record = Record("train")
    with all_in_use(project.kinds(), record) as cache:
        assert list(cache.folders) == ["new", "old"]
        assert cache.environment == location.SETTINGS
        assert [record["cache"][name]["files"] for name in cache.folders] == [1, 1]
        for folder in (project.folder / "cache").glob("*/"):
            with location.held(folder, alone=False):
                pass
        assert len(cache.hold.descriptors) == 2


def test_a_damaged_cache_of_a_kind_is_refused(project):
    cache = project.warm("third", part("NVIDIA L4"))
    (cache / "inductor/kernel.so").write_text("")
    with (
        pytest.raises(DraftflowError, match=r"kernel\.so is truncated.*snakemake --forcerun warm_cache"),
        all_in_use(project.kinds(), Record("train")),
    ):
        pass


def test_each_node_unpacks_the_caches_of_all_kinds(project, tmp_path):
    bundles = [tmp_path / f"bundle-{name}.tar.xz" for name in project.names]
    for record, packed in zip(project.records, bundles, strict=True):
        bundle.pack(record, packed)
    found = kinds_of_run(project.names, project.fingerprints, project.records, bundles, project.plan)
    record = Record("node")
    with local_caches(found, str(tmp_path / "disk"), record) as cache:
        kernels = {name: (Path(folder) / "inductor/kernel.so").read_text() for name, folder in cache.folders.items()}
        assert kernels == {"new": "new", "old": "old"}
        assert all(Path(folder).is_relative_to(tmp_path / "disk") for folder in cache.folders.values())
        assert {name: told["files"] for name, told in record["cache"].items()} == {"new": 1, "old": 1}
    with local_caches(found[:1], str(tmp_path / "disk"), record) as cache:
        assert (cache.folders, record["cache"]["files"]) == ({}, 1)
        assert "TRITON_CACHE_DIR" in cache.environment
