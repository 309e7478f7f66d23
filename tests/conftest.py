"""Which tests run where and in which order: those of `torch_env` and `gpu` need what the workflow installs, not what
runs the workflow. Three processes share the tests file by file; the files that take longest come first.

And the workflow as a user runs it: `snakemake` as a process of its own in an empty folder.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

collect_ignore = [] if importlib.util.find_spec("torch") else ["torch_env", "gpu"]

TESTS = Path(__file__).parent
ROOT = TESTS.parent

# Folders whose files are run in one process, one after the other: they share a torch environment, or the GPU.
TOGETHER = ["slurm", "gpu"]

FIRST = [
    "workflow/test_in_environment.py",
    "workflow/test_whole_run.py",
    "slurm",  # which mostly waits
    "torch_env/test_training_cache.py",
    "torch_env/test_training_run.py",
    "torch_env/test_training_stream.py",
]


def _among(path: Path, names: Iterable[str]) -> str | None:
    """The one of `names`, files and folders, that the file is or lies in."""
    inside = path.relative_to(TESTS)
    return next((name for name in names if inside == Path(name) or Path(name) in inside.parents), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(_among(item.path, FIRST) or "", len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share out whole files, and some together."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return _among(config.rootpath / path, TOGETHER) or path

    return Scheduling(config, log)


def pytest_report_header() -> list[str]:
    if not collect_ignore:
        return []
    return [
        "tests/torch_env: run by tests/workflow/test_in_environment.py, inside the environment that it installs",
        "tests/gpu: by hand on a machine with a GPU, inside a training environment",
    ]


@dataclass(frozen=True)
class Result:
    code: int
    output: str

    @property
    def jobs(self) -> dict[str, int]:
        """Rule -> number of jobs, from Snakemake's table of job counts; empty if there was nothing to do."""
        table = re.search(r"^job +count\n[- ]+\n(.*?)^total", self.output, re.MULTILINE | re.DOTALL)
        if table is None:
            return {}
        return {name: int(count) for name, count in (line.split() for line in table[1].splitlines())}

    @property
    def errors(self) -> list[str]:
        """The lines in which draftflow refuses something."""
        return [line for line in dict.fromkeys(self.output.splitlines()) if line.startswith("draftflow: error:")]


@dataclass(frozen=True)
class Project:
    """A folder in which the workflow runs, variables that its processes have beside those of the tests, and how the
    interpreter starts Snakemake."""

    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ("-m", "snakemake")

    def command(self, *arguments: str) -> list[str]:
        """The command line of a Snakemake in this folder."""
        command = [sys.executable, *self.program, "--snakefile", ROOT / "Snakefile", "--directory", self.folder]
        return [*map(str, command), *arguments]

    def snakemake(self, *arguments: str, timeout: float = 900) -> Result:
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env={**os.environ, **self.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return Result(done.returncode, done.stdout)

    def run(self, *arguments: str, timeout: float = 900) -> Result:
        """As `snakemake`, for what must succeed."""
        result = self.snakemake(*arguments, timeout=timeout)
        assert result.code == 0, result.output[-6000:]
        return result

    def python(
        self,
        build: str,
        *arguments: object,
        path: Sequence[Path] = (),
        stdout: int | None = None,
        **variables: str,
    ) -> "subprocess.CompletedProcess[str]":
        """Run the interpreter of the installed `build`, with further folders on its path."""
        sources = os.pathsep.join(map(str, [ROOT / "src", *path]))
        return subprocess.run(
            [self.only(f"results/environments/{build}-*/venv/bin/draftflow-python"), *map(str, arguments)],
            cwd=self.folder,
            env={**os.environ, "DRAFTFLOW_SRC": sources, **variables},
            stdout=stdout,
            text=True,
        )

    def only(self, pattern: str) -> Path:
        """The one path below the folder that matches."""
        (path,) = self.folder.glob(pattern)
        return path


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture(scope="session")
def shared_project(tmp_path_factory):
    """A folder that the tests of one session share, since a torch environment takes gigabytes."""
    return Project(tmp_path_factory.mktemp("project"))
