"""Installing: only what the lock names, verified, whole or not at all; and wrapping an interpreter of somebody else."""

import contextlib
import json
import os
import py_compile
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from wheels import index_pages, isolate, record_hash, served, torch_wheel, wheel

from draftflow.environment import install as installing
from draftflow.environment import lock as locks
from draftflow.environment import record as records
from draftflow.environment.builds import Choice
from draftflow.environment.install import fresh, install, wrap
from draftflow.environment.package import install_package
from draftflow.environment.uv import sources
from draftflow.errors import DraftflowError
from draftflow.stage import Record

CU130 = Choice("2.11.0", "cu130", "pypi")
SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all there is to install from."""
    isolate(monkeypatch, tmp_path)
    folder = tmp_path / "wheels"
    scripts = "[console_scripts]\nnumpy-config = numpy:main\n"
    module = "value = 1\ndef main(): print('config')\n"
    wheel(folder, "numpy", "1.0", {"numpy/__init__.py": module, "numpy-1.0.dist-info/entry_points.txt": scripts})
    torch_wheel(folder, "2.11.0", "13.0", ["numpy"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def lock(wheels: Path, tmp_path: Path) -> Path:
    path = tmp_path / "train-2.11.0-cu130-pypi.txt"
    locks.write(path, locks.resolve(["torch===2.11.0"], None, sources()), "test")
    return path


def make(folder: Path, lock: Path, choice: Choice | None = CU130, index: str = "auto") -> dict:
    record = Record("install")
    install(folder, lock, choice, index, "auto", record)
    record.write(folder / "install.json")
    return json.loads((folder / "install.json").read_text())


def run(folder: Path, code: str, **environment: str) -> str:
    wrapper = folder / "venv" / "bin" / "draftflow-python"
    answer = subprocess.run([wrapper, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_an_environment_holds_what_the_lock_names_as_copies_and_says_so(lock: Path, tmp_path: Path):
    facts = make(tmp_path / "env", lock)
    assert facts["torch"] == {"version": "2.11.0+cu130", "cuda": "13.0", "git": "stub"}
    assert {name: package["version"] for name, package in facts["packages"].items()} == {
        "numpy": "1.0",
        "torch": "2.11.0",
    }
    assert facts["identity"] == locks.identity(lock)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["files"] >= 9
    assert {"copy", "verify", "total"} == facts["seconds"].keys()
    assert [entry.name for entry in sorted((tmp_path / "env").iterdir())] == ["install.json", "venv"]
    files = [path for path in (tmp_path / "env" / "venv").rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.stat().st_nlink for path in files} == {1}


def test_it_works_after_it_was_moved_and_sees_nothing_of_the_user(lock: Path, tmp_path: Path):
    make(tmp_path / "env", lock)
    (tmp_path / "env").rename(tmp_path / "moved here")
    script = tmp_path / "moved here" / "venv" / "bin" / "numpy-config"
    assert subprocess.run([script], capture_output=True, text=True, check=True).stdout == "config\n"
    (tmp_path / "numpy.py").write_text("value = 'the working directory'")
    (tmp_path / "user" / "numpy").mkdir(parents=True)
    (tmp_path / "user" / "numpy" / "__init__.py").write_text("value = 'PYTHONPATH'")
    code = "import os; os.chdir('..'); import draftflow, numpy, torch; print(numpy.value, draftflow.__file__)"
    said = run(tmp_path / "moved here", code, PYTHONPATH=str(tmp_path / "user"), DRAFTFLOW_SRC=str(SOURCE))
    assert said == f"1 {SOURCE / 'draftflow' / '__init__.py'}"


def test_a_warm_cache_needs_no_index(lock: Path, wheels: Path, tmp_path: Path, monkeypatch):
    index_pages(wheels)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with served(wheels) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        make(tmp_path / "env", lock)
    make(tmp_path / "again", lock)


def test_installing_twice_gives_the_same_digests(lock: Path, tmp_path: Path):
    assert make(tmp_path / "a", lock)["packages"] == make(tmp_path / "b", lock)["packages"]


def test_another_build_in_a_folder_of_wheels_is_not_taken(lock: Path, wheels: Path, tmp_path: Path):
    torch_wheel(wheels, "2.11.0+cpu", None)
    assert make(tmp_path / "env", lock)["torch"]["version"] == "2.11.0+cu130"


def test_torch_comes_from_the_index_of_its_build(lock: Path, wheels: Path, tmp_path: Path, monkeypatch):
    mirror = tmp_path / "mirror"
    torch_wheel(mirror / "cu128", "2.11.0+cu128", "12.8", ["numpy"])
    wheel(mirror / "cu128", "numpy", "1.0", {"numpy/__init__.py": "value = 2\n"})
    index_pages(mirror / "cu128")
    choice = Choice("2.11.0", "cu128", "index-00000000")
    with served(mirror) as url:
        locks.write(lock, locks.resolve(["torch===2.11.0+cu128"], f"{url}/cu128", sources()), "test")
        facts = make(tmp_path / "env", lock, choice, url)
    assert facts["torch"]["cuda"] == "12.8"
    assert run(tmp_path / "env", "import numpy; print(numpy.value)") == "1"


def test_further_indexes_serve_where_the_index_does_not_answer(lock: Path, wheels: Path, tmp_path: Path, monkeypatch):
    index_pages(wheels)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with served(wheels) as url:
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", url)
        assert make(tmp_path / "env", lock)["torch"]["version"] == "2.11.0+cu130"


def refused(folder: Path, lock: Path, *words: str, choice: Choice = CU130) -> None:
    """Installing is refused in one line with these words, and what was there before is all that is there after."""
    before = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    with pytest.raises(DraftflowError) as refusal:
        make(folder, lock, choice)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert "\n" not in str(refusal.value)
    assert sorted(path.name for path in folder.iterdir()) == before if folder.exists() else not before


def test_a_file_with_another_hash_is_refused(lock: Path, wheels: Path, tmp_path: Path):
    wheel(wheels, "numpy", "1.0", {"numpy/__init__.py": "value = 'evil'\n"})
    refused(tmp_path / "env", lock, "numpy==1.0 has another hash than the lock names", str(lock))


def test_another_cuda_than_the_build_is_refused_and_the_old_environment_stays(lock: Path, tmp_path: Path):
    make(tmp_path / "env", lock)
    words = ("built for CUDA 13.0, not cu128", "torch.build")
    refused(tmp_path / "env", lock, *words, choice=Choice("2.11.0", "cu128", "pypi"))
    assert run(tmp_path / "env", "import torch; print('works')") == "works"


def test_a_driver_that_cannot_run_the_build_is_refused(lock: Path, tmp_path: Path):
    answer = "0, NVIDIA A100, GPU-a, 40960, 550.54.14, 8.0"
    (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\necho '{answer}'\n")
    refused(tmp_path / "env", lock, "needs an NVIDIA driver of 580.65.06", "cu128 | cu126")


def test_an_unreachable_index_is_refused(lock: Path, tmp_path: Path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    refused(tmp_path / "env", lock, "http://127.0.0.1:9/simple", "is not reachable", "PIP_INDEX_URL")


def test_a_missing_lock_is_refused(wheels: Path, tmp_path: Path):
    refused(tmp_path / "env", tmp_path / "train-2.12.0-cu130-pypi.txt", "snakemake lock")


def test_an_edit_in_the_uv_cache_does_not_reach_an_environment(lock: Path, tmp_path: Path):
    make(tmp_path / "env", lock)
    cached = next((tmp_path / "uv-cache").rglob("numpy/__init__.py"))
    cached.write_text("value = 'tampered'\n")
    assert run(tmp_path / "env", "import numpy; print(numpy.value)") == "1"
    # a new one is made past the cache
    assert make(tmp_path / "again", lock)["fetched_anew"] == ["numpy==1.0"]
    assert run(tmp_path / "again", "import numpy; print(numpy.value)") == "1"
    cached.write_text("value = 1\n" + cached.read_text().partition("\n")[2])


def test_an_environment_that_stays_damaged_is_refused(lock: Path, tmp_path: Path, monkeypatch):
    fill = installing.fill

    def fill_and_edit(into, *arguments, **options):
        fill(into, *arguments, **options)
        next(Path(into[1]).parents[1].rglob("numpy/__init__.py")).write_text("value = 'tampered'\n")

    monkeypatch.setattr(installing, "fill", fill_and_edit)
    refused(tmp_path / "env", lock, "__init__.py is changed")


def test_what_a_killed_install_left_is_removed(lock: Path, tmp_path: Path):
    left = tmp_path / "env" / ".venv.new-killed"
    (left / "bin").mkdir(parents=True)
    make(tmp_path / "env", lock)
    assert not left.exists()


def test_a_folder_takes_its_place_only_when_it_is_whole(tmp_path: Path):
    with fresh(tmp_path / "venv") as new:
        (new / "first").touch()
        assert not (tmp_path / "venv").exists()
    with contextlib.suppress(KeyboardInterrupt), fresh(tmp_path / "venv") as new:
        (new / "second").touch()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.rglob("*")] == ["venv", "first"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda site: (site / "numpy.py").write_text("other"), "numpy.py is changed"),
        (lambda site: (site / "numpy.py").unlink(), "numpy.py is missing"),
        (lambda site: (site / "sitecustomize.py").write_text(""), "sitecustomize.py is in no RECORD"),
        (lambda site: os.link(site / "numpy.py", site.parent / "cached.py"), "numpy.py is a hard link"),
    ],
)
def test_verifying_sees_each_kind_of_damage(damage, words: str, tmp_path: Path):
    site = tmp_path / "site-packages"
    (site / "numpy-1.0.dist-info").mkdir(parents=True)
    (site / "numpy.py").write_text("value = 1\n")
    row = f"numpy.py,{record_hash(b'value = 1' + bytes([10]))},10\n"
    (site / "numpy-1.0.dist-info" / "RECORD").write_text(row + "numpy-1.0.dist-info/RECORD,,\n")
    assert records.inspect(site) == records.Inspection(files=1, bytes=10, problems=[], packages=[])
    damage(site)
    with pytest.raises(DraftflowError, match=words):
        records.require_whole(records.inspect(site), "test")


def test_a_model_package_is_installed_without_what_it_depends_on(wheels: Path, tmp_path: Path):
    wheel(wheels, "llm_model", "0.1", {"llm_model/model.gguf": "weights"}, requires=["not-to-be-had"])
    lock = tmp_path / "target-llm-model.txt"
    locks.write(lock, locks.resolve(["llm-model"], None, sources(), bare=True), "test")
    record = Record("package")
    install_package(tmp_path / "target" / "package", lock, record)
    assert (tmp_path / "target" / "package" / "llm_model" / "model.gguf").read_text() == "weights"
    assert record["packages"]["llm-model"]["version"] == "0.1"


@pytest.fixture
def external(wheels: Path, tmp_path: Path) -> Path:
    """An interpreter with numpy and torch that draftflow did not install."""
    folder = tmp_path / "site module"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", str(python), "--no-index"]
    subprocess.run([*command, "--find-links", str(wheels), "torch"], check=True)
    return python


def test_an_external_interpreter_is_wrapped_and_nothing_installed(external: Path, tmp_path: Path):
    record = Record("install")
    wrap(tmp_path / "env", str(external), "2.11.0", ["numpy"], record)
    record.write(tmp_path / "env" / "install.json")
    facts = json.loads((tmp_path / "env" / "install.json").read_text())
    assert facts["interpreter"] == str(external)
    assert facts["torch"]["cuda"] == "13.0"
    assert facts["packages"].keys() == {"numpy", "torch"}
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "of_the_site.py").write_text("value = 3")
    code = "import draftflow, torch, of_the_site; print(of_the_site.value)"
    assert run(tmp_path / "env", code, PYTHONPATH=str(tmp_path / "module"), DRAFTFLOW_SRC=str(SOURCE)) == "3"
    wrapper = (tmp_path / "env/venv/bin/draftflow-python").resolve()
    assert run(tmp_path / "env", "import os; print(os.environ['DRAFTFLOW_PYTHON'])") == str(wrapper)


def test_bytecode_of_an_external_environment_that_has_none_is_kept_beside_the_wrapper(external: Path, tmp_path: Path):
    prefix = "import sys; print(sys.pycache_prefix and sys.pycache_prefix.endswith('/env/venv/bin/../bytecode'))"
    torch = next((external.parents[1] / "lib").glob("python3*/site-packages/torch/__init__.py"))
    wrap(tmp_path / "env", str(external), "2.11.0", ["numpy"], Record("install"))
    assert run(tmp_path / "env", prefix, PYTHONDONTWRITEBYTECODE="1") == "True"
    run(tmp_path / "env", "import torch", PYTHONDONTWRITEBYTECODE="1")
    assert list((tmp_path / "env/venv/bytecode").rglob("torch/__init__.*.pyc"))
    assert not (torch.parent / "__pycache__").exists()

    py_compile.compile(str(torch))
    wrap(tmp_path / "env", str(external), "2.11.0", ["numpy"], Record("install"))
    assert run(tmp_path / "env", prefix) == "None"


def test_the_identity_of_an_external_environment_changes_with_what_it_has(external: Path, wheels: Path):
    before, version = locks.external_environment_id(str(external))
    assert version == "2.11.0"
    assert before.startswith("torch-2.11.0-external-")
    assert locks.external_environment_id(str(external))[0] == before
    site = next((external.parents[1] / "lib").glob("python3*/site-packages"))
    (site / "numpy-1.0.dist-info" / "RECORD").write_text("numpy/__init__.py,sha256=other,1\n")
    assert locks.external_environment_id(str(external))[0] != before


def test_an_external_interpreter_that_does_not_fit_is_refused(external: Path, tmp_path: Path):
    def refusal(interpreter: str, version: str, requirements: list[str]) -> str:
        with pytest.raises(DraftflowError) as caught:
            wrap(tmp_path / "env", interpreter, version, requirements, Record("install"))
        return str(caught.value)

    assert "torch.version is 2.12.0, but" in refusal(str(external), "2.12.0", ["numpy"])
    missing = refusal(str(external), "2.11.0", ["numpy", "transformers==5.17.0", "gguf"])
    assert f"'{external}' -m pip install transformers==5.17.0 gguf" in missing
    assert "no interpreter 'no-such-python'" in refusal("no-such-python", "2.11.0", [])
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\necho 3.8\n")
    old.chmod(0o755)
    assert "is Python 3.8. Name one of Python 3.11 to 3.13." in refusal(str(old), "2.11.0", [])
    assert not (tmp_path / "env").exists()
