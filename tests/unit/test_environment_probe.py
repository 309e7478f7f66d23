"""The probe under interpreters without torch, and under ones whose torch is a fake."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftflow.environment import probe

PROGRAM = Path(probe.__file__)


def run(*arguments, python=sys.executable, cwd="/", **variables):
    return subprocess.run(
        [python, "-", *arguments],
        input=PROGRAM.read_text(),
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **variables},
    )


def report_of(done):
    """The report between the marks; fails if the program did."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition(probe.BEGIN)[2].partition(probe.END)[0])


@pytest.fixture
def fake_torch(tmp_path):
    """A folder for PYTHONPATH, in which `torch` is the given source."""

    def make(source):
        (tmp_path / "path/torch").mkdir(parents=True)
        (tmp_path / "path/torch/__init__.py").write_text(source)
        return str(tmp_path / "path")

    return make


def test_it_is_one_file_of_ascii_that_the_oldest_python_reads():
    text = PROGRAM.read_bytes().decode("ascii")
    tree = ast.parse(text, feature_version=(3, 8))
    top = {name.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    top |= {node.module.split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert top <= sys.stdlib_module_names


def pythons():
    """One interpreter of each version that is on this machine, 3.8 and newer."""
    paths = [path for minor in range(8, 15) if (path := shutil.which(f"python3.{minor}"))]
    paths += sorted(map(str, Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python3")))
    found = {sys.version_info[:2]: sys.executable}
    for path in paths:
        done = subprocess.run([path, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
        if done.returncode == 0 and (version := tuple(map(int, done.stdout.split()))) >= (3, 8):
            found.setdefault(version, path)
    return [pytest.param(path, id=".".join(map(str, version))) for version, path in sorted(found.items())]


@pytest.mark.parametrize("python", pythons())
def test_a_missing_torch_is_reported_as_such(python):
    report = report_of(run(python=python, PYTHONPATH=""))
    assert report["fields"]["torch"] is None
    assert report["race"]["affected"] is None
    assert report["race"]["why"] == "there is no torch"
    assert report["problems"] == []


def test_its_text_holds_no_mark_so_that_an_echo_of_it_is_no_report():
    text = PROGRAM.read_text()
    assert [mark for mark in (probe.STARTED, probe.BEGIN, probe.END) if mark in text] == []


def test_it_says_that_it_was_reached_before_anything_else():
    out = run().stdout
    assert out.index(probe.STARTED) < out.index(probe.BEGIN)


def test_a_folder_called_torch_in_the_working_directory_is_not_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '9.9'")
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    assert report_of(run(cwd=tmp_path))["fields"]["torch"] is None


def test_a_broken_torch_is_reported_with_its_error(fake_torch):
    path = fake_torch("raise OSError('libcudnn.so.9: cannot open shared object file')")
    report = report_of(run(PYTHONPATH=path))
    assert report["fields"]["torch"] == "of unknown version"
    (problem,) = report["problems"]
    assert "OSError: libcudnn.so.9: cannot open shared object file" in problem
    assert report["race"]["affected"] is None
    assert "libcudnn" in report["race"]["why"]


def test_a_torch_that_kills_its_interpreter_is_reported_with_the_signal(fake_torch):
    path = fake_torch("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    report = report_of(run(PYTHONPATH=path))
    assert "died by SIGILL" in report["problems"][0]


def test_a_torch_that_hangs_costs_no_more_than_the_time_given(fake_torch):
    start = time.monotonic()
    report = report_of(run("4", "1", PYTHONPATH=fake_torch("import time; time.sleep(600)")))
    assert time.monotonic() - start < 10
    assert "no end after" in report["problems"][0]


def test_what_a_library_prints_is_not_in_the_way(fake_torch):
    path = fake_torch(f"print('{probe.BEGIN} nonsense {probe.END}'); __version__ = '1.0'")
    assert "torch does not tell" in " ".join(report_of(run(PYTHONPATH=path))["problems"])


def test_settings_that_are_set_are_reported_and_paths_are_no_field():
    report = report_of(run(TORCHINDUCTOR_FREEZING="1", TRITON_CACHE_DIR="/scratch/triton"))
    assert report["fields"]["TORCHINDUCTOR_FREEZING"] == "1"
    assert "TRITON_CACHE_DIR" not in report["fields"]
    assert report["caches"]["triton"]["path"] == "/scratch/triton"
    assert not report["caches"]["triton"]["exists"]


def test_cache_folders_are_measured(tmp_path):
    (tmp_path / "fxgraph").mkdir()
    for name, size, hours in (("old", 1000, 5), ("fxgraph/new", 24, 1)):
        (tmp_path / name).write_bytes(bytes(size))
        os.utime(tmp_path / name, (time.time() - hours * 3600,) * 2)
    cache = report_of(run(TORCHINDUCTOR_CACHE_DIR=str(tmp_path)))["caches"]["inductor"]
    assert (cache["bytes"], cache["files"], cache["whole"]) == (1024, 2, True)
    assert (cache["oldest_hours"], cache["newest_hours"]) == (pytest.approx(5, abs=0.02), pytest.approx(1, abs=0.02))


def test_gpus_that_torch_does_not_see_are_said(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor i in 1 2; do echo 'NVIDIA H200, 9.0, 143771 MiB, 580.95.05'; done\n")
    smi.chmod(0o755)
    fields = report_of(run(PATH=f"{tmp_path}:{os.environ['PATH']}"))["fields"]
    assert fields["GPUs of the driver"] == ["2 x NVIDIA H200, capability 9.0, 143771 MiB"]
    (sentence,) = probe.contradictions({**fields, "GPUs of torch": [], "torch CUDA": None})
    assert sentence == (
        "The driver has 2 x NVIDIA H200, capability 9.0, 143771 MiB, and torch sees no GPU: it is built without CUDA."
    )


def test_a_driver_that_does_not_answer_is_a_problem(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    smi.chmod(0o755)
    (problem,) = report_of(run(PATH=f"{tmp_path}:{os.environ['PATH']}"))["problems"]
    assert "status 18" in problem
    assert "version mismatch" in problem


# What is raised in a hook of fork is lost, and so would be the end that is asked for while it runs.
SLOW_FORK = "import os, time; os.register_at_fork(after_in_parent=lambda: [time.sleep(0.01) for _ in range(50)])"


@pytest.mark.parametrize("at_start", ["", SLOW_FORK], ids=["", "while it forks"])
def test_a_probe_that_is_ended_leaves_no_folder(fake_torch, tmp_path, at_start):
    path = fake_torch("import time; time.sleep(600)")
    (Path(path) / "sitecustomize.py").write_text(at_start)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, PROGRAM], env=environment, stdout=subprocess.DEVNULL) as process:
        while not list(temporary.iterdir()):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []


ALONE = {"errors": [], "graphs": 9}


@pytest.mark.parametrize(
    ("seen", "affected", "why"),
    [
        ((ALONE, 2, 2, None), True, "2 of 2 trials"),
        ((ALONE, 6, 1, None), True, "1 of 6 trials"),
        ((ALONE, 6, 0, None), False, "no error in 6 trials"),
        ((ALONE, 2, 0, None), None, "only 2 of at least 3 trials"),
        # what fails without a second thread is another fault, however often it fails with one
        (({"errors": ["died by SIGSEGV"], "graphs": 0}, 0, 0, None), None, "one after the other fail as well.*SIGSEGV"),
        # switched off somewhere: nothing was tried, so nothing is safe
        (({"errors": [], "graphs": 0}, 0, 0, None), None, "nothing was compiled"),
        ((None, 0, 0, "no end after 9 s"), None, "no end after 9 s"),
    ],
)
def test_the_verdict_rests_on_trials_that_mean_something(seen, affected, why):
    found, reason = probe.verdict(*seen)
    assert found is affected
    assert re.search(why, reason)


def test_an_error_is_the_same_line_wherever_it_happens():
    text = "Detected that you are using FX to symbolically trace a dynamo-optimized function. This is not supported"
    assert probe.kind(RuntimeError(text)).startswith("RuntimeError: FX tracing met a compiled function")
    assert probe.kind(ValueError("first\nsecond\nthird")) == "ValueError: first second"
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError
    assert re.fullmatch(r"RuntimeError: at test_environment_probe\.py:\d+", probe.kind(caught.value))
