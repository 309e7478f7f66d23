"""The workflow as a user runs it: `snakemake` as a process of its own in an empty folder."""

import re
import subprocess
import sys
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
