"""Locks: what they name, what they do not depend on, and the identity that follows from them."""

import hashlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from wheels import index_pages, isolate, served, torch_wheel, wheel

from draftflow.environment import lock as locks
from draftflow.environment.builds import PYPI, Choice, choose
from draftflow.environment.uv import sources
from draftflow.errors import DraftflowError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small PyPI in `pypi` and PyTorch index in `torch/cu128`, each with a numpy of its own."""
    isolate(monkeypatch, tmp_path)
    folder = tmp_path / "indexes"
    wheel(folder / "pypi", "numpy", "1.0")
    wheel(folder / "pypi", "triton", "3.0")
    wheel(folder / "pypi", "accelerate", "2.0", requires=["torch", "numpy"])
    torch_wheel(folder / "pypi", "2.11.0", "13.0", ["triton==3.0"])
    wheel(folder / "torch" / "cu128", "numpy", "9.0")
    torch_wheel(folder / "torch" / "cu128", "2.11.0+cu128", "12.8", ["triton==3.0"])
    return folder


def versions(lines: list[str]) -> list[str]:
    return [line.split(" ")[0] for line in lines]


def test_torch_comes_from_its_index_and_everything_else_from_the_default_one(wheels: Path, monkeypatch):
    index_pages(wheels / "pypi")
    index_pages(wheels / "torch" / "cu128", hashes=False)  # as PyTorch's index at times
    torch = wheels / "torch" / "cu128" / "torch-2.11.0+cu128-py3-none-any.whl"
    with served(wheels) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/pypi")
        lines = locks.resolve(["torch===2.11.0+cu128", "accelerate"], f"{url}/torch/cu128", sources())
    assert versions(lines) == ["accelerate==2.0", "numpy==1.0", "torch==2.11.0+cu128", "triton==3.0"]
    assert lines[2].endswith("--hash=" + "sha256:" + hashlib.sha256(torch.read_bytes()).hexdigest())


def test_torch_comes_from_a_folder(wheels: Path, monkeypatch):
    index_pages(wheels / "pypi")
    with served(wheels / "pypi") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        lines = locks.resolve(["torch===2.11.0+cu128", "accelerate"], str(wheels / "torch" / "cu128"), sources())
    assert versions(lines) == ["accelerate==2.0", "numpy==1.0", "torch==2.11.0+cu128", "triton==3.0"]


def test_what_else_lies_on_this_machine_is_not_in_a_lock(wheels: Path, monkeypatch):
    index_pages(wheels / "pypi")
    index_pages(wheels / "torch" / "cu128")
    with served(wheels) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/pypi")
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheels / "torch" / "cu128"))
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{url}/torch/cu128")
        where = sources()
        lines = locks.resolve(["torch===2.11.0", "numpy"], None, where)
    assert versions(lines) == ["numpy==1.0", "torch==2.11.0", "triton==3.0"]
    assert any("find-links" in setting and "PIP_FIND_LINKS" in setting for setting in where.taken)


def test_without_an_index_the_folders_of_wheels_are_all_there_is(wheels: Path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels / "pypi"))
    lines = locks.resolve(["torch===2.11.0+cu128", "numpy"], str(wheels / "torch" / "cu128"), sources())
    assert versions(lines) == ["numpy==1.0", "torch==2.11.0+cu128", "triton==3.0"]


def test_a_target_package_is_locked_without_what_it_depends_on(wheels: Path, monkeypatch):
    wheel(wheels / "pypi", "llm_model", "0.1", requires=["not-to-be-had"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels / "pypi"))
    assert versions(locks.resolve(["llm-model"], None, sources(), bare=True)) == ["llm-model==0.1"]


def test_an_index_that_is_not_reachable_is_named(wheels: Path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DraftflowError) as refusal:
        locks.resolve(["numpy"], None, sources())
    assert "http://127.0.0.1:9/simple/numpy/ is not reachable (Connection refused" in str(refusal.value)
    assert "PIP_INDEX_URL" in refusal.value.remedy


def test_a_version_that_the_index_has_not_is_one_line(wheels: Path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels / "pypi"))
    with pytest.raises(DraftflowError, match=r"there is no version of torch==2\.11\.7") as refusal:
        locks.resolve(["torch===2.11.7"], None, sources())
    assert "\n" not in str(refusal.value)


def test_the_stage_writes_what_the_configuration_needs_and_says_what_changed(
    wheels: Path, tmp_path, monkeypatch, capsys
):
    root = tmp_path / "project"
    (root / "envs").mkdir(parents=True)
    (root / "envs" / "train.in").write_text("accelerate  # a comment\n")
    (root / "envs" / "train-alone.in").write_text("reference==0.1\n")
    (root / "envs" / "dataset.in").write_text("numpy\n")
    wheel(wheels / "pypi", "llm_model", "0.1")
    wheel(wheels / "pypi", "reference", "0.1", requires=["not-to-be-had"])
    torch_wheel(wheels / "pypi", "2.10.0", "12.8")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels / "pypi"))
    settings = {
        "choices": [asdict(Choice("2.11.0", "cu130", "pypi")), asdict(Choice("2.10.0", "cu128", "pypi"))],
        "index": "auto",
        "source": "pypi:llm_model",
    }
    monkeypatch.setattr(sys, "argv", ["lock", "--settings", json.dumps(settings), "--root", str(root)])
    locks.main()
    names = ["dataset.txt", "target-llm-model.txt", "train-2.10.0-cu128-pypi.txt", "train-2.11.0-cu130-pypi.txt"]
    assert sorted(path.name for path in (root / "envs" / "locks").iterdir()) == names
    assert "train-2.11.0-cu130-pypi.txt: new, 5 packages" in capsys.readouterr().out

    before = (root / "envs" / "locks" / "dataset.txt").stat().st_mtime_ns
    wheel(wheels / "pypi", "triton", "3.0", {"triton/__init__.py": "changed = True\n"})
    wheel(wheels / "pypi", "accelerate", "2.1", requires=["torch", "numpy"])
    locks.main()
    said = capsys.readouterr().out
    assert "train-2.11.0-cu130-pypi.txt: accelerate 2.0 -> 2.1" in said
    assert "dataset.txt: nothing changed (1 packages)" in said
    assert (root / "envs" / "locks" / "dataset.txt").stat().st_mtime_ns == before


def test_only_wheels_for_our_pythons_are_kept_and_of_two_builds_the_later():
    names = [
        "numpy-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "numpy-1.0-3-cp311-cp311-manylinux_2_28_x86_64.whl",
        "numpy-1.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "numpy-1.0-cp313-cp313t-manylinux_2_28_x86_64.whl",
        "numpy-1.0-cp314-cp314-manylinux_2_28_x86_64.whl",
        "numpy-1.0-cp39-abi3-manylinux_2_28_x86_64.whl",
        "numpy-1.0-cp311-cp311-musllinux_1_2_x86_64.whl",
        "numpy-1.0-cp311-cp311-manylinux_2_28_aarch64.whl",
        "numpy-1.0-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl",
        "numpy-1.0-py3-none-any.whl",
    ]
    kept = locks.usable([{"url": f"https://files.example/{name}"} for name in names])
    assert [names.index(wheel["url"].rpartition("/")[2]) for wheel in kept] == [1, 2, 5, 9]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_identity_is_of_the_requirements_and_not_of_the_bytes(tmp_path: Path):
    first, second = "--hash=sha256:" + "1" * 64, "--hash=sha256:" + "2" * 64
    lock = write(
        tmp_path / "a.txt", f"# torch\nnumpy==1.0 \\\n    {first}\ntorch==2.11.0 \\\n    {first} \\\n    {second}\n"
    )
    same = write(tmp_path / "b.txt", f"numpy==1.0 {first}\n\n# other words\ntorch==2.11.0 {first} \\\n {second}\n")
    other = write(tmp_path / "c.txt", f"numpy==1.0 {first}\ntorch==2.11.0 {first} {first}\n")
    assert locks.identity(lock) == locks.identity(same)
    assert locks.identity(lock) != locks.identity(other)
    assert re.fullmatch(
        r"torch-2\.11\.0-cu130-[0-9a-f]{12}", locks.environment_id(Choice("2.11.0", "cu130", "pypi"), lock)
    )


def test_a_missing_lock_and_a_line_without_hash_are_refused(tmp_path: Path):
    with pytest.raises(DraftflowError, match="snakemake lock"):
        locks.identity(tmp_path / "train-2.12.0-cu130-pypi.txt")
    with pytest.raises(DraftflowError, match=r"'torch==2\.11\.0' is not an exact version with hashes"):
        locks.identity(write(tmp_path / "lock.txt", "torch==2.11.0\n"))


@pytest.mark.parametrize("version", ["2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1"])
def test_a_lock_is_committed_for_each_torch_that_the_configuration_names(version: str):
    choice = choose(version, "auto", "pypi", [])
    lines = locks.requirements(locks.lock_file(ROOT, "train", choice))
    assert choice.build == PYPI[version.rpartition(".")[0]]
    assert {f"torch=={version}", "transformers==5.17.0"} <= set(versions(lines))
    named = {line.split("==")[0] for line in lines}
    assert {re.split(r"[=<>]", line)[0].lower() for line in locks.lines_of(ROOT / "envs" / "train.in")} <= named


def test_committed_locks_name_no_address_and_no_path():
    for lock in (ROOT / "envs" / "locks").iterdir():
        assert not re.search(r"://|/|--index|--find-links", lock.read_text()), lock.name


def test_the_dataset_environment_has_no_torch():
    lock = locks.lock_file(ROOT, "dataset")
    assert not [line for line in locks.requirements(lock) if line.startswith(("torch==", "nvidia", "triton"))]
    assert locks.dataset_environment_id(lock) == f"dataset-{locks.identity(lock)}"
