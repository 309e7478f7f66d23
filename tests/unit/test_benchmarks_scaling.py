"""The model of the time per step, against what is computed by hand; and the page that holds its tables."""

import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import scaling  # noqa: E402
from scaling import Link, Machine, Times  # noqa: E402

from draftflow.errors import DraftflowError  # noqa: E402

NOTHING = Link(math.inf, 0.0)
# moves and writes everything at once
IDEAL = Machine(NOTHING, NOTHING, launch=0.0, disk=math.inf)
PAGE = ROOT / "docs/scaling.md"


def model(**times: float) -> scaling.Model:
    """Qwen3-8B with round times of one row, in seconds."""
    parts = {"target": 3.0, "forward": 1.0, "backward": 2.0, "optimizer": 0.5, **times}
    return replace(scaling.assumed("qwen3-8b", IDEAL), times=Times(rows=1, source="by hand", **parts))


@pytest.fixture(autouse=True)
def _no_data(monkeypatch):
    monkeypatch.setattr(scaling, "DATA_SECONDS", 0.0)


def test_a_ring_within_a_node():
    machine = Machine(Link(100.0, 0.01), NOTHING, launch=0.5)
    # 2 ranks: 2 steps, each of half of the 1000 bytes
    assert scaling.all_reduce(1000.0, 2, machine) == pytest.approx(0.5 + 2 * (500 / 100 + 0.01))
    # 8 ranks: 14 steps, each of an eighth
    assert scaling.all_reduce(1000.0, 8, machine) == pytest.approx(0.5 + 14 * (125 / 100 + 0.01))
    assert scaling.all_reduce(1000.0, 1, machine) == 0.0


def test_between_nodes_the_slower_link_decides_and_the_faster_of_ring_and_tree_is_taken():
    machine = Machine(Link(100.0, 0.01), Link(10.0, 1.0), launch=0.0)
    # 4 nodes, 32 ranks. Ring: 62 steps, 6 of them between nodes. Tree: two levels, and 7 hops in the node, up and down
    ring = 62 / 32 * 1000 / 10 + 6 * 1.0 + 56 * 0.01
    tree = 2 * 1000 / 10 + 2 * (2 * 1.0 + 7 * 0.01)
    assert scaling.all_reduce(1000.0, 32, machine) == pytest.approx(min(ring, tree)) == pytest.approx(ring)
    assert scaling.all_reduce(0.0, 32, machine) == pytest.approx(2 * (2 * 1.0 + 7 * 0.01))


def test_gradients_hide_behind_the_backward_pass_but_for_the_last():
    one = model()
    # a byte takes so long that a layer's gradient takes 0.1 s on 2 GPUs: five of them hide behind 2 s
    layer_bytes = 2 * one.layer_parameters
    machine = replace(IDEAL, nvlink=Link(layer_bytes / 0.1, 0.0))
    last = 0.1 * one.fc_parameters / one.layer_parameters
    assert scaling.exposed_reduction(one, one.times, 2, machine) == pytest.approx(0.1 + last)
    # ten times slower, they are there one after the other from the first on, which is there after 0.4 s
    machine = replace(IDEAL, nvlink=Link(layer_bytes / 1.0, 0.0))
    assert scaling.exposed_reduction(one, one.times, 2, machine) == pytest.approx(0.4 + 5 * 1.0 + 10 * last - 2.0)


def test_gradients_of_a_step_that_is_replayed_are_summed_as_one_behind_it():
    machine = Machine(Link(100e9, 1e-3), NOTHING, launch=1e-3, memory_bandwidth=1e12)
    small = scaling.assumed("smollm2", machine)
    size = 2 * small.parameters
    # half a ring of both halves, and its two hops; read and written twice; then the statistics
    whole = size / 100e9 + 2e-3 + 1e-3 + 4 * size / 1e12 + 3e-3
    assert scaling.exposed_reduction(small, small.times, 2, machine) == pytest.approx(whole)
    # with so many rows that the device is slower than its host, they are summed beside the backward pass
    many = small.times.for_rows(800)
    assert scaling.exposed_reduction(small, many, 2, machine) != pytest.approx(whole)


def test_the_gradients_are_those_of_the_drafter():
    one = model()
    assert one.shape.layers * one.layer_parameters + one.fc_parameters == one.parameters
    assert one.fc_parameters == 5 * 4096 * 4096 + 2 * 4096
    # taps x hidden x 2 bytes
    assert one.batch_feature_bytes / 3072 == 5 * 4096 * 2


def test_a_step_of_each_topology():
    one = model()
    assert scaling.colocated(one, 1, 1, IDEAL).seconds == pytest.approx(6.5)
    assert scaling.colocated(one, 4, 8, IDEAL).seconds == pytest.approx(2 * 6.0 + 0.5)
    alike = scaling.split(one, 1, 1, 1, IDEAL)
    assert (alike.seconds, alike.bound) == (pytest.approx(3.5), "drafter")
    slow = scaling.split(one, 3, 2, 3, IDEAL)
    assert (slow.seconds, slow.bound) == (pytest.approx(3 * 3.0 / 2), "target")
    # room for two batches keeps two targets busy, and not five
    assert scaling.split(model(target=30.0), 1, 5, 1, IDEAL).seconds == pytest.approx(30.0 / 2)


def test_features_take_the_network_where_the_roles_are_on_several_nodes():
    one, size = model(), model().batch_feature_bytes
    machine = replace(IDEAL, network=Link(size / 2, 0.0))
    assert scaling.split(one, 4, 4, 4, machine).bound == "drafter"
    # each row takes 2 s on a node's network, and eight drafters of a node take one each
    far = scaling.split(one, 8, 8, 8, machine)
    assert (far.seconds, far.bound) == (pytest.approx(16.0), "network")


def test_where_nothing_but_work_takes_time_every_topology_that_divides_it_is_as_fast():
    one = model(optimizer=0.0)
    points = [scaling.colocated(one, gpus, gpus, IDEAL) for gpus in scaling.GPUS]
    points += [scaling.split(one, half, half, half, IDEAL) for half in (1, 8, 64)]
    assert [point.rate for point in points] == pytest.approx([1 / 6.0] * len(points))
    assert scaling.best_split(one, 64, IDEAL, 1, None).rate == pytest.approx(1 / 6.0)


@pytest.mark.parametrize("name", scaling.MODELS)
def test_one_gpu_has_an_efficiency_of_one_and_more_never_have_more(name):
    machine = Machine(scaling.NVLINK, scaling.NETWORKS["1 x 100 Gb/s"])
    one = scaling.assumed(name, machine)
    for points in (scaling.growing(one, machine), scaling.fixed(one, machine)):
        first, split = points[0]
        assert scaling.efficiency(first, points) == 1.0
        assert split is None
        found = [scaling.efficiency(point, points) for point, _ in points if point]
        assert found == sorted(found, reverse=True)
        assert all(0 < value <= 1 for value in found)


def test_what_does_not_fit_in_memory_is_in_brackets_and_does_not_count():
    machine = Machine(scaling.NVLINK, scaling.NETWORKS["8 x 400 Gb/s"], memory=80e9)
    one = scaling.assumed("qwen3-32b", machine)
    points = scaling.growing(one, machine)
    assert scaling.cell(one, points[3][0], points, machine).startswith("(")
    assert not scaling.cell(one, points[3][1], points, machine).startswith("(")
    assert scaling.largest(one, points, 0, 0.5, machine) == "none"
    assert scaling.largest(one, points, 1, 0.5, machine) == "512 or more"
    assert "alone: 2, 4, 8" in scaling.overtakes(one, points, machine)


def written(tmp_path: Path, **case) -> Path:
    """What benchmarks/step_time.py writes, in small."""
    found = {"ms": [90.0, 100.0, 110.0], "train_ms": [120.0]}
    base = {"shape": "qwen3-8b", "block_size": 16, "row_length": 3072, "anchors": 512, "rows": 1, "target_layers": 8}
    results = {
        "device": "a device",
        "date": "a day",
        "command": "a command",
        "cases": [{**base, "trainers": {"draftflow": found}, "target": {"draftflow": [60.0]}, **case}],
    }
    path = tmp_path / "step_time.json"
    path.write_text(json.dumps(results))
    return path


def test_what_was_measured_takes_the_place_of_what_was_assumed(tmp_path: Path):
    machine = Machine(scaling.NVLINK, NOTHING)
    four, eight = (list(scaling.models_of([scaling.read(written(tmp_path))], machine))[i] for i in (1, 2))
    times = eight.times
    assert times.source == "measured: a device, a day, `a command`"
    assert times.forward + times.backward == pytest.approx(0.100)
    assert times.optimizer == pytest.approx(0.020)
    # the benchmark's target of eight layers ran six of them, and the drafter's 34 of 36
    assert times.target == pytest.approx(0.060 / 6 * 34)
    assert four.times.source.startswith("assumed")
    assert "measured: a device" in scaling.tables(["--read", str(written(tmp_path))])


@pytest.mark.parametrize("other", [{"block_size": 8}, {"row_length": 1024}, {"anchors": 256}, {"shape": "qwen3-4b"}])
def test_a_measurement_of_another_step_is_not_taken(other, tmp_path: Path):
    found = list(scaling.models_of([scaling.read(written(tmp_path, **other))], Machine(scaling.NVLINK, NOTHING)))
    assert found[2].times.source.startswith("assumed")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"cases": []}'])
def test_another_file_is_refused(text, tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(DraftflowError, match=r"other\.json: This is not what the benchmark of a step writes"):
        scaling.read(path)


def test_the_page_holds_what_its_command_writes(monkeypatch):
    monkeypatch.undo()
    text = PAGE.read_text()
    tables = text.partition(scaling.BEGIN)[2].partition(scaling.END)[0].strip()
    command = tables.rpartition("Made by `")[2].removesuffix("`.")
    assert scaling.tables(shlex.split(command)[4:]) == tables
