import json
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def within(record, *arguments, **variables):
    command = [sys.executable, "-m", "draftflow.compile_cache.within", str(record), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_module_is_run_with_the_variables_of_the_warmed_folder(tmp_path):
    (tmp_path / "cache/abc").mkdir(parents=True)
    (tmp_path / "step").mkdir()
    record = tmp_path / "step/warm.json"
    record.write_text(json.dumps({"folder": "../cache/abc"}))
    (tmp_path / "tell.py").write_text(
        "import os, sys\nprint(os.environ['TRITON_CACHE_DIR'], *sys.argv[1:], __name__)\nsys.exit(3)\n"
    )
    path = f"{SOURCE}{os.pathsep}{tmp_path}"
    done = within(record, "tell", "--x", "a b", PYTHONPATH=path)
    assert done.stdout == f"{tmp_path}/cache/abc/triton --x a b __main__\n"
    assert done.returncode == 3


def test_a_folder_that_is_gone_is_refused_with_the_command_to_run(tmp_path):
    record = tmp_path / "warm.json"
    record.write_text(json.dumps({"folder": "gone"}))
    done = within(record, "json.tool")
    assert done.returncode == 1
    assert "is gone. Run `snakemake --forcerun warm_cache`." in done.stderr
    assert "Traceback" not in done.stderr
