"""An interpreter that somebody else manages: where it is and what it has.

Read while the Snakefile is parsed: standard library only, and torch is never imported.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from draftflow.environment.builds import PYTHONS
from draftflow.errors import DraftflowError


def probe(interpreter: str, requirements: list[str]) -> dict[str, Any]:
    """What an interpreter has, without importing torch, as `record.main` prints it: python, torch, packages, bytecode.

    Raises:
        DraftflowError: as for `wrap`, save the torch version.
    """
    path = find_interpreter(interpreter)
    source = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{source}:{inherited}" if inherited else source, "PYTHONSAFEPATH": "1"}

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([path, *arguments], env=environment, capture_output=True, text=True, check=False)

    version = ask("-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    if version.returncode or version.stdout.strip() not in PYTHONS:
        what = f"is Python {version.stdout.strip()}" if not version.returncode else "does not run"
        raise DraftflowError(f"{path} {what}.", "Name one of Python 3.11 to 3.13.", "torch.interpreter")
    answer = ask("-m", "draftflow.environment.record", "torch", *requirements)
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise DraftflowError(
            f"{path} cannot say what it has: {last}.", "Mend it, or name another.", "torch.interpreter"
        )
    facts = json.loads(answer.stdout)
    if facts["missing"]:
        raise DraftflowError(
            f"{path} has no {', '.join(facts['missing'])}.",
            f"Install what is missing: {shlex.quote(path)} -m pip install {shlex.join(facts['missing'])}",
            "torch.interpreter",
        )
    return facts


def find_interpreter(interpreter: str) -> str:
    """Absolute path of an interpreter given as a path or as a name on PATH; links stay, they may be a venv's."""
    found = shutil.which(Path(interpreter).expanduser())
    if found is None:
        raise DraftflowError(
            f"There is no interpreter {interpreter!r}.", "Name a path or a name on PATH.", "torch.interpreter"
        )
    return os.path.abspath(found)  # noqa: PTH100 (Path.resolve would follow the link out of the venv)
