"""What is installed in an environment, and whether each file is the one that its wheel's RECORD names.

Also run in interpreters that draftflow did not install, hence standard library only.
"""

import base64
import csv
import hashlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from draftflow.errors import DraftflowError

# Written by the installer, not by the wheel; they differ between pip and uv.
_INSTALLER_FILES = ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        files, bytes: number of hashed files, and their bytes.
        problems: one line each.
        packages: those whose own files are changed or missing, as `name==version`.
    """

    files: int
    bytes: int
    problems: list[str]
    packages: list[str]


def inspect(site: Path) -> Inspection:
    """Hash every file that a RECORD in `site` names, and see that nothing else lies there.

    A file is a problem if it is changed, missing, in no RECORD, or shares its inode with the uv cache, where an edit
    made anywhere would reach this environment.
    """
    rows = [
        (site / path, digest, record.parent.name.removesuffix(".dist-info").replace("-", "=="))
        for record in sorted(site.glob("*.dist-info/RECORD"))
        for path, digest in _rows(record)
    ]
    known = {path for path, _, _ in rows}
    # uv's own hook is there before any package
    expected = ("_virtualenv.py", "_virtualenv.pth")
    strangers = [
        f"{path.name} is in no RECORD"
        for path in site.rglob("*")
        if path not in known and path.is_file() and path.parent.name != "__pycache__" and path.name not in expected
    ]
    hashed = [row for row in rows if row[1]]
    with ThreadPoolExecutor(2) as pool:  # hashlib releases the interpreter's lock
        results = list(pool.map(lambda row: _check(row[:2]), hashed))
    bad = [(problem, row[2]) for (problem, _), row in zip(results, hashed, strict=True) if problem]
    return Inspection(
        len(results),
        sum(size for _, size in results),
        strangers + [problem for problem, _ in bad],
        sorted({package for _, package in bad}),
    )


def require_whole(found: Inspection, where: str) -> None:
    """Refuse an environment in which something is not as it was packed.

    Raises:
        DraftflowError: there is a problem.
    """
    if found.problems:
        more = f" and {len(found.problems) - 1} more" if len(found.problems) > 1 else ""
        raise DraftflowError(
            f"An installed file is not what its package recorded: {found.problems[0]}{more}.",
            "Something changes files while they are installed; run again without it.",
            where,
        )


def packages(names: list[str] | None = None, site: Path | None = None) -> dict[str, dict[str, str]]:
    """Name -> {"version", "record"} of installed packages, sorted; `record` digests what the wheel installed.

    Args:
        names: packages to look for, those that are absent are left out; None for all in `site`.
        site: the site-packages folder; None for the path of this interpreter.
    """
    path = [str(site)] if site else sys.path
    found: dict[str, Distribution] = {}
    if names is None:
        for one in Distribution.discover(path=path):
            found.setdefault(_normal(one.metadata["Name"]), one)
    else:
        for name in names:
            for one in Distribution.discover(name=name, path=path):
                found.setdefault(_normal(name), one)
    return {name: {"version": found[name].version, "record": _record_digest(found[name])} for name in sorted(found)}


def torch_facts(site: Path) -> dict[str, str | None]:
    """{"version", "cuda", "git"} of the torch in `site`, read from its version module without importing torch."""
    try:
        text = (site / "torch" / "version.py").read_text()
    except FileNotFoundError:
        return {"version": None, "cuda": None, "git": None}
    values = dict(re.findall(r"^(\w+)\s*(?::[^=\n]+)?= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return {"version": values.get("__version__"), "cuda": values.get("cuda"), "git": values.get("git_version")}


def closure(requirements: list[str]) -> list[str]:
    """Names of the installed packages among `requirements` and all that they need, as this interpreter sees them."""
    seen: set[tuple[str, str]] = set()
    waiting = [_name_and_extra(requirement) for requirement in requirements]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        try:
            needs = distribution(one[0]).requires or []
        except PackageNotFoundError:
            continue
        seen.add(one)
        for need in needs:
            only_for = re.search(r"extra == ['\"](.+?)['\"]", need)
            if only_for is None or only_for[1] in one[1].split(","):
                waiting.append(_name_and_extra(need))
    return sorted({name for name, _ in seen})


def _check(row: tuple[Path, str]) -> tuple[str | None, int]:
    path, digest = row
    algorithm, _, expected = digest.partition("=")
    try:
        with path.open("rb") as stream:
            status = path.stat()
            got = base64.urlsafe_b64encode(hashlib.file_digest(stream, algorithm).digest()).rstrip(b"=").decode()
    except FileNotFoundError:
        return f"{path.name} is missing", 0
    if got != expected:
        return f"{path.name} is changed", 0
    return (f"{path.name} is a hard link" if status.st_nlink > 1 else None), status.st_size


def _rows(record: Path) -> list[tuple[str, str]]:
    """(path relative to site-packages, "sha256=..." or "") of a RECORD."""
    with record.open(newline="", encoding="utf-8") as stream:
        return [(row[0], row[1]) for row in csv.reader(stream) if row]


def _record_digest(one: Distribution) -> str:
    rows = [row[:2] for row in csv.reader((one.read_text("RECORD") or "").splitlines()) if row]
    # scripts (../../../bin) hold the installer's shebang
    kept = sorted(
        row for row in rows if row[1] and not row[0].startswith("..") and Path(row[0]).name not in _INSTALLER_FILES
    )
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def _name_and_extra(requirement: str) -> tuple[str, str]:
    """("cuda-toolkit", "cublas,cudart") of "cuda-toolkit[cublas,cudart]==13.0.2"."""
    match = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", requirement)
    assert match, requirement
    return _normal(match[1]), (match[2] or "").replace(" ", "")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Print, as JSON, what this interpreter has of the requirements in the arguments."""
    requirements: list[str] = sys.argv[1:]
    installed = closure(requirements)
    torch = [str(one.locate_file("")) for one in Distribution.discover(name="torch")]
    answer: dict[str, Any] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "missing": [requirement for requirement in requirements if _name_and_extra(requirement)[0] not in installed],
        "packages": packages(installed),
        "torch": torch_facts(Path(torch[0])) if torch else None,
        "bytecode": bool(torch) and Path(cache_from_source(f"{torch[0]}/torch/__init__.py")).is_file(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
