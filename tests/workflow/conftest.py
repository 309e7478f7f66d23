"""The workflow as a user runs it: `snakemake` as a process of its own in an empty folder."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
    """A folder in which the workflow runs."""

    folder: Path

    def snakemake(self, *arguments: str, timeout: float = 900) -> Result:
        command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", self.folder]
        done = subprocess.run(
            [*map(str, command), *arguments],
            cwd=self.folder,
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
