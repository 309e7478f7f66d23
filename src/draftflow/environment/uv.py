"""Calling uv: the user's pip settings handed on, its messages turned into one sentence and a remedy."""

import configparser
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from draftflow.errors import DraftflowError

# What changes which files uv takes or where it puts them. The lock and the stage decide that, not the shell.
_DECIDED = (
    *("UV_TORCH_BACKEND", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE", "UV_EXCLUDE_NEWER", "UV_PRERELEASE"),
    *(
        "UV_RESOLUTION",
        "UV_FORK_STRATEGY",
        "UV_INDEX_STRATEGY",
        "UV_NO_BINARY",
        "UV_CONFIG_FILE",
        "UV_FROZEN",
        "UV_LOCKED",
    ),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT", "UV_LINK_MODE", "UV_COMPILE_BYTECODE"),
    *("VIRTUAL_ENV", "CONDA_PREFIX"),
)


@dataclass(frozen=True)
class Sources:
    """Where packages may come from on this machine.

    Attributes:
        environment: variables for uv, with the default index and the certificate.
        find_links: further folders or pages of wheels.
        extra: further indexes.
        no_index: `find_links` is all there is.
        taken: the pip settings that were handed on, as "find-links=/opt/wheels (PIP_FIND_LINKS)".
    """

    environment: dict[str, str]
    find_links: list[str]
    extra: list[str]
    no_index: bool
    taken: list[str]


def sources() -> Sources:
    """uv's own settings (UV_*), and where one is not set, what pip was given for the same thing (PIP_*, pip.conf)."""
    environment = {name: value for name, value in os.environ.items() if name not in _DECIDED}
    pip, taken = _pip_settings(), []

    def setting(pip_name: str, *uv_names: str) -> str | None:
        mine = [environment.pop(name) for name in uv_names if name in environment]
        if mine or pip_name not in pip:
            return mine[0] if mine else None
        value, origin = pip[pip_name]
        taken.append(f"{pip_name}={_without_password(value)} ({origin})")
        return value

    no_index = setting("no-index", "UV_NO_INDEX") in ("1", "true", "yes", "on")
    find_links = re.split(r"[,\s]+", setting("find-links", "UV_FIND_LINKS") or "")
    extra = (setting("extra-index-url", "UV_INDEX", "UV_EXTRA_INDEX_URL") or "").split()
    for pip_name, *uv_names in (
        ("index-url", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
        ("cert", "SSL_CERT_FILE"),
        ("trusted-host", "UV_INSECURE_HOST"),
    ):
        value = setting(pip_name, *uv_names)
        if value:
            environment[uv_names[0]] = value
    if no_index:
        environment.pop("UV_DEFAULT_INDEX", None)
    environment |= {"UV_NO_CONFIG": "1", "UV_NO_PROGRESS": "1"}
    environment.setdefault("UV_PYTHON_DOWNLOADS", "never")
    return Sources(environment, [_absolute(link) for link in find_links if link], extra, no_index, taken)


def run(arguments: list[str], environment: dict[str, str], where: str) -> None:
    """Run `uv <arguments>`; its lines about downloads go to the log.

    Raises:
        DraftflowError: uv failed; says what, and what to do.
    """
    command = [sys.executable, "-m", "uv", *arguments]
    lines: list[str] = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                lines.append(line.rstrip())
                if line.lstrip().startswith("Download"):
                    print(line.rstrip(), flush=True)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise explain(lines, where)


def explain(lines: list[str], where: str) -> DraftflowError:
    """uv's complaint as a refusal: its essential line, and a remedy for the causes that a user can mend."""
    text = "\n".join(lines)
    reasons = [match[1] for match in re.finditer(r"^\s*(?:error|cause): (.*)", text, re.MULTILINE)]
    last = reasons[-1] if reasons else (lines[-1] if lines else "uv failed without a word")
    mismatch = re.search(r"Hash mismatch for `(.+?)`\s+Expected:\s+(\S+).*?Computed:\s+(\S+)", text, re.DOTALL)
    if mismatch:
        package, expected, computed = mismatch.groups()
        return DraftflowError(
            f"The file of {package} has another hash than the lock names ({computed}, not {expected}).",
            "The index gives a changed file: use another index, or see what changed and run `snakemake lock`.",
            where,
        )
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return DraftflowError("The disk is full.", "Free space (`uv cache prune` helps), then run again.", where)
    fetch = re.search(r"Failed to (?:fetch|download): ?`?([^\s`]+)", text)
    if fetch or "Network connectivity is disabled" in text:
        index = _without_password(fetch[1]) if fetch else "The index"
        return DraftflowError(
            f"{index} is not reachable ({last}).",
            "Check network, proxy and certificate, or name a mirror (PIP_INDEX_URL; torch.index for torch).",
        )
    if "No solution found" in text:
        because = re.sub(r", we can conclude that .*", ".", next((r for r in reasons if r.startswith("Because")), last))
        return DraftflowError(
            f"The index has no such set of packages: {because}",
            "Choose a version that it carries, or another index (torch.version, torch.build, torch.index).",
            where,
        )
    if "No interpreter found" in text:
        return DraftflowError(
            f"{last}.", "Install that Python, or set torch.python: auto for the one that runs Snakemake.", where
        )
    said = "; ".join(reasons) or last
    return DraftflowError(f"uv failed: {said}.", "Run again; `uv cache clean` if the cache may be damaged.", where)


def _pip_settings() -> dict[str, tuple[str, str]]:
    """Setting -> (value, where it was set), as pip would see them: later files, then the environment, win."""
    home = Path.home()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    config_dirs = [Path(folder) for folder in (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    files = [
        *(folder / "pip" / "pip.conf" for folder in config_dirs),
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        config_home / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        files = []
    elif named:
        files.append(Path(named))
    found: dict[str, tuple[str, str]] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file)
        except (configparser.Error, UnicodeDecodeError) as error:
            raise DraftflowError(
                f"pip's configuration cannot be read: {error}.", "Mend or remove it.", str(file)
            ) from None
        for section in ("global", "install"):
            if parser.has_section(section):
                found |= {name.replace("_", "-"): (value, str(file)) for name, value in parser.items(section)}
    for name, value in os.environ.items():
        if name.startswith("PIP_"):
            found[name.removeprefix("PIP_").lower().replace("_", "-")] = (value, name)
    return {name: (value.strip(), origin) for name, (value, origin) in found.items() if value.strip()}


def _absolute(link: str) -> str:
    return link if "://" in link else str(Path(link).expanduser().resolve())


def _without_password(text: str) -> str:
    return re.sub(r"://[^/@\s]+@", "://***@", text)
