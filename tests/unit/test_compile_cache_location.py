import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftflow.compile_cache import location
from draftflow.compile_cache.location import FOOT_GUNS, SETTINGS, as_fingerprinted, prepare
from draftflow.errors import DraftflowError
from draftflow.stage import as_refusal

SOURCE = str(Path(__file__).parents[2] / "src")


def test_all_compiled_code_goes_below_the_folder(tmp_path):
    variables = prepare(tmp_path / "cache", {})
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert variables[name].startswith(str(tmp_path / "cache"))
        assert os.path.isdir(variables[name])  # noqa: PTH112


def test_warm_up_and_training_are_given_the_same_settings(tmp_path):
    one, two = prepare(tmp_path / "a", {}), prepare(tmp_path / "b", {})
    assert {name: one[name] for name in SETTINGS} == {name: two[name] for name in SETTINGS} == SETTINGS


@pytest.mark.parametrize("name", FOOT_GUNS)
def test_switches_that_make_attention_dense_or_the_cache_useless_are_refused(tmp_path, name):
    with pytest.raises(DraftflowError, match=f"{name}=1 .* Run `unset {name}`"):
        prepare(tmp_path, {name: "1"})


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE"])
def test_another_value_of_what_is_set_here_is_refused(tmp_path, name):
    with pytest.raises(DraftflowError, match=f"unset {name}"):
        prepare(tmp_path, {name: "0"})
    prepare(tmp_path, prepare(tmp_path, {}))  # the same values are no contradiction


def test_a_comparison_with_the_fingerprint_does_not_see_what_is_set_here(monkeypatch):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    own = next(iter(SETTINGS))
    with as_fingerprinted({own: "1", "torch": "2.11.0"}):
        assert [name for name in SETTINGS if name in os.environ] == [own]
    assert all(os.environ[name] == value for name, value in SETTINGS.items())


MOUNTS = r"""/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/me/local\040disk xfs rw 0 0
server:/x /daten-ü nfs rw 0 0
tmpfs /scratch tmpfs rw 0 0
/dev/sdc /scratch ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/cache", "ext4"),
        ("/home/me/project", "nfs4"),
        ("/home/me/local disk/project", "xfs"),
        ("/homestead", "ext4"),
        ("/daten-ü/x", "nfs"),
        ("/scratch/x", "ext4"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount_and_the_last_of_two(tmp_path, folder, kind):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS, encoding="utf-8")
    assert location.filesystem(Path(folder), mounts) == kind


def test_a_cache_on_a_network_is_said_before_work_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(location, "filesystem", lambda folder: "nfs4")
    prepare(tmp_path, {})
    assert "warning" in (said := capsys.readouterr().out)
    assert "network file system (nfs4)" in said


def test_a_full_disk_is_refused_before_work_starts(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(location.shutil, "disk_usage", lambda folder: usage._replace(free=100 * 2**20))
    with pytest.raises(DraftflowError, match="100 MiB are free for the compile cache, and it may need 512"):
        prepare(tmp_path, {})


def test_a_read_only_disk_is_refused_before_work_starts(tmp_path, monkeypatch):
    def touch(self, *arguments):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "touch", touch)
    with pytest.raises(OSError, match="Read-only") as caught:
        prepare(tmp_path, {})
    refusal = as_refusal(caught.value)
    assert refusal is not None
    assert "Read-only file system" in refusal.what


HOLD = """
import sys, time
from pathlib import Path
from draftflow.compile_cache.location import held
with held(Path(sys.argv[1]), alone=sys.argv[2] == "alone"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holding(folder, how):
    """A process that holds the folder until it is told or killed."""
    command = [sys.executable, "-c", HOLD, str(folder), how]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONPATH": SOURCE})


@pytest.mark.parametrize(("first", "second", "waits"), [("alone", "alone", True), ("reading", "reading", False)])
def test_who_fills_the_cache_is_alone_and_readers_are_not(tmp_path, first, second, waits):
    with holding(tmp_path / "abc", first) as one:
        assert one.stdout.readline() == "held\n"
        with holding(tmp_path / "abc", second) as two:
            line = two.stdout.readline()
            if waits:
                assert line.startswith("draftflow: waiting for the compile cache abc: process ")
                assert f"process {one.pid} on " in line
                one.kill()  # the kernel lets go of what a killed process held
                line = two.stdout.readline()
            assert line == "held\n"
            two.communicate("\n")
        if not waits:
            one.communicate("\n")


GIVE = """
import subprocess, sys, time
from pathlib import Path
from draftflow.compile_cache.location import held
with held(Path(sys.argv[1]), alone=True) as hold:
    subprocess.Popen(["sleep", "5"], pass_fds=hold.descriptors)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_process_that_was_given_the_hold_keeps_it_when_its_parent_is_killed(tmp_path):
    command = [sys.executable, "-c", GIVE, str(tmp_path / "abc")]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout.readline() == "held\n"
        parent.kill()
    with holding(tmp_path / "abc", "alone") as other:
        assert "waiting for the compile cache abc: another process uses it" in other.stdout.readline()
        assert other.stdout.readline() == "held\n"
        other.communicate("\n")


def test_a_disk_that_filled_meanwhile_is_said(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(location.shutil, "disk_usage", lambda folder: usage._replace(free=2**20))
    with pytest.raises(DraftflowError, match=r"The disk filled while code was compiled: 1\.0 MiB are left"):
        location.require_not_full(tmp_path)


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_switch_that_is_off_is_no_danger(tmp_path, name):
    prepare(tmp_path, {name: "0"})
