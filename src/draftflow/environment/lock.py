"""Locks: exact versions and file hashes of an environment, and the identity that follows from them.

A lock is a plain requirements file. It names versions and hashes but no addresses, so any mirror with the same files
serves it. Only wheels are locked, for Python 3.11 to 3.13 on Linux x86-64, one version of each package for all of them.

The identities are read while the Snakefile is parsed: standard library only, up to `resolve`.
"""

import hashlib
import json
import re
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from draftflow.environment.builds import PYTHONS, Choice, torch_requirement, torch_source
from draftflow.environment.external import find_interpreter, probe
from draftflow.environment.uv import Sources, run, sources
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage, say, stage_parser, write_text

_PLATFORM = "platform_machine == 'x86_64' and sys_platform == 'linux'"


def lock_file(root: Path, environment: str, choice: Choice | None = None) -> Path:
    """Where the lock of an environment lies: "train" of a torch build, "dataset", "target-<package>"."""
    build = f"-{choice.version}-{choice.build}-{choice.kind}" if choice else ""
    return root / "envs" / "locks" / f"{environment}{build}.txt"


def requirements(lock: Path) -> list[str]:
    """The requirement lines of a lock, in its order: "name==version ; marker --hash=sha256:... --hash=...".

    Raises:
        DraftflowError: there is no such lock, or a line is not an exact version with hashes.
    """
    try:
        text = lock.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DraftflowError(
            "There is no such lock.", "Run `snakemake lock` and commit what it writes.", str(lock)
        ) from None
    lines = [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    for line in lines:
        if not re.match(r"[A-Za-z0-9._-]+==[^\s;]+( ; .+)?( --hash=sha256:[0-9a-f]{64})+$", line):
            raise DraftflowError(
                f"{line[:60]!r} is not an exact version with hashes.",
                "Restore the lock, or run `snakemake lock`.",
                str(lock),
            )
    return lines


def identity(lock: Path) -> str:
    """12 hexadecimal digits that stand for what a lock installs; comments and line breaks do not count."""
    return hashlib.sha256("\n".join(requirements(lock)).encode()).hexdigest()[:12]


def environment_id(choice: Choice, lock: Path) -> str:
    """`torch-<version>-<build>-<identity of the lock>`, part of every path that depends on the torch build."""
    return f"torch-{choice.version}-{choice.build}-{identity(lock)}"


def dataset_environment_id(lock: Path) -> str:
    """`dataset-<identity of the lock>`."""
    return f"dataset-{identity(lock)}"


def external_environment_id(interpreter: str) -> tuple[str, str]:
    """(`torch-<version>-external-<hash of what it has>`, torch version) of an interpreter that somebody else manages.

    Reads the metadata of torch and of what it needs; torch is not imported.

    Raises:
        DraftflowError: the interpreter does not run, is not Python 3.11 to 3.13, or has no torch.
    """
    facts = probe(interpreter, ["torch"])
    version = facts["torch"]["version"].partition("+")[0]
    where = find_interpreter(interpreter)  # the wrapper names it
    digest = hashlib.sha256(json.dumps([facts, where], sort_keys=True).encode()).hexdigest()[:12]
    return f"torch-{version}-external-{digest}", version


def lines_of(file: Path) -> list[str]:
    """The lines of an envs/*.in without comments."""
    return [line for raw in file.read_text(encoding="utf-8").splitlines() if (line := raw.partition("#")[0].strip())]


def package_of(source: str) -> str | None:
    """The package of a target source `pypi:<package>`, None for another kind of source."""
    kind, _, package = source.partition(":")
    return re.sub(r"[-_.]+", "-", package).lower() if kind == "pypi" else None


def resolve(wanted: list[str], torch_from: str | None, where: Sources, bare: bool = False) -> list[str]:
    """Resolve requirements to the lines of a lock, as `requirements` reads them.

    Args:
        wanted: requirements; torch, if among them, comes from `torch_from` and nothing else does.
        torch_from: a PEP 503 index, a folder of wheels, or None for the default index.
        where: the sources of this machine. Only its default index counts, and its folders where that is switched off:
            a lock must not depend on what else lies on this machine.
        bare: leave out what `wanted` depends on.

    Raises:
        DraftflowError: the index is not reachable or has no such packages.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pyproject.toml").write_text(_pyproject(wanted, torch_from))
        names = [re.split("[=<>~! ]", requirement)[0] for requirement in wanted]
        (folder / "uv.toml").write_text(_uv_toml(names if bare else [], where))
        at = ["--project", name, "--config-file", str(folder / "uv.toml"), "--python", sys.executable]
        environment = {key: value for key, value in where.environment.items() if key != "UV_NO_CONFIG"}
        run(["lock", *at], environment, torch_from or environment.get("UV_DEFAULT_INDEX", "https://pypi.org/simple"))
        plain = ["--no-hashes", "--no-header", "--no-annotate", "--no-emit-project"]
        run(["export", *at, "--frozen", *plain, "-o", str(folder / "exported.txt")], environment, "uv export")
        locked = tomllib.loads((folder / "uv.lock").read_text())["package"]
        wheels = {f"{package['name']}=={package['version']}": package.get("wheels", []) for package in locked}
        lines = []
        for line in (folder / "exported.txt").read_text().splitlines():
            requirement, _, marker = line.partition(" ; ")
            hashes = sorted({_hash(wheel, folder) for wheel in usable(wheels[requirement])})
            if not hashes:
                pythons = f"Python {PYTHONS[0]} to {PYTHONS[-1]} on Linux x86-64"
                raise DraftflowError(f"{requirement} has no wheel for {pythons}.", "Choose another version.")
            condition = f" ; {marker}" if marker and marker != _PLATFORM else ""
            lines.append(f"{requirement}{condition} " + " ".join(f"--hash={digest}" for digest in hashes))
    return lines


def _pyproject(wanted: list[str], torch_from: str | None) -> str:
    """A project that has `wanted` as dependencies, torch from a named index that serves nothing else."""
    after = int(PYTHONS[-1].split(".")[1]) + 1
    text = f"""
        [project]
        name = "environment"
        version = "0"
        requires-python = ">={PYTHONS[0]},<3.{after}"
        dependencies = {json.dumps(wanted)}
        [tool.uv]
        package = false
        environments = ["{_PLATFORM}"]
    """
    if torch_from:
        text += f"""
        [tool.uv.sources]
        torch = {{ index = "torch-index" }}
        [[tool.uv.index]]
        name = "torch-index"
        url = {json.dumps(torch_from)}
        format = "{"simple" if "://" in torch_from else "flat"}"
        explicit = true
        """
    return text


def _uv_toml(bare: list[str], where: Sources) -> str:
    """uv's options: one version for all Pythons, wheels only; packages in `bare` count as having no dependencies."""
    options = ['fork-strategy = "fewest"', "no-build = true"]
    options += [f"[[dependency-metadata]]\nname = {json.dumps(package)}\nrequires-dist = []" for package in bare]
    if where.no_index:
        for link in where.find_links:
            default = "true" if link == where.find_links[-1] else "false"
            options.append(f'[[index]]\nurl = {json.dumps(link)}\nformat = "flat"\ndefault = {default}')
    return "\n".join(options)


def write(lock: Path, lines: list[str], about: str) -> None:
    """Write a lock if it would install something else than the one that is there, and say what changed."""
    old = requirements(lock) if lock.exists() else []
    if lines == old:
        say(f"{lock.name}: nothing changed ({len(lines)} packages)")
        return
    body = "\n".join(" \\\n    ".join(re.split(r" (?=--hash)", line)) for line in lines)
    write_text(
        lock,
        f"# {about}, Python {PYTHONS[0]} to {PYTHONS[-1]}, Linux x86-64\n"
        f"# Written by `snakemake lock`; commit it, do not edit it.\n{body}\n",
    )
    before, now = _versions(old), _versions(lines)
    changed = [
        f"{name} {before.get(name, '(new)')} -> {now.get(name, '(gone)')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    what = ", ".join(changed) if old else f"new, {len(lines)} packages"
    say(f"{lock.name}: {what or 'other files of the same versions'}")


def usable(wheels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The wheels that a CPython of ours on Linux x86-64 installs; of several builds of one wheel the last.

    uv takes the highest build number too, but a second build may come after the lock was made.
    """
    from packaging.tags import Tag, compatible_tags, cpython_tags
    from packaging.utils import parse_wheel_filename

    glibc = [f"manylinux_2_{minor}_x86_64" for minor in range(40, 4, -1)]
    platforms = [*glibc, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    ours: set[Tag] = set()
    for python in PYTHONS:
        version = tuple(int(part) for part in python.split("."))
        interpreter = f"cp{version[0]}{version[1]}"
        ours |= set(cpython_tags(version, [interpreter], platforms))
        ours |= set(compatible_tags(version, interpreter, platforms))
    best: dict[frozenset[Tag], tuple[Any, dict[str, Any]]] = {}
    for wheel in wheels:
        _, _, build, tags = parse_wheel_filename(_file_name(wheel))
        if tags & ours and (tags not in best or build > best[tags][0]):
            best[tags] = (build, wheel)
    return [wheel for _, wheel in best.values()]


def _file_name(wheel: dict[str, Any]) -> str:
    return unquote(Path(urlsplit(wheel.get("url") or wheel["path"]).path).name)


def _hash(wheel: dict[str, Any], folder: Path) -> str:
    """The hash of a wheel; of the file itself where the index gives none."""
    if "hash" in wheel:
        return wheel["hash"]
    if "path" in wheel:
        with (folder / wheel["path"]).open("rb") as stream:
            return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
    say(f"the index gives no hash of {_file_name(wheel)}: downloading it")
    digest = hashlib.sha256()
    with urllib.request.urlopen(wheel["url"]) as answer:
        while block := answer.read(1 << 20):
            digest.update(block)
    return "sha256:" + digest.hexdigest()


def _versions(lines: list[str]) -> dict[str, str]:
    return dict(line.split(" ")[0].split("==", 1) for line in lines)  # type: ignore[misc]


def main() -> None:
    """Resolve the locks anew that a configuration needs, and say what changed."""
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--root", type=Path, default=Path(), help="the project folder, which holds envs/")
    arguments = parser.parse_args()
    root, index = arguments.root, arguments.settings["index"]
    where = sources()
    for setting in where.taken:
        say(f"pip's setting holds: {setting}")
    if not where.no_index and (where.find_links or where.extra):
        say("further indexes and folders of wheels are left out of locks: they are of this machine")

    for choice in (Choice(**choice) for choice in arguments.settings["choices"]):
        wanted = [torch_requirement(choice, index), *lines_of(root / "envs" / "train.in")]
        lines = resolve(wanted, torch_source(choice, index), where)
        lines = sorted(lines + resolve(lines_of(root / "envs" / "train-alone.in"), None, where, bare=True))
        write(lock_file(root, "train", choice), lines, f"torch {choice.version}, {choice.build}, index: {choice.kind}")
    write(
        lock_file(root, "dataset"), resolve(lines_of(root / "envs" / "dataset.in"), None, where), "dataset environment"
    )
    package = package_of(arguments.settings["source"])
    if package:
        write(lock_file(root, f"target-{package}"), resolve([package], None, where, bare=True), f"target {package}")


if __name__ == "__main__":
    run_stage(main)
