"""A real Slurm on loopback: munged, slurmctld and several slurmd with pretended GPUs, with or without accounting.

No systemd, no cgroups; everything lies in one folder. By hand, until Ctrl-C:

    python tests/slurm/cluster.py [--accounting]

Within a job, Snakemake's executors drop SLURM_CONF from the variables of Slurm's commands. So the PATH of what uses the
cluster begins with commands that know it. A Slurm of the machine's own is not touched, and does not matter.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue"]
COMMANDS = ["srun", "sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo", "sacctmgr"]
ACCOUNTING_PROGRAMS = ["slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db"]
PACKAGES = "munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins slurmdbd slurm-wlm-mysql-plugin mariadb-server"

SLURM_CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog
# a node may claim more cores than the machine has
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=1,default_queue_depth=1000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
MinJobAge={min_job_age}
KillWait={kill_wait}
InactiveLimit=0
{accounting}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 DefaultTime=30 State=UP
{partitions}
"""

WITHOUT_ACCOUNTING = "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none"

WITH_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStorageTRES=gres/gpu
AccountingStoragePass={folder}/munge/socket
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5"""

# takes jobs of one account and QOS, and is not the default
PAID = "PartitionName=paid Nodes=ALL AllowAccounts=test AllowQos=normal MaxTime=1-0 State=UP"

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""


def missing(accounting: bool) -> list[str]:
    """What is not there for a cluster: programs, root, a place for its configuration."""
    programs = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else [])
    lacking = [name for name in programs if shutil.which(name, path=_path()) is None]
    if os.geteuid() != 0:
        lacking.append("root")
    return lacking


@dataclass
class Cluster:
    """A cluster in `folder`, to be used as a context manager.

    Args:
        folder: for all of its files.
        nodes: their number; they are named node1 to nodeN.
        gpus: pretended GPUs of each node.
        cores: that each node claims.
        accounting: with slurmdbd and MariaDB; without it sacct knows nothing.
        min_job_age: seconds for which squeue remembers jobs that are over.
        kill_wait: seconds between a job's SIGTERM and its SIGKILL.
        kinds: of the nodes, in turn: their features, and TRITON_OF_NODE, by which the fingerprint tells them apart.
    """

    folder: Path
    nodes: int = 2
    gpus: int = 2
    cores: int = 4
    accounting: bool = True
    min_job_age: int = 300
    kill_wait: int = 30
    kinds: tuple[str, ...] = ()
    _database: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._cancel_all()
        _end(*self.folder.glob("slurmd-*.pid"), self.folder / "slurmctld.pid")
        _end(self.folder / "slurmdbd.pid")
        if self._database is not None:
            self._database.terminate()
            self._database.wait()
        _end(self.folder / "munge/pid")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of commands that use this cluster."""
        path = f"{self.folder / 'bin'}:{_path()}"
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def run(self, *command: str, timeout: float = 300) -> str:
        """What a command of Slurm prints; it must succeed."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, cwd=self.folder
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def jobs(self, *options: str) -> list[list[str]]:
        """Jobs in squeue: id, state, comment."""
        lines = self.run("squeue", "--noheader", "--format=%i|%T|%k", *options).splitlines()
        return [line.split("|") for line in lines]

    def lose(self, node: str) -> None:
        """Have a node die: its daemon and all that runs there is gone, unheard by Slurm, which is then told.

        Slurm's own processes go first: one that sees its job end would still report it as failed.
        """
        os.kill(int((self.folder / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
        marks = [f"SLURMD_NODENAME={node}\0".encode(), f"SLURM_CONF={self.folder}/slurm.conf\0".encode()]
        while found := _processes_with(*marks):
            _kill({parent for parent in map(_parent, found) if _name(parent) == "slurmstepd"})
            _kill(found)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=died")

    def bring_back(self, node: str) -> None:
        """Have that node boot; Slurm takes it back by itself (ReturnToService)."""
        self._call("slurmd", "-N", node)
        self.wait(lambda: self._states("-n", node) == ["idle"], "idle node")

    def left_over(self) -> dict[int, str]:
        """Processes that belong to this cluster or to a job of it, by their environment: id -> command."""
        found = {}
        for process in _processes_with(f"SLURM_CONF={self.folder}/slurm.conf\0".encode()):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process}/cmdline").read_bytes()
                found[process] = command.replace(b"\0", b" ").decode()
        return found

    def _start(self) -> None:
        for name in (
            "bin",
            "state",
            "spool",
            "log",
            "munge",
            *(f"spool/node{node}" for node in range(1, self.nodes + 1)),
        ):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        ports = _free_ports(2 + self.nodes)
        self._write(ports)
        self._start_munge()
        if self.accounting:
            self._start_accounting()
        self._call("slurmctld")
        for node in range(1, self.nodes + 1):
            self._call("slurmd", "-N", f"node{node}")
        self.wait(lambda: self._states() == ["idle"] * self.nodes, "idle nodes")

    def _states(self, *options: str) -> list[str]:
        """States of nodes, of one partition of those that hold them all."""
        return self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", *options).split()

    def _write(self, ports: list[int]) -> None:
        host, folder = socket.gethostname().split(".")[0], self.folder
        words = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
        memory = int(words.split()[1]) // 1024 * 9 // 10
        devices = [folder / f"gpu{index}" for index in range(self.gpus)]
        for device in devices:
            # a GPU is counted by its device file, which must be one: /dev/null by another name
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        names = [f"node{node}" for node in range(1, self.nodes + 1)]
        gpus = f" Gres=gpu:fake:{self.gpus}" if self.gpus else ""
        features = [f" Feature={kind}" for kind in self.kinds] or [""] * self.nodes
        prolog = folder / "prolog"
        cases = [f"{name}) echo export TRITON_OF_NODE={kind};;" for name, kind in zip(names, self.kinds, strict=False)]
        prolog.write_text(f"#!/bin/sh\ncase $SLURMD_NODENAME in\n{chr(10).join(cases)}\nesac\n")
        prolog.chmod(0o755)
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            f" CPUs={self.cores} RealMemory={memory}{gpus}{feature}"
            for name, port, feature in zip(names, ports[2:], features, strict=True)
        ]
        accounting = WITH_ACCOUNTING if self.accounting else WITHOUT_ACCOUNTING
        (folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                host=host,
                port=ports[0],
                folder=folder,
                min_job_age=self.min_job_age,
                kill_wait=self.kill_wait,
                accounting=accounting.format(port=ports[1], folder=folder),
                nodes="\n".join(nodes),
                partitions=PAID if self.accounting else "",
            )
        )
        lines = [f"NodeName={name} Name=gpu Type=fake File={device}" for name in names for device in devices]
        (folder / "gres.conf").write_text("\n".join(lines) + "\n")
        for name in COMMANDS:
            command = folder / "bin" / name
            found = shutil.which(name, path=_path())
            command.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {found} "$@"\n')
            command.chmod(0o755)
        dbd = folder / "slurmdbd.conf"
        dbd.touch(mode=0o600)
        dbd.write_text(SLURMDBD_CONF.format(host=host, port=ports[1], folder=folder))

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        (munge / "key").touch(mode=0o600)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        # --force: a folder below /tmp, which all may write to
        self._call("munged", "--force", *(f"--{option}={munge / name}" for option, name in files.items()))

    def _start_accounting(self) -> None:
        folder = self.folder / "database"
        folder.mkdir()
        options = ["--user=root", f"--datadir={folder}/data"]
        self._call("mariadb-install-db", *options, "--auth-root-authentication-method=normal")
        options += [f"--socket={folder}/socket", f"--pid-file={folder}/pid", "--skip-networking"]
        options += ["--innodb-buffer-pool-size=128M", "--innodb-lock-wait-timeout=900"]
        with (folder / "log").open("w") as log:
            self._database = subprocess.Popen(
                ["mariadbd", "--no-defaults", *options],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        client = ["mariadb", "-uroot", "-S", f"{folder}/socket", "-e", "create database if not exists slurm_acct_db"]
        self.wait(lambda: self.run(*client) == "", "MariaDB")
        # the client library finds a socket of one's own through this variable alone
        self._call("slurmdbd", MYSQL_UNIX_PORT=f"{folder}/socket")
        self.wait(lambda: self.run("sacctmgr", "-n", "show", "cluster") is not None, "slurmdbd")
        self.run("sacctmgr", "-i", "add", "cluster", "loopback")
        self.run("sacctmgr", "-i", "add", "account", "test", "Description=test", "Organization=test")
        self.run("sacctmgr", "-i", "add", "user", "root", "Account=test")

    def _call(self, *command: str, **variables: str) -> None:
        done = subprocess.run(
            command, env={**self.environment, **variables}, cwd=self.folder, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def wait(self, ready: Callable[[], bool], what: str, seconds: float = 180) -> None:
        """Until `ready` says so; it may fail until then."""
        end = time.monotonic() + seconds
        while True:
            try:
                if ready():
                    return
                error = ""
            except AssertionError as failure:
                error = str(failure)
            assert time.monotonic() < end, f"no {what} within {seconds:.0f} s {error}"
            time.sleep(0.1)

    def _cancel_all(self) -> None:
        if not (self.folder / "slurmctld.pid").exists():
            return
        self.run("scancel", "--user=root", "--state=PENDING")
        self.run("scancel", "--user=root", "--full", "--signal=KILL")
        self.wait(lambda: not self.jobs(), "end of all jobs")


def _processes_with(*marks: bytes) -> set[int]:
    """Processes, other than this, that live and have these variables, each as NAME=value and a zero byte."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes() + b"\0"  # empty of one that is over
            if int(process.name) != os.getpid() and all(mark in variables for mark in marks):
                found.add(int(process.name))
    return found


def _parent(process: int) -> int:
    """Process that started one; 0 of one that is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def _end(*pid_files: Path) -> None:
    """End the daemons of these pid files, and wait for them."""
    pids = [int(path.read_text()) for path in pid_files if path.exists()]
    for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + seconds
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while pids and time.monotonic() < end:
            time.sleep(0.1)
            pids = [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@contextlib.contextmanager
def running(folder: Path, **settings) -> Iterator[Cluster]:
    """A cluster, and nothing of it afterwards."""
    with Cluster(folder, **settings) as cluster:
        yield cluster
    start = time.monotonic()
    while (left := cluster.left_over()) and time.monotonic() < start + 120:
        for process, command in left.items():
            # Slurm's own, of a job that has ended: where slurmd goes at that moment, it may stay for good
            if command.startswith("slurmstepd") and time.monotonic() > start + 20:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
    assert not left, f"outlived their cluster: {left}"


def bring_up(folder: Path, **settings) -> Iterator[Cluster]:
    """A running cluster; where there can be none the test is skipped, and under .ci/run it fails."""
    if lacking := missing(settings.get("accounting", True)):
        reason = f"the workflow on Slurm is not tested: no {', '.join(lacking)}"
        if os.environ.get("DRAFTFLOW_CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with running(folder, **settings) as cluster:
        yield cluster


def _leave(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough, and the way out is long
    sys.exit(0)


def main() -> None:
    """Bring up a cluster and keep it until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accounting", action="store_true")
    arguments = parser.parse_args()
    if lacking := missing(arguments.accounting):
        sys.exit(f"no {', '.join(lacking)}; Debian's packages: {PACKAGES}")
    signal.signal(signal.SIGTERM, _leave)
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        running(Path(folder), accounting=arguments.accounting) as cluster,
    ):
        print(*(f"export {name}={cluster.environment[name]}" for name in ("SLURM_CONF", "PATH")), sep="\n", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
