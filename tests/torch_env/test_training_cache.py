"""What is damaged, killed or done twice in the compile cache, seen by the stages as the workflow calls them."""

import fcntl
import json
import subprocess
import time

import pytest

pytest.importorskip("torch")

from training_cases import Stage, as_started, make_case, make_settings

pytestmark = pytest.mark.slow

SETTINGS = make_settings(steps=4)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    return Stage(folder, make_case(folder), SETTINGS)


def truncate_a_library(cache):
    path = next(cache.rglob("*.so"))
    path.write_bytes(path.read_bytes()[:100])
    return path


def damage_nothing(cache):
    return {}


def truncate_a_library_and_exchange_a_graph(cache):
    library = truncate_a_library(cache)
    path = next(path for path in (cache / "inductor/fxgraph").rglob("*") if path.is_file())
    path.write_bytes(path.read_bytes()[::-1])
    return {str(library.relative_to(cache)): "truncated, 100 of", str(path.relative_to(cache)): "changed"}


def lose_the_manifest(cache):
    (cache / "manifest.json").unlink()
    return {"manifest.json": "missing"}


@pytest.mark.parametrize("damage", [damage_nothing, truncate_a_library_and_exchange_a_graph, lose_the_manifest])
def test_what_is_damaged_in_the_cache_is_compiled_anew_before_training_and_recorded(stage, damage, tmp_path):
    words = damage(stage.cache)
    done = stage.train(SETTINGS, tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "train.json").read_text())
    damaged = record["cache"]["damaged"]
    assert set(damaged) == set(words)
    assert all(damaged[path].startswith(words[path]) for path in words), damaged
    assert ("recompiled_seconds" in record["cache"]) == bool(words)
    assert ("warning: the compile cache is damaged" in done.stdout) == bool(words)
    (guard,) = record["guard"]
    assert (guard["fx_graph_hits"], guard["fx_graph_misses"]) == (3, 0)


def test_a_foreign_file_in_the_cache_is_removed_and_recorded(stage, tmp_path):
    foreign = next((stage.cache / "inductor/fxgraph").glob("*/*")) / "foreign"
    foreign.write_bytes(b"not ours")
    done = stage.train(SETTINGS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"removed {foreign.relative_to(stage.cache)}" in done.stdout
    assert not foreign.exists()
    record = json.loads((tmp_path / "train.json").read_text())
    assert record["cache"]["foreign"] == [str(foreign.relative_to(stage.cache))]


def test_warming_again_finds_everything_and_a_damaged_cache_is_begun_anew(stage, tmp_path):
    assert stage.warm_up(record=tmp_path / "warm.json").returncode == 0
    again = json.loads((tmp_path / "warm.json").read_text())
    assert again["found"]["state"] == "whole"
    assert not again["devices"][0]["cold"]
    assert again["devices"][0]["caches"]["cpp"]["misses"] == 0

    truncate_a_library(stage.cache)
    done = stage.warm_up(record=tmp_path / "warm.json")
    anew = json.loads((tmp_path / "warm.json").read_text())
    assert "is not whole" in done.stdout
    assert anew["found"]["state"] == "damaged"
    assert anew["devices"][0]["cold"]


def test_after_a_warm_up_that_was_killed_one_of_two_begins_anew_and_the_other_waits_for_it(stage, tmp_path):
    outputs = [{"cache": tmp_path / "cache", "record": tmp_path / f"{number}/warm.json"} for number in (0, 1, 2)]
    with subprocess.Popen(stage.warming(**outputs[0]), stdout=subprocess.DEVNULL, env=as_started()) as process:
        deadline = time.monotonic() + 600
        while not list(tmp_path.glob("cache/*/inductor/**/*.so")):  # in the middle of compiling
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
    (lock,) = tmp_path.glob("cache/*.lock")
    with lock.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # until its compiler has ended too
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": as_started()}
    both = [subprocess.Popen(stage.warming(**paths), **pipes) for paths in outputs[1:]]
    said = [process.communicate(timeout=900)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    devices = [json.loads(paths["record"].read_text())["devices"][0] for paths in outputs[1:]]
    cold = [device["cold"] for device in devices]
    assert sorted(cold) == [False, True]
    first = cold.index(True)
    assert "an earlier warm-up was not finished" in said[first]
    assert devices[first]["caches"]["fx_graph"] == {"hits": 0, "misses": 3}
    assert "waiting for the compile cache" in said[1 - first]
    assert f"process {both[first].pid} on" in said[1 - first]
