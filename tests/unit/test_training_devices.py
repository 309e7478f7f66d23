import json
from dataclasses import asdict, dataclass

import pytest

from draftflow.errors import DraftflowError
from draftflow.training.devices import (
    Devices,
    check_depth,
    from_settings,
    process_environment,
    require_same_on_all_hosts,
    resolve_devices,
    threads_per_process,
)


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str = "NVIDIA H200"

    @property
    def uuid(self):
        return f"GPU-{self.index}0000000"


GPUS = [Gpu(index) for index in range(8)]
A100 = Gpu(8, "NVIDIA A100")


@pytest.fixture(autouse=True)
def everything_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("setting", "gpus", "expected"),
    [
        ("auto", [], Devices("cpu", (0,), "cpu")),
        ("auto", GPUS[:2], Devices("cuda", (0, 1), "nvidia-h200")),
        ("cpu", GPUS, Devices("cpu", (0,), "cpu")),
        ("cpu:3", [], Devices("cpu", (0, 1, 2), "cpu")),
        (2, GPUS, Devices("cuda", (0, 1), "nvidia-h200")),
        ([7, 5], GPUS, Devices("cuda", (7, 5), "nvidia-h200")),
        ({"target": [0, 1], "drafter": [7, 5]}, GPUS, Devices("cuda", (7, 5), "nvidia-h200", (0, 1))),
        ({"target": [3], "drafter": [3]}, GPUS, Devices("cuda", (3,), "nvidia-h200", (3,))),
        ([7, 8], [*GPUS, A100], Devices("cuda", (7, 8), "nvidia-a100-and-nvidia-h200")),
        ({"target": [8], "drafter": [0]}, [*GPUS, A100], Devices("cuda", (0,), "nvidia-a100-and-nvidia-h200", (8,))),
        ({"target": "cpu", "drafter": "cpu:2"}, GPUS, Devices("cpu", (0, 1), "cpu", (2,))),
        ({"nodes": 2, "per_node": 4}, [], Devices("cuda", (0, 1, 2, 3), "cuda", nodes=2, allotted=True)),
        ({"nodes": 1, "per_node": "cpu:2"}, GPUS, Devices("cpu", (0, 1), "cpu", nodes=1, allotted=True)),
    ],
)
def test_setting_gives_devices(setting, gpus, expected):
    assert resolve_devices(setting, gpus) == expected


@pytest.mark.parametrize(
    ("setting", "gpus", "words"),
    [
        (0, GPUS, "zero devices"),
        ([], GPUS, "zero devices"),
        ("cpu:0", [], "zero devices"),
        (3, GPUS[:2], r"3 GPUs are asked for and there are 0 \(NVIDIA H200\), 1 \(NVIDIA H200\)"),
        (1, [], "there is no GPU.*Use `cpu`"),
        ([1, 9], GPUS[:2], "GPU 9 does not exist"),
        ([1, 1], GPUS, "names a GPU twice"),
        ("gpu", GPUS, "'gpu' names no devices"),
        ("auto", [*GPUS, A100], "different kinds: NVIDIA A100, NVIDIA H200.*Name those that are meant by their ids"),
        (9, [*GPUS, A100], "different kinds: NVIDIA A100, NVIDIA H200"),
    ],
)
def test_impossible_settings_are_refused_with_key_and_remedy(setting, gpus, words):
    with pytest.raises(DraftflowError, match=words) as error:
        resolve_devices(setting, gpus)
    assert error.value.where == "config key training.devices"
    assert error.value.remedy


@pytest.mark.parametrize(
    ("target", "drafter", "where", "words"),
    [
        ([], [1], ".target", "zero devices"),
        ("cpu", "cpu:0", ".drafter", "zero devices"),
        ([0, 0], [1], ".target", "names a GPU twice"),
        ([0], [1, 9], ".drafter", "GPU 9 does not exist"),
        ("cpu", [1], "", "One role is on GPUs and the other on the CPU.*cpu:N for both"),
        ("auto", "cpu", ".target", "'auto' names no devices.*cpu:N for both"),
    ],
)
def test_impossible_roles_are_refused_with_key_and_remedy(target, drafter, where, words):
    with pytest.raises(DraftflowError, match=words) as error:
        resolve_devices({"target": target, "drafter": drafter}, GPUS)
    assert error.value.where == f"config key training.devices{where}"
    assert error.value.remedy


def test_roles_are_by_rank_and_those_that_train_come_first():
    devices = Devices("cuda", (5, 6), "nvidia-h200", (0, 6))
    assert (devices.count, devices.processes, devices.gpus, devices.shared) == (2, 4, 3, True)
    assert devices.topology(["here"]) == {
        "kind": "split",
        "nodes": 1,
        "ranks": [
            {"rank": 0, "role": "drafter", "device": "cuda:5", "host": "here"},
            {"rank": 1, "role": "drafter", "device": "cuda:6", "host": "here"},
            {"rank": 2, "role": "target", "device": "cuda:0", "host": "here"},
            {"rank": 3, "role": "target", "device": "cuda:6", "host": "here"},
        ],
    }
    assert [process_environment(devices, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(4)] == ["5", "6", "0", "6"]
    assert not Devices("cuda", (5, 6), "nvidia-h200", (0, 1)).shared
    assert Devices("cpu", (0,), "cpu").topology(["here"]) == {
        "kind": "colocated",
        "nodes": 1,
        "ranks": [{"rank": 0, "role": "drafter and target", "device": "cpu", "host": "here"}],
    }


def test_ranks_are_counted_node_by_node():
    devices = resolve_devices({"nodes": 3, "per_node": 2}, [], "NVIDIA H200")
    assert (devices.count, devices.processes, devices.per_node, devices.gpus, devices.slug) == (
        6,
        6,
        2,
        2,
        "nvidia-h200",
    )
    ranks = devices.topology(["a", "b", "c"])["ranks"]
    assert [rank["host"] for rank in ranks] == ["a", "a", "b", "b", "c", "c"]
    assert [rank["device"] for rank in ranks] == ["cuda:0", "cuda:1"] * 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ["0", "1"]), ("5,GPU-3", ["5", "GPU-3"]), ("3,1,7", ["3", "1"])],
)
def test_devices_that_a_scheduler_hands_out_are_positions_in_what_it_allots(monkeypatch, given, expected):
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    devices = resolve_devices({"nodes": 2, "per_node": 2}, GPUS)
    assert [process_environment(devices, place)["CUDA_VISIBLE_DEVICES"] for place in range(2)] == expected


@pytest.mark.parametrize("given", ["", "5"])
def test_fewer_devices_than_were_to_be_allotted_are_refused(monkeypatch, given):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    devices = resolve_devices({"nodes": 2, "per_node": 2}, [])
    with pytest.raises(DraftflowError, match=r"\d of 2 GPUs per node are allotted"):
        process_environment(devices, 1)


@pytest.mark.parametrize("each", [0, "cpu:0"])
def test_nodes_without_devices_are_refused(each):
    with pytest.raises(DraftflowError, match="zero devices") as error:
        resolve_devices({"nodes": 2, "per_node": each}, GPUS)
    assert error.value.where == "config key training.devices.per_node"


@pytest.mark.parametrize(
    "devices",
    [
        Devices("cpu", (0, 1), "cpu"),
        Devices("cuda", (5, 6), "nvidia-h200", (0, 6)),
        Devices("cuda", (0, 1), "h200", nodes=4, allotted=True),
    ],
)
def test_devices_are_the_same_after_they_were_settings(devices):
    assert from_settings({"devices": json.loads(json.dumps(asdict(devices)))}) == devices


def test_target_devices_that_would_never_work_are_refused():
    devices = Devices("cuda", (5, 6), "nvidia-h200", (0, 1, 2, 3, 4))
    check_depth(devices, 3)
    with pytest.raises(
        DraftflowError, match=r"5 target devices.*2 drafter devices have room for 2 batches.*Use 3"
    ) as error:
        check_depth(devices, 2)
    assert error.value.where == "config key training.stream_depth"
    check_depth(Devices("cuda", (0, 1), "nvidia-h200"), 1)


@pytest.mark.parametrize("setting", ["auto", 2, [0, 1], {"target": [0], "drafter": [1]}])
def test_what_means_something_else_on_every_host_is_refused_for_a_cluster(setting):
    with pytest.raises(DraftflowError, match="depends on the GPUs of the host") as error:
        require_same_on_all_hosts(setting)
    assert "per_node" in error.value.remedy


@pytest.mark.parametrize(
    "setting", ["cpu", "cpu:4", {"target": "cpu:2", "drafter": "cpu"}, {"nodes": 2, "per_node": 8}]
)
def test_what_names_its_devices_is_taken_for_a_cluster(setting):
    require_same_on_all_hosts(setting)


def test_gpus_that_cuda_visible_devices_hides_do_not_count(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-3")
    assert resolve_devices("auto", GPUS).ids == (6, 3)
    with pytest.raises(DraftflowError, match="GPU 0 does not exist"):
        resolve_devices([0], GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_devices("auto", GPUS).kind == "cpu"


def test_each_process_sees_its_own_device_alone():
    devices = Devices("cuda", (5, 7), "nvidia-h200")
    assert process_environment(devices, 1)["CUDA_VISIBLE_DEVICES"] == "7"
    assert process_environment(Devices("cpu", (0,), "cpu"), 0)["CUDA_VISIBLE_DEVICES"] == ""


def test_processes_share_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert threads_per_process(Devices("cpu", (0, 1, 2), "cpu")) == {"OMP_NUM_THREADS": "2"}
    assert threads_per_process(Devices("cpu", tuple(range(16)), "cpu")) == {"OMP_NUM_THREADS": "1"}
    assert threads_per_process(Devices("cpu", (0, 1, 2), "cpu", (3,))) == {"OMP_NUM_THREADS": "2"}
    assert threads_per_process(Devices("cpu", (0,), "cpu", (1,))) == {"OMP_NUM_THREADS": "4"}
    assert threads_per_process(Devices("cpu", (0, 1), "cpu", nodes=4, allotted=True)) == {"OMP_NUM_THREADS": "4"}


def test_processes_share_the_threads_that_were_granted(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads_per_process(Devices("cpu", (0, 1), "cpu")) == {"OMP_NUM_THREADS": "2"}
