"""Stage: install a locked environment into a fresh folder and verify every file, or wrap an external interpreter.

Written to `<folder>`: `venv/`, of which `venv/bin/draftflow-python` is what later stages run, and `install.json`.
`--settings`: {"choice": {"version", "build", "kind"} or null for an environment without torch, "index": torch.index,
"python": "auto", a version or a path, "external": path of an interpreter or null}.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version as version_of
from pathlib import Path

from draftflow.environment import lock as locks
from draftflow.environment import record as records
from draftflow.environment.builds import CUDA, Choice, detect_gpus, driver_too_old, drives, torch_source
from draftflow.environment.external import find_interpreter, probe
from draftflow.environment.uv import Sources, run, sources
from draftflow.errors import DraftflowError
from draftflow.stage import Record, run_stage, say, stage_parser, write_text

# The environment's packages and draftflow's sources, and nothing of the user's: not ~/.local, not PYTHONPATH, not the
# working directory, in which a folder called `numpy` would be found first. Bytecode is kept even where the user's shell
# forbids it: without it `import torch` takes twice as long, in every stage.
# DRAFTFLOW_PYTHON is what starts a stage on another node, where a copy of this one has yet to be made.
_MANAGED = """#!/bin/sh
unset PYTHONHOME PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONPATH="${DRAFTFLOW_SRC-}"
bin="$(dirname -- "$(realpath -- "$0")")"
export DRAFTFLOW_PYTHON="$bin/draftflow-python"
if [ -n "${DRAFTFLOW_NODE_LOCAL-}" ]; then
    bin="$("$bin/python" -S -m draftflow.environment.node_local "$bin/../..")/bin" || exit
fi
exec "$bin/python" "$@"
"""

# Somebody else's environment may live on PYTHONPATH (site modules do): draftflow's sources come first, the rest stays.
# Bytecode is kept here where the environment has none: nothing is written into it.
_EXTERNAL = """#!/bin/sh
export PYTHONSAFEPATH=1 PYTHONPATH="${{DRAFTFLOW_SRC-}}${{PYTHONPATH:+:$PYTHONPATH}}"
export DRAFTFLOW_PYTHON="$(realpath -- "$0")"
{bytecode}exec {interpreter} "$@"
"""


_OWN_BYTECODE = """unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$(dirname -- "$(realpath -- "$0")")/../bytecode"
"""


def install(folder: Path, lock: Path, choice: Choice | None, index: str, python: str, record: Record) -> None:
    """Make `<folder>/venv` from a lock. A venv that is there stays until the new one is whole and verified.

    Raises:
        DraftflowError: driver too old, index not reachable, hash mismatch, a changed file, another CUDA than
            the build's.
    """
    requirements = locks.requirements(lock)
    gpus = detect_gpus()
    if choice and gpus and not drives(gpus, choice.build):
        raise driver_too_old(choice.version, choice.build, gpus)
    where = sources()
    for setting in where.taken:
        say(f"pip's setting holds: {setting}")
    source = torch_source(choice, index) if choice else None
    with fresh(folder / "venv") as venv:
        with record.part("copy"):
            interpreter = sys.executable if python == "auto" else python
            run(
                ["venv", "--no-project", "--relocatable", "--python", interpreter, str(venv)],
                where.environment,
                "torch.python",
            )
            fill(["--python", str(venv / "bin" / "python")], lock, source, where)
        site = next(venv.glob("lib/python3*/site-packages"))
        verified = verify(["--python", str(venv / "bin" / "python")], site, lock, source, where, record)
        facts = records.torch_facts(site)
        if choice and facts["cuda"] != CUDA[choice.build]:
            has = f"CUDA {facts['cuda']}" if facts["cuda"] else "the CPU"
            raise DraftflowError(
                f"The torch {facts['version']} that the lock names is built for {has}, not {choice.build}.",
                "Set torch.build to what it is, or another torch.index, and run `snakemake lock`.",
                str(lock),
            )
        write_wrapper(venv, _MANAGED)
        settings = dict(re.findall(r"^(\w+) = (.*)$", (venv / "pyvenv.cfg").read_text(), re.MULTILINE))
        record["lock"] = str(lock)
        record["identity"] = locks.identity(lock)
        record["python"] = settings["version_info"]
        record["torch"] = facts
        record["uv"] = version_of("uv")
        record["files"], record["bytes"] = verified.files, verified.bytes
        record["packages"] = records.packages(site=site)
    seconds = record.seconds
    say(
        f"{len(requirements)} packages, {verified.files} files, {verified.bytes / 1e9:.2f} GB: "
        f"copied in {seconds['copy']:.1f} s, verified in {seconds['verify']:.1f} s"
    )


def wrap(folder: Path, interpreter: str, version: str, requirements: list[str], record: Record) -> None:
    """Make `<folder>/venv/bin/draftflow-python` of an interpreter that somebody else manages; nothing is installed.

    Args:
        version: the torch version that the configuration names.
        requirements: what must be importable beside torch (envs/train.in).

    Raises:
        DraftflowError: no such interpreter, another Python or torch than draftflow or the configuration wants, or
            packages missing; with the pip line for them.
    """
    facts = probe(interpreter, requirements)
    found = facts["torch"]["version"]
    if found.partition("+")[0] != version:
        raise DraftflowError(
            f"torch.version is {version}, but {interpreter} has {found}.",
            f"Set torch.version: {found.partition('+')[0]}, or name another torch.interpreter.",
            "torch.version",
        )
    for requirement in requirements:
        name, _, wanted = requirement.partition("==")
        has = facts["packages"].get(name, {}).get("version")
        if wanted and has != wanted:
            say(f"warning: draftflow is tested with {requirement}; {interpreter} has {has}")
    with fresh(folder / "venv") as venv:
        bytecode = "" if facts["bytecode"] else _OWN_BYTECODE
        quoted = shlex.quote(find_interpreter(interpreter))
        write_wrapper(venv, _EXTERNAL.format(interpreter=quoted, bytecode=bytecode))
    record["lock"], record["interpreter"] = None, find_interpreter(interpreter)
    for key in ("python", "torch", "packages"):
        record[key] = facts[key]
    say(f"{interpreter}: Python {facts['python']}, torch {found}; nothing installed")


@contextlib.contextmanager
def fresh(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when the block ends well, and is removed when it does not.

    What a killed process left is removed first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
    new.chmod(0o755)
    try:
        yield new
        if folder.exists():
            folder.rename(folder.parent / f".{folder.name}.old-{os.getpid()}")
        new.rename(folder)
    finally:
        for left in folder.parent.glob(f".{folder.name}.*"):
            shutil.rmtree(left, ignore_errors=True)


def verify(
    into: list[str], site: Path, lock: Path, source: str | None, where: Sources, record: Record
) -> records.Inspection:
    """Verify what `fill` installed; a package that came changed out of the uv cache is fetched once more, past it.

    An edit in any environment that uv linked to its cache changes the cache, and uv does not look.

    Raises:
        DraftflowError: a file is not what its package recorded after all.
    """
    with record.part("verify"):
        found = records.inspect(site)
    if found.packages:
        names = [package.partition("==")[0] for package in found.packages]
        clean = f"`uv cache clean {' '.join(names)}`"
        say(f"the uv cache holds changed files of {', '.join(found.packages)} ({clean}): fetching anew, past it")
        record["fetched_anew"] = found.packages
        with record.part("copy"):
            fill(into, lock, source, where, only=names)
        with record.part("verify"):
            found = records.inspect(site)
    records.require_whole(found, str(lock))
    return found


def fill(into: list[str], lock: Path, source: str | None, where: Sources, only: list[str] | None = None) -> None:
    """Install what a lock names, as copies; `into` says where (`--python` of a venv, or `--target`).

    `only` some packages are installed again without the uv cache.

    The uv cache is tried first and alone: it answers without a network, and no index can offer another file. Then the
    index with the user's folders of wheels, then, where the index is not reachable, the user's further indexes.
    Never both at once: uv takes a package from the first index that has its version, whatever the hash.
    """
    requirements = locks.requirements(lock)
    again: list[str] = []
    if only is not None:
        wanted = {_normal(name) for name in only}
        requirements = [line for line in requirements if _normal(line.partition("==")[0]) in wanted]
        again = ["--reinstall", "--no-cache"]
    links = [argument for link in where.find_links for argument in ("--find-links", link)]
    usual = [*links, *(["--no-index"] if where.no_index else [])]
    torch = [line for line in requirements if line.startswith("torch==")] if source else []
    rest = [line for line in requirements if line not in torch]

    def pip_install(lines: list[str], flags: list[str]) -> None:
        if not lines:
            return
        # `===`, because 2.13.0+cpu satisfies ==2.13.0 and would be taken from a folder of wheels
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(line.replace("==", "===", 1) for line in lines))
            file.flush()
            strict = ["--require-hashes", "--no-deps", "--no-build", "--link-mode", "copy", *again]
            run(["pip", "install", *into, *strict, *flags, "-r", file.name], where.environment, str(lock))

    def attempt(flags: list[str], torch_flags: list[str]) -> None:
        pip_install(rest, flags)
        if torch and source:
            place = ["--no-index", "--find-links", source] if "://" not in source else ["--default-index", source]
            pip_install(torch, [*place, *torch_flags])

    attempts: list[Callable[[], None]] = [
        lambda: attempt(usual, []),
    ]
    if only is None:
        attempts.insert(0, lambda: attempt(["--offline", *usual], ["--offline"]))
    if where.extra and not where.no_index:
        first, *others = where.extra
        further = ["--default-index", first, *(part for other in others for part in ("--index", other))]
        attempts.append(lambda: attempt([*links, *further, "--index-strategy", "unsafe-best-match"], []))
    refusals: list[DraftflowError] = []
    for each in attempts:
        try:
            return each()
        except DraftflowError as refusal:
            refusals.append(refusal)
    raise refusals[0 if only is not None else 1]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def write_wrapper(venv: Path, text: str) -> None:
    """Write `bin/draftflow-python`, executable."""
    path = venv / "bin" / "draftflow-python"
    write_text(path, text)
    path.chmod(0o755)


def main() -> None:
    """Install or wrap the environment that the settings name."""
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, required=True, help="results/environments/<environment>")
    parser.add_argument("--lock", type=Path, help="the lock (a managed environment)")
    parser.add_argument("--requirements", type=Path, help="envs/train.in (an external environment)")
    arguments = parser.parse_args()
    settings = arguments.settings
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a half-made environment is removed
    choice = Choice(**settings["choice"]) if settings.get("choice") else None
    record = Record("install", choice=settings.get("choice"))
    if settings.get("external"):
        assert choice is not None
        wrap(arguments.folder, settings["external"], choice.version, locks.lines_of(arguments.requirements), record)
    else:
        install(arguments.folder, arguments.lock, choice, settings["index"], settings["python"], record)
    record.write(arguments.folder / "install.json")


if __name__ == "__main__":
    run_stage(main)
