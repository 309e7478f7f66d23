"""Which source files a stage runs: the package's own imports, followed from the stage's module.

The workflow gives them to each rule as inputs, so that an edit of the loss retrains and an edit of the probe does not.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent

# Reading arguments, printing and writing JSON cannot change what a stage computes.
PLUMBING = {"draftflow", "draftflow.errors", "draftflow.stage"}


def modules(*stages: str) -> list[str]:
    """Files of the given stage modules (`draftflow.training.train`) and of all that they import of this package.

    Imports inside functions count. A module that a stage starts as a process of its own is not seen: name it as well.

    Returns:
        Sorted paths, as absolute strings.

    Raises:
        ModuleNotFoundError: a named module is not part of the package.
    """
    found: set[str] = set()
    pending = list(stages)
    while pending:
        name = pending.pop()
        if name in found or name in PLUMBING:
            continue
        found.add(name)
        pending += _imports(name)
    return sorted(str(_file(name)) for name in found)


def digest(*stages: str) -> str:
    """SHA-256 over names and contents of `modules(*stages)`, the same wherever the project folder lies."""
    value = hashlib.sha256()
    for file in modules(*stages):
        value.update(str(Path(file).relative_to(PACKAGE)).encode() + b"\0" + Path(file).read_bytes() + b"\0")
    return value.hexdigest()


def _file(name: str) -> Path:
    parts = name.split(".")[1:]
    module = PACKAGE.joinpath(*parts).with_suffix(".py") if parts else PACKAGE / "__init__.py"
    package = PACKAGE.joinpath(*parts) / "__init__.py"
    for candidate in (module, package):
        if candidate.is_file():
            return candidate
    raise ModuleNotFoundError(f"{name} is not a module of draftflow")


@cache
def _imports(name: str) -> frozenset[str]:
    """Modules of this package that module `name` imports; `from package import module` counts as the module."""
    result = set()
    for node in ast.walk(ast.parse(_file(name).read_text())):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names if alias.name.split(".")[0] == "draftflow"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "draftflow":
            assert node.module is not None
            for alias in node.names:
                child = f"{node.module}.{alias.name}"
                result.add(child if _exists(child) else node.module)
    return frozenset(result)


def _exists(name: str) -> bool:
    try:
        _file(name)
    except ModuleNotFoundError:
        return False
    return True
