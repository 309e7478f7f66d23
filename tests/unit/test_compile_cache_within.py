import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftflow.compile_cache import manifest
from draftflow.stage import write_json

SOURCE = Path(__file__).parents[2] / "src"


def within(record, *arguments, **variables):
    command = [sys.executable, "-m", "draftflow.compile_cache.within", str(record), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def warmed(tmp_path):
    """A warm cache of one file, and its record."""
    (tmp_path / "cache/abc/inductor").mkdir(parents=True)
    (tmp_path / "cache/abc/inductor/kernel.so").write_bytes(b"kernel")
    manifest.write(tmp_path / "cache/abc")
    record = tmp_path / "step/warm.json"
    write_json(record, {"key": "abc", "holds": {}, "devices": [], "folder": "../cache/abc"})
    return record


def test_a_module_is_run_with_the_variables_of_the_warmed_folder(tmp_path):
    record = warmed(tmp_path)
    (tmp_path / "tell.py").write_text(
        "import os, sys\nprint(os.environ['TRITON_CACHE_DIR'], *sys.argv[1:], __name__)\nsys.exit(3)\n"
    )
    path = f"{SOURCE}{os.pathsep}{tmp_path}"
    done = within(record, "tell", "--x", "a b", PYTHONPATH=path)
    assert done.stdout == f"{tmp_path}/cache/abc/triton --x a b __main__\n"
    assert done.returncode == 3


def test_a_folder_that_is_gone_is_refused_with_the_command_to_run(tmp_path):
    record = warmed(tmp_path)
    shutil.rmtree(tmp_path / "cache/abc")
    done = within(record, "json.tool")
    assert done.returncode == 1
    assert "is gone. Run `snakemake --forcerun warm_cache`." in done.stderr
    assert "Traceback" not in done.stderr


def truncate(record):
    next(record.parents[1].rglob("*.so")).write_bytes(b"k")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda record: record.unlink(), "was not warmed"),
        (lambda record: record.write_text("{"), "cannot be read"),
        (truncate, "kernel.so is truncated, 1 of 6 bytes"),
    ],
)
def test_a_cache_that_cannot_be_used_is_refused(tmp_path, harm, words):
    record = warmed(tmp_path)
    harm(record)
    done = within(record, "json.tool")
    assert done.returncode == 1
    assert words in done.stderr
    assert "snakemake --forcerun warm_cache" in done.stderr
    assert "Traceback" not in done.stderr
