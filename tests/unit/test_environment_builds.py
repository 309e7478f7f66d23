"""Which build a configuration means, and what is refused before anything is downloaded."""

from pathlib import Path

import pytest
from wheels import torch_wheel

from draftflow.environment.builds import Choice, Gpu, choose, detect_gpus, torch_requirement, torch_source
from draftflow.errors import DraftflowError

MIRROR = "https://mirror.example/torch/"


def gpus(*drivers: str) -> list[Gpu]:
    return [Gpu(i, "NVIDIA H200", f"GPU-{i}", 143771, driver, "9.0") for i, driver in enumerate(drivers)]


@pytest.mark.parametrize(
    ("version", "build", "index", "driver", "expected"),
    [
        ("2.10.0", "auto", "auto", None, ("cu128", "pypi")),
        ("2.11.0", "auto", "auto", None, ("cu130", "pypi")),
        ("2.14.1", "cu130", "pypi", None, ("cu130", "pypi")),
        ("2.11.0", "cu128", "auto", None, ("cu128", "pytorch")),
        ("2.11.0", "cpu", "auto", None, ("cpu", "pytorch")),
        ("2.11.0", "auto", "auto", "580.65.06", ("cu130", "pypi")),
        ("2.10.0", "auto", "auto", "580.65.06", ("cu128", "pypi")),
        ("2.10.0", "auto", "pytorch", "580.65.06", ("cu130", "pytorch")),
        ("2.11.0", "auto", "auto", "550.54.14", ("cu128", "pytorch")),
        ("2.11.0", "cpu", "auto", "470.57.02", ("cpu", "pytorch")),
        ("2.11.0", "auto", "pytorch", None, ("cu130", "pytorch")),
        ("2.11.0", "auto", MIRROR, "550.54.14", ("cu128", "index-ea53f9d6")),
        ("2.11.0", "external", "auto", None, ("external", "external")),
    ],
)
def test_the_build_follows_index_and_driver(version, build, index, driver, expected):
    assert choose(version, build, index, gpus(driver) if driver else []) == Choice(version, *expected)


@pytest.mark.parametrize(
    ("version", "build", "index", "driver", "words"),
    [
        ("2.13.0", "cu128", "pypi", None, ["torch 2.13.0 as cu128", "it has cu130", "index: pytorch", "2.10 as cu128"]),
        ("2.13.0", "cpu", "pypi", None, ["torch 2.13.0 as cpu", "index: pytorch"]),
        ("3.0.0", "auto", "auto", None, ["no torch 3.0.0", "2.11 to 2.14 as cu130"]),
        ("2.11.0", "auto", "pypi", "550.54.14", ["580.65.06 or newer", "is 550.54.14", "cu128 | cu126 | cpu"]),
        ("2.11.0", "cu130", "auto", "550.54.14", ["580.65.06 or newer", "cu128 | cu126 | cpu"]),
        ("2.11.0", "auto", "auto", "470.57.02", ["needs an NVIDIA driver", "with build cpu"]),
        ("2.11.0", "auto", "no/such/folder", None, ["no/such/folder", "nor a folder that exists"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(version, build, index, driver, words):
    with pytest.raises(DraftflowError) as refusal:
        choose(version, build, index, gpus(driver) if driver else [])
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_the_oldest_driver_of_several_gpus_decides():
    assert choose("2.11.0", "auto", "auto", gpus("580.65.06", "550.54.14")).build == "cu128"


def test_a_folder_offers_the_wheels_that_lie_in_it(tmp_path: Path):
    for version, cuda in (("2.10.0+cu128", "12.8"), ("2.11.0+cpu", None), ("2.11.0+cu126", "12.6"), ("2.12.1", "13.0")):
        torch_wheel(tmp_path, version, cuda)
    index = str(tmp_path)
    assert choose("2.10.0", "auto", index, []).build == "cu128"
    assert choose("2.11.0", "auto", index, []).build == "cpu"
    assert choose("2.11.0", "auto", index, gpus("550.54.14")).build == "cu126"
    assert choose("2.12.1", "auto", index, []).build == "cu130"  # no local version: the build that PyPI carries
    with pytest.raises(DraftflowError, match="it has cpu, cu126"):
        choose("2.11.0", "cu128", index, [])
    plain, local = choose("2.12.1", "auto", index, []), choose("2.11.0", "cu126", index, [])
    assert torch_requirement(plain, index) == "torch===2.12.1"
    assert torch_requirement(local, index) == "torch===2.11.0+cu126"
    assert torch_source(local, index) == index


def test_torch_comes_from_the_folder_of_its_build_on_an_index():
    mirrored = choose("2.11.0", "cu128", MIRROR, [])
    assert torch_source(mirrored, MIRROR) == "https://mirror.example/torch/cu128"
    assert torch_requirement(mirrored, MIRROR) == "torch===2.11.0+cu128"
    assert torch_source(choose("2.11.0", "cpu", "auto", []), "auto") == "https://download.pytorch.org/whl/cpu"
    assert torch_source(choose("2.11.0", "auto", "auto", []), "auto") is None


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = r"0, NVIDIA H200, GPU-a, 143771, 580.95.05, 9.0\n1, NVIDIA GB10, GPU-b, [N/A], 580.95.05, 12.1\n"
    nvidia_smi(tmp_path, monkeypatch, f"printf '{lines}'")
    assert detect_gpus() == [
        Gpu(0, "NVIDIA H200", "GPU-a", 143771, "580.95.05", "9.0"),
        Gpu(1, "NVIDIA GB10", "GPU-b", 0, "580.95.05", "12.1"),
    ]


def test_a_host_without_gpus_has_none_but_a_broken_driver_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nvidia_smi(tmp_path, monkeypatch, "echo 'No devices were found'; exit 6")
    assert detect_gpus() == []
    nvidia_smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    with pytest.raises(DraftflowError, match="version mismatch"):
        detect_gpus()
