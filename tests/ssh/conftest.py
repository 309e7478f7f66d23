"""A real sshd on loopback, with an account for each login shell, all of them with login scripts that print."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

SHELLS = {"sh": "/bin/sh", "bash": "/bin/bash", "zsh": "zsh", "nologin": "/usr/sbin/nologin", "waiting": "/bin/bash"}

# As `pct exec`: refuses a container that does not run, changes folder and environment, parses nothing again.
PCT = """#!/bin/sh
[ "$1 $3" = "exec --" ] || { echo "400 bad arguments" >&2; exit 255; }
[ "$2" = 200 ] || { echo "container '$2' not running!" >&2; exit 255; }
shift 3
cd /
exec env -i PATH=/usr/bin:/bin "$@"
"""

# As `docker exec`: stdin reaches the container with -i alone.
DOCKER = """#!/bin/sh
shift
if [ "$1" = -i ]; then shift 2; exec "$@"; fi
shift
exec "$@" < /dev/null
"""

NOISE = "printf 'Welcome to %s.\\nquota: {not json' here; echo 'a warning' >&2\n"

BANNER = "All use of this system is monitored.\n"


@dataclass(frozen=True)
class Server:
    """The sshd, and what lies there: `commands` are containers, `python` an interpreter that every account may run."""

    port: int
    folder: Path
    commands: Path
    python: str

    def host(self, shell: str, **facts):
        """A block of `probe.hosts` for the account with this login shell."""
        return {"ssh": f"draftflow-{shell}@127.0.0.1", "ssh_options": self.options(), "python": self.python, **facts}

    def options(self, key: str = "key", known_hosts: str = "known_hosts", port: int | None = None) -> list[str]:
        settings = {
            "UserKnownHostsFile": self.folder / known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
        }
        words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return ["-F", "/dev/null", "-p", str(port or self.port), "-i", str(self.folder / key), *words]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    missing = [name for name in ("ssh", "ssh-keygen", "sshd", "useradd", "zsh") if not _which(name)]
    if os.getuid() != 0:
        missing.append("root, to make accounts with these login shells")
    if missing:
        reason = f"the probe over ssh is not tested: no {', '.join(missing)}"
        if os.environ.get("DRAFTFLOW_CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("sshd")
    # sshd and the accounts go through the folders of this session, which are root's alone otherwise
    for parent in [folder, *folder.parents]:
        if parent.owner() == "root" and parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)
    made = []
    try:
        for shell, path in SHELLS.items():
            _account(f"draftflow-{shell}", _which(path), folder / "home" / shell)
            made.append(f"draftflow-{shell}")
        yield from _serve(folder)
    finally:
        for name in made:
            _end_processes(pwd.getpwnam(name).pw_uid)
            subprocess.run(["userdel", name], check=True, capture_output=True)


def _account(name, shell, home):
    if any(entry.pw_name == name for entry in pwd.getpwall()):  # left by a session that was killed
        subprocess.run(["userdel", name], check=True, capture_output=True)
    home.mkdir(parents=True)
    home.parent.chmod(0o755)
    subprocess.run(["useradd", "--no-create-home", "-d", home, "-s", shell, "-p", "*", name], check=True)
    scripts = {".zshenv": NOISE + "alias env=false true=false\n", ".bashrc": NOISE, ".profile": NOISE}
    if name == "draftflow-waiting":
        scripts[".bashrc"] = "sleep 600\n"
    for script, text in scripts.items():
        (home / script).write_text(text)


def _end_processes(user):
    """Without a terminal nothing tells a command that its connection was closed."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if process.stat().st_uid == user:
                os.kill(int(process.name), signal.SIGKILL)
    time.sleep(0.1)


def _serve(folder):
    for name in ("host_key", "key", "other_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
    (folder / "banner").write_text(BANNER)
    commands = folder / "commands"
    commands.mkdir()
    for name, text in {"pct": PCT, "docker": DOCKER, "stuck": "#!/bin/sh\nsleep 600\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"""Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
Banner {folder}/banner
"""
    )
    host_key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}")
    (folder / "no_hosts").write_text("")
    (folder / "changed_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'other_key.pub').read_text()}")
    Path("/run/sshd").mkdir(exist_ok=True)
    log = (folder / "sshd.log").open("w")
    with log, subprocess.Popen([_which("sshd"), "-D", "-e", "-f", folder / "sshd_config"], stderr=log) as process:
        try:
            _wait_for(port, process, folder)
            yield Server(port, folder, commands, _python())
        finally:
            process.terminate()


def _wait_for(port, process, folder):
    for _ in range(100):
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, (folder / "sshd.log").read_text()
        time.sleep(0.05)
    pytest.fail("sshd does not listen")


def _python():
    """An interpreter that other accounts may run; that of the tests may lie in root's home."""
    for path in (str(Path(sys.executable).resolve()), "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run([path, "-c", ""], user="draftflow-sh", check=True, capture_output=True, cwd="/", env={})
        except (OSError, subprocess.SubprocessError):
            continue
        return path
    pytest.fail("no Python here that another account may run")


def _which(name):
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
