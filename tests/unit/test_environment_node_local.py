"""The copy of an environment on a node: whole or not at all, made once, and what stages then run from."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import isolate, torch_wheel, wheel

from draftflow.environment import archive, node_local
from draftflow.environment import lock as locks
from draftflow.environment import record as records
from draftflow.environment.builds import Choice
from draftflow.environment.install import install
from draftflow.environment.uv import sources
from draftflow.errors import DraftflowError
from draftflow.stage import Record

SOURCE = Path(__file__).resolve().parents[2] / "src"
ID = "torch-2.11.0-cu130-abc-py311"


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """An environment that was installed and packed; not to be changed."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as monkeypatch:
        isolate(monkeypatch, folder)
        scripts = "[console_scripts]\nnumpy-config = numpy:main\n"
        module = "value = 1\ndef main(): print('config')\n"
        wheel(
            folder / "wheels",
            "numpy",
            "1.0",
            {
                "numpy/__init__.py": module,
                "numpy/large.bin": "x" * 3_000_000,
                "numpy-1.0.dist-info/entry_points.txt": scripts,
            },
        )
        torch_wheel(folder / "wheels", "2.11.0", "13.0", ["numpy"])
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "wheels"))
        lock = folder / "train-2.11.0-cu130-pypi.txt"
        locks.write(lock, locks.resolve(["torch===2.11.0"], None, sources()), "test")
        environment = folder / ID
        install(environment, lock, Choice("2.11.0", "cu130", "pypi"), "auto", "auto", Record("install"))
    archive.pack(environment / "venv", environment / archive.NAME)
    return environment


@pytest.fixture
def environment(packed: Path, tmp_path: Path) -> Path:
    """One of one's own, on which the tests may lay hands."""
    (tmp_path / ID).mkdir()
    for name in (archive.NAME, f"{archive.NAME}.sha256"):
        shutil.copy(packed / name, tmp_path / ID)
    return tmp_path / ID


def digest(environment: Path) -> str:
    return hashlib.sha256((environment / archive.NAME).read_bytes()).hexdigest()


def run(environment: Path, code: str, setting: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run code as a stage does, on a node."""
    return subprocess.run(
        [environment / "venv/bin/draftflow-python", "-c", code],
        env={**os.environ, "DRAFTFLOW_SRC": str(SOURCE), "DRAFTFLOW_NODE_LOCAL": setting, **variables},
        capture_output=True,
        text=True,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_stage_runs_from_the_copy_with_the_packages_that_were_installed(packed: Path, tmp_path: Path):
    code = (
        "import json, os, sys, numpy, torch, draftflow\n"
        "from draftflow.environment import record\n"
        "print(json.dumps([sys.prefix, torch.__file__, draftflow.__file__, os.environ['DRAFTFLOW_PYTHON'],"
        " record.packages(['numpy', 'torch'])]))"
    )
    done = run(packed, code, "$NODE_DISK/${WHO}", NODE_DISK=str(tmp_path), WHO="me")
    assert done.returncode == 0, done.stderr
    prefix, torch, draftflow, python, packages = json.loads(done.stdout)
    copy = tmp_path / "me" / f"{ID}-{digest(packed)[:12]}"
    assert Path(prefix) == copy / "venv"
    assert Path(torch).is_relative_to(copy)
    assert draftflow == str(SOURCE / "draftflow/__init__.py")
    # what starts a stage on another node is not the copy of this one
    assert python == str((packed / "venv/bin/draftflow-python").resolve())
    assert packages == records.packages(["numpy", "torch"], archive.site_packages(packed / "venv"))
    assert "verified" in done.stderr
    assert names(copy.parent) == [copy.name]
    script = subprocess.run([copy / "venv/bin/numpy-config"], capture_output=True, text=True, check=True)
    assert script.stdout == "config\n"


def test_without_the_setting_nothing_is_copied(packed: Path, tmp_path: Path):
    done = run(packed, "import sys; print(sys.prefix)", "", HOME=str(tmp_path))
    assert Path(done.stdout.strip()) == packed / "venv"
    assert names(tmp_path) == []


def test_bytecode_comes_along_and_nothing_is_compiled_again(environment: Path, tmp_path: Path):
    copy = node_local.local_copy(environment, str(tmp_path / "node"))
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.pyc")}
    assert {path.name.partition(".")[0] for path in before} >= {"__init__", "version"}
    code = "import numpy, torch, torch.version; print(numpy.__cached__); print(torch.__cached__)"
    loud = subprocess.run(
        [copy / "bin/python", "-v", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    for cached in loud.stdout.split():
        assert f"code object from {cached!r}" in loud.stderr
        assert Path(cached) in before
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.pyc")} == before


def test_the_same_environment_makes_the_same_archive_and_a_checksum_that_sha256sum_checks(packed, tmp_path):
    again = tmp_path / archive.NAME
    archive.pack(packed / "venv", again)
    assert again.read_bytes() == (packed / archive.NAME).read_bytes()
    subprocess.run(["sha256sum", "--check", again.name + ".sha256"], cwd=tmp_path, check=True)


def test_the_disk_space_that_is_asked_for_is_what_a_copy_takes(environment: Path, tmp_path: Path):
    copy = node_local.local_copy(environment, str(tmp_path / "node"))
    paths = [path for path in copy.rglob("*") if not path.is_symlink()]
    taken = sum(path.stat().st_blocks * 512 for path in paths)
    assert taken <= archive.needed_bytes(environment / archive.NAME) <= 1.2 * taken + 2**18


def test_a_damaged_environment_is_not_packed(packed: Path, tmp_path: Path):
    shutil.copytree(packed / "venv", tmp_path / "venv", symlinks=True)
    (archive.site_packages(tmp_path / "venv") / "numpy/__init__.py").write_text("value = 2\n")
    with pytest.raises(DraftflowError, match=r"__init__\.py is changed"):
        archive.pack(tmp_path / "venv", tmp_path / archive.NAME)
    assert names(tmp_path) == ["venv"]


def _copy(environment: Path, folder: Path, said) -> None:
    said.put(str(node_local.local_copy(environment, str(folder))))


def test_of_eight_processes_at_once_one_unpacks(environment: Path, tmp_path: Path, capfd):
    context = multiprocessing.get_context("fork")
    said = context.Queue()
    processes = [context.Process(target=_copy, args=(environment, tmp_path / "node", said)) for _ in range(8)]
    for process in processes:
        process.start()
    venvs = {said.get(timeout=300) for _ in processes}
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(venvs) == 1
    assert capfd.readouterr().out.count("verified") == 1


def test_a_process_that_is_killed_leaves_nothing_that_is_used(environment: Path, tmp_path: Path):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom draftflow.environment import archive, node_local\n"
        "inspect = archive.records.inspect\n"
        "def slow(site):\n    print('unpacked', flush=True)\n    time.sleep(60)\n"
        "archive.records.inspect = slow\n"
        "node_local.local_copy(Path(sys.argv[1]), sys.argv[2])\n"
    )
    node = tmp_path / "node"
    process = subprocess.Popen([sys.executable, "-c", program, environment, node], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "unpacked\n"
    (left,) = names(node)
    process.send_signal(signal.SIGKILL)
    process.wait()
    copy = node_local.local_copy(environment, str(node)).parent
    assert left.endswith(".tmp")
    assert names(node) == [copy.name]


def refused(environment: Path, setting: object, *words: str) -> None:
    """The copy is refused in one line with these words."""
    with pytest.raises(DraftflowError) as refusal:
        node_local.local_copy(environment, str(setting))
    text = str(refusal.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


def _flip(path: Path) -> None:
    """Change one byte in the content of a file that no RECORD names and that no test of it runs."""
    content = path.read_bytes()
    place = content.index(b"x" * 1000) + 500
    path.write_bytes(content[:place] + b"y" + content[place + 1 :])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_flip, "its SHA-256 is"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_bytes(b"no archive" * 500), "damaged"),
        (lambda path: path.unlink(), "not whole"),
        (lambda path: archive.beside(path).unlink(), "not packed"),
        (lambda path: archive.beside(path).write_text(""), "not whole"),
        (lambda path: archive.beside(path).write_text("0" * 64 + "  x\n"), "its SHA-256 is"),
    ],
)
def test_a_damaged_archive_is_refused_and_leaves_nothing(damage, words: str, environment: Path, tmp_path: Path):
    damage(environment / archive.NAME)
    refused(environment, tmp_path / "node", words, "snakemake --forcerun pack_environment", str(environment))
    assert not (tmp_path / "node").exists() or names(tmp_path / "node") == []


def _first_module(copy: Path) -> Path:
    return archive.site_packages(copy / "venv") / "numpy/__init__.py"


@pytest.mark.parametrize(
    "damage",
    [
        lambda copy: _first_module(copy).unlink(),
        lambda copy: _first_module(copy).write_text("value = 2\n"),
        lambda copy: (copy / "venv/bin/python").unlink(),
        lambda copy: (copy / node_local.LISTING).unlink(),
        lambda copy: (copy / node_local.LISTING).write_text("[]"),
        lambda copy: shutil.rmtree(copy / "venv/lib"),
    ],
)
def test_a_damaged_copy_is_made_anew(damage, environment: Path, tmp_path: Path, capsys):
    copy = node_local.local_copy(environment, str(tmp_path / "node")).parent
    damage(copy)
    capsys.readouterr()
    assert node_local.local_copy(environment, str(tmp_path / "node")).parent == copy
    assert "is damaged" in capsys.readouterr().out
    assert "value = 1" in _first_module(copy).read_text()
    assert names(copy.parent) == [copy.name]


def test_a_copy_that_is_whole_is_used_as_it_is(environment: Path, tmp_path: Path, capsys):
    copy = node_local.local_copy(environment, str(tmp_path / "node"))
    before = (copy / "pyvenv.cfg").stat().st_ino
    (copy / "lib/more.pyc").touch()
    capsys.readouterr()
    assert node_local.local_copy(environment, str(tmp_path / "node")) == copy
    assert capsys.readouterr().out == ""
    assert (copy / "pyvenv.cfg").stat().st_ino == before


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("/proc/draftflow", ("/proc/draftflow on", "cannot be written to")),
        ("$NO_SUCH_VARIABLE/draftflow", ("$NO_SUCH_VARIABLE is not set on",)),
        ("${NO_SUCH_VARIABLE}/draftflow", ("${NO_SUCH_VARIABLE} is not set on",)),
        ("$RELATIVE/draftflow", ("'here/draftflow' is not an absolute path",)),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(setting, words, environment: Path, monkeypatch):
    monkeypatch.setenv("RELATIVE", "here")
    refused(environment, setting, *words, "environment.node_local", "or set null")


def test_a_folder_that_may_only_be_read_is_refused_by_the_stage_in_one_line(packed: Path, tmp_path: Path):
    done = in_namespace(packed, tmp_path, "-o ro")
    assert done.returncode == 1
    assert "cannot be written to: Read-only file system." in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_too_little_space_is_refused_before_anything_is_unpacked(environment: Path, tmp_path: Path, monkeypatch):
    usage, needed = shutil.disk_usage(tmp_path), archive.needed_bytes(environment / archive.NAME)
    monkeypatch.setattr(node_local.shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    monkeypatch.setattr(archive, "unpack", lambda *_: pytest.fail("unpacked"))
    refused(environment, tmp_path / "node", "The copy of the environment needs", "MiB are free", str(tmp_path / "node"))
    assert names(tmp_path / "node") == []


def test_a_disk_that_fills_after_all_is_refused_and_left_empty(environment: Path, packed: Path, tmp_path: Path):
    program = (
        "import shutil; usage = shutil.disk_usage; shutil.disk_usage = lambda p: usage(p)._replace(free=1 << 40)\n"
    )
    (tmp_path / "site").mkdir()
    program += f"""
from pathlib import Path
from draftflow.environment import node_local
from draftflow.errors import DraftflowError
try:
    node_local.local_copy(Path({str(environment)!r}), {str(tmp_path / "disk")!r})
except DraftflowError as refusal:
    print(refusal)
print([path.name for path in Path({str(tmp_path / "disk")!r}).iterdir() if not path.name.endswith('.lock')])
"""
    done = in_namespace(packed, tmp_path, "-o size=1m", [sys.executable, "-c", program])
    first, second = done.stdout.splitlines()
    assert "The copy of the environment needs" in first
    assert "no space left on device" in first
    assert second == "[]"


def in_namespace(packed: Path, tmp_path: Path, options: str, command: list | None = None):
    """Run a command, or a stage from the copy, where `tmp_path/disk` is a disk of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs {options} tmpfs {disk} && exec "$@"'
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, mount, "sh", "true"], capture_output=True).returncode
    ):
        pytest.skip("this user cannot mount a disk of its own")
    command = command or [packed / "venv/bin/draftflow-python", "-c", "print('ran')"]
    variables = {"DRAFTFLOW_SRC": str(SOURCE), "DRAFTFLOW_NODE_LOCAL": str(disk)}
    return subprocess.run(
        [*namespace, mount, "sh", *command], env={**os.environ, **variables}, capture_output=True, text=True
    )
