"""Stage: probe interpreters on this machine, over ssh, and in containers behind ssh; say what differs between them.

The program (`probe.py`) goes through stdin from hop to hop, so that no shell reads it. What does pass through the login
shell behind ssh are the few words of the command; each stands in single quotes, and what shells disagree on between
these is refused. All hosts are asked at once; one that fails does not stop the others.

`--settings`: {"hosts": {name: {"ssh", "ssh_options", "container", "python"}}, "hop_seconds", "timeout_seconds",
"trial_seconds"}. `--here`: interpreters of this machine to take where none is named, the first that is there.
Written to `--output`: `<name>.json`, and `comparison.tsv`.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftflow.compile_cache.location import FOOT_GUNS
from draftflow.environment.probe import BEGIN, END, STARTED
from draftflow.errors import DraftflowError
from draftflow.stage import run_stage, say, stage_parser, write_json, write_text

LEAST_PYTHON = (3, 8)

# No prompt, no terminal, nothing of the user's configuration that would take over stdin or the command. The first
# value that ssh meets holds, so these come before the user's options.
_SSH = ["ssh", "-T", "-a", "-x"]
_SSH_SETTINGS = {
    "BatchMode": "yes",
    "RequestTTY": "no",
    "RemoteCommand": "none",
    "PermitLocalCommand": "no",
    "ClearAllForwardings": "yes",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "LogLevel": "ERROR",
}

# Between single quotes sh, bash, zsh, fish and csh read everything literally, save these.
_DISPUTED = re.compile(r"['\\!\x00-\x1f\x7f]")

_VARIABLE = re.compile(r"[A-Z0-9]+_[A-Z0-9_]+")

_MISSING = re.compile(r"not found|no such file|unknown command", re.IGNORECASE)

# What the last line of ssh's complaint means: (pattern, what, remedy).
_SSH_COMPLAINTS = [
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the host has another key than the known one",
        "If it was installed anew, remove the old key (ssh-keygen -R HOST) and accept the new one by hand: {by_hand}.",
    ),
    (
        r"Host key verification failed|host key is known",
        "the host's key is not known",
        "Compare it with its owner's and accept it by hand: {by_hand}.",
    ),
    (
        r"Identity file .* not accessible|Load key",
        "the key file cannot be read",
        "Name another one (ssh_options: [-i, FILE]), readable by you alone.",
    ),
    (
        r"Permission denied \(|Too many authentication failures|No more authentication methods",
        "no key was accepted",
        "Add your key there, load it with ssh-add, or name it (ssh_options: [-i, FILE]).",
    ),
    (r"Could not resolve hostname", "no such host is known", "Check the name, or add it to ~/.ssh/config."),
    (
        r"Connection refused",
        "nothing listens at that port",
        "Start sshd there, or name its port (ssh_options: [-p, PORT]).",
    ),
    (
        r"timed out|No route to host|Network is unreachable|not responding",
        "the host is not reachable",
        "Check that it is up, and the network, VPN or jump host (ssh_options: [-J, JUMP]) in between.",
    ),
    (
        r"Bad configuration option|command-line|unknown option|illegal option|Bad owner",
        "ssh does not accept its options or configuration",
        "Mend probe.hosts.*.ssh_options or ~/.ssh/config.",
    ),
]

# Settings of torch that make attention dense or lose the cache without an error: field, value, what it does.
_SWITCHES = [
    ("dynamo disable", True, "switches compilation off, which makes attention dense"),
    ("dynamo suppress_errors", True, "hides a failed compile and runs dense attention in its place"),
    ("dynamo error_on_nested_fx_trace", False, "runs dense attention, without an error, while another thread traces"),
    ("inductor force_disable_caches", True, "switches the compile cache off"),
    (
        "flex_attention _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        True,
        "runs attention that nobody compiled without compiling it",
    ),
]


@dataclass(frozen=True)
class Host:
    """An interpreter and the way to it.

    Attributes:
        name: key of `probe.hosts`.
        python: the interpreter behind all hops.
        ssh: destination, None for this machine.
        ssh_options: words before the destination.
        container: words before the interpreter.
    """

    name: str
    python: str
    ssh: str | None = None
    ssh_options: tuple[str, ...] = ()
    container: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Where it is configured, for messages."""
        return f"probe.hosts.{self.name}"

    @property
    def way(self) -> str:
        """The hops in words: "ssh root@gpu1 > pct exec 200 -- > /opt/venv/bin/python"."""
        hops = [f"ssh {self.ssh}"] if self.ssh else []
        return " > ".join([*hops, *([shlex.join(self.container)] if self.container else []), self.python])


@dataclass(frozen=True)
class Answer:
    """What a command gave: `code` is None where its time was over, 126 or 127 where it did not start, as in a shell."""

    code: int | None
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line of its complaint, or of what it printed."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        return lines[-1].rstrip(".") if lines else "it says nothing"


class HopError(DraftflowError):
    """A hop failed.

    Args:
        hop: "ssh", "login shell", "container", "interpreter", "stdin" or "probe".
    """

    def __init__(self, host: Host, hop: str, what: str, remedy: str):
        self.hop = hop
        label = {"ssh": f"ssh {host.ssh}", "login shell": f"login shell of {host.ssh}"}.get(hop, hop)
        super().__init__(f"{label} failed: {what}.", remedy, host.key)


def hosts(settings: dict[str, Any], here: list[str]) -> list[Host]:
    """The hosts of the configuration; this machine alone, as `here`, where there is none.

    Raises:
        DraftflowError: a word cannot be handed to every login shell, or there is no interpreter on this machine.
    """
    found = []
    for name, facts in (settings["hosts"] or {"here": {}}).items():
        python, remote = facts.get("python"), bool(facts.get("ssh") or facts.get("container"))
        if python is None and not remote:
            python = next(filter(shutil.which, here), None)
            if python is None:
                python = sys.executable
                say(f"{name}: no environment is installed here yet; the interpreter that runs this is asked")
        elif python is None:
            python = "python3"
        elif not remote:
            python = str(Path(python).expanduser()) if python.startswith("~") else python
        ssh_options = tuple(facts.get("ssh_options") or ())
        host = Host(name, python, facts.get("ssh"), ssh_options, tuple(facts.get("container") or ()))
        if host.ssh is None and host.ssh_options:
            raise DraftflowError("There are ssh_options and no ssh.", "Name the host in `ssh`.", host.key)
        if remote and python.startswith("~"):
            raise DraftflowError(
                f"{python} would need a shell to be found.",
                "Write the whole path, or one relative to the home folder (venv/bin/python).",
                f"{host.key}.python",
            )
        if host.ssh is not None:
            for word in (*host.container, host.python):
                quoted(word, host)
        found.append(host)
    return found


def quoted(word: str, host: Host) -> str:
    """A word as every login shell reads it: in single quotes.

    Quotes keep words from being aliases (zsh), variables or `=command` expansions as well.

    Raises:
        DraftflowError: shells do not agree on it.
    """
    disputed = _DISPUTED.search(word)
    if disputed:
        raise DraftflowError(
            f"Login shells do not agree on {disputed[0]!r} in {word!r}.", "Use a path or word without it.", host.key
        )
    return f"'{word}'"


def command(host: Host, inner: Iterable[str], hop_seconds: float, verbose: bool = False) -> list[str]:
    """The command that runs `inner` behind the hops; `hop_seconds` is how long ssh may take to connect.

    Raises:
        DraftflowError: as `quoted`.
    """
    if host.ssh is None:
        return list(inner)
    settings = {**_SSH_SETTINGS, "ConnectTimeout": str(max(1, round(hop_seconds)))}
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    words = " ".join(quoted(word, host) for word in inner)
    return [*_SSH, *(["-v"] if verbose else []), *options, *host.ssh_options, "--", host.ssh, words]


class Prober:
    """Probes hosts, and stops what it started when it is left."""

    def __init__(self, hop_seconds: float, timeout_seconds: float, trial_seconds: float):
        self.hop_seconds, self.timeout_seconds, self.trial_seconds = hop_seconds, timeout_seconds, trial_seconds
        self._program = Path(__file__).with_name("probe.py").read_bytes()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def stop(self) -> None:
        """Kill every process that runs; what starts later is killed at once."""
        self._stopped = True
        for process in list(self._running):
            _kill(process)

    def probe(self, host: Host) -> dict[str, Any]:
        """The report of one host, as `probe.py` describes it.

        Raises:
            HopError: naming the hop that failed.
        """
        hops = 1 + bool(host.ssh) + bool(host.container)
        # what it gives up on by itself, it can still report
        seconds = max(1.0, self.timeout_seconds - 5)
        arguments = [host.python, "-", f"{seconds:g}", f"{min(self.trial_seconds, seconds):g}"]
        argv = command(host, [*host.container, *arguments], self.hop_seconds)
        answer = self._run(argv, self.timeout_seconds, self._program, reached_in=hops * self.hop_seconds)
        if BEGIN in answer.out and END in answer.out:
            text = answer.out.rpartition(BEGIN)[2].partition(END)[0]
            try:
                report: dict[str, Any] = json.loads(text)
            except ValueError as error:
                raise HopError(
                    host, "probe", f"its report is damaged on the way ({error})", "See what writes into the connection."
                ) from None
            return report
        raise self._diagnose(host, answer)

    def _diagnose(self, host: Host, answer: Answer) -> HopError:
        """Which hop failed: shorter ways are tried, one hop more each time."""
        by_hand = shlex.join(["ssh", *host.ssh_options, host.ssh]) if host.ssh else ""
        if STARTED in answer.out:
            if answer.code is None:
                what = f"Python was reached, and did not finish in {self.timeout_seconds:g} s"
                return HopError(host, "probe", what, "Give it more time (probe.timeout_seconds) or less to do.")
            what = f"Python was reached, and stopped with status {answer.code} ({answer.last})"
            return HopError(host, "probe", what, "Look at that machine's log and free memory.")
        if host.ssh is not None and (failed := self._diagnose_ssh(host, by_hand)):
            return failed
        if host.container and (failed := self._diagnose_container(host, by_hand)):
            return failed
        if failed := self._diagnose_interpreter(host):
            return failed
        if answer.code is None:
            what = "every hop answers now, and the probe was not reached in time"
        else:
            what = f"every hop answers now, and the probe ended with status {answer.code} ({answer.last})"
        return HopError(host, "probe", what, "Run again; give a slow hop more time (probe.hop_seconds).")

    def _diagnose_ssh(self, host: Host, by_hand: str) -> HopError | None:
        answer = self._run(command(host, ["true"], self.hop_seconds, verbose=True), self.hop_seconds + 5)
        if answer.code == 0:
            return None
        chatter = r"debug\d: |OpenSSH_|Transferred: |Bytes per second: "
        before, authenticated, after = answer.err.partition("Authenticated to ")
        lines = [line for line in (after or before).splitlines() if not re.match(chatter, line)]
        if authenticated:
            lines = lines[1:]
        said = Answer(answer.code, answer.out, "\n".join(lines))
        if authenticated or answer.code not in (None, 126, 127, 255):
            what = f"it does not run `true` (status {answer.code}: {said.last})"
            if answer.code is None:
                what = f"it does not run `true` in {self.hop_seconds + 5:g} s, though the key was accepted"
            return HopError(
                host, "login shell", what, "Look at the account's shell and login scripts; they must not wait."
            )
        for pattern, what, remedy in _SSH_COMPLAINTS:
            if re.search(pattern, said.err, re.IGNORECASE):
                reason = next(line for line in reversed(lines) if re.search(pattern, line, re.IGNORECASE)).strip(" @!")
                return HopError(host, "ssh", f"{what} ({reason.rstrip('.')})", remedy.format(by_hand=by_hand))
        what = said.last
        if answer.code is None:
            what = f"no answer in {self.hop_seconds + 5:g} s, and no key was accepted"
        return HopError(host, "ssh", what, f"Try it by hand: {by_hand}.")

    def _diagnose_container(self, host: Host, by_hand: str) -> HopError | None:
        prefix = shlex.join(host.container)
        answer = self._run(command(host, [*host.container, "true"], self.hop_seconds), self.hop_seconds + 5)
        if answer.code == 0:
            return None
        tried = f"Try it by hand: {f'{by_hand} ' if by_hand else ''}{prefix} true."
        if answer.code is None:
            what = f"{prefix} does not run `true` in {self.hop_seconds + 5:g} s"
            return HopError(host, "container", what, f"Give it more time (probe.hop_seconds). {tried}")
        if answer.code in (126, 127) and _MISSING.search(answer.last) and host.container[0] in answer.last:
            what = f"there is no command {host.container[0]} {f'on {host.ssh}' if host.ssh else 'here'} ({answer.last})"
            return HopError(host, "container", what, "Give its whole path, since login scripts may not set PATH.")
        what = f"{prefix} fails with status {answer.code} ({answer.last})"
        return HopError(host, "container", what, f"See that the container is there and runs. {tried}")

    def _diagnose_interpreter(self, host: Host) -> HopError | None:
        remedy = f"Name a Python {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} or newer by its path ({host.key}.python)."
        fails = partial(HopError, host, "interpreter")
        argv = command(host, [*host.container, host.python, "-V"], self.hop_seconds)
        answer = self._run(argv, self.hop_seconds + 5)
        # a login script's last line may stand before it
        versions = list(re.finditer(r"Python (\d+)\.(\d+)", answer.out + answer.err))
        if not versions:
            if answer.code is None:
                return fails(f"{host.python} -V does not end in {self.hop_seconds + 5:g} s", remedy)
            if re.search(r"permission denied|exec format|is a directory", answer.err, re.IGNORECASE):
                return fails(f"{host.python} cannot be executed ({answer.last})", remedy)
            if _MISSING.search(answer.err):
                return fails(f"there is no {host.python} ({answer.last})", remedy)
            if answer.code:
                return fails(f"{host.python} -V fails with status {answer.code} ({answer.last})", remedy)
            return fails(f"{host.python} is not a Python (-V answers: {Answer(0, answer.out, '').last})", remedy)
        version = versions[-1]
        if (int(version[1]), int(version[2])) < LEAST_PYTHON:
            return fails(f"{host.python} is {version[0]}, which the probe does not run on", remedy)
        argv = command(host, [*host.container, host.python, "-"], self.hop_seconds)
        answer = self._run(argv, self.hop_seconds + 5, b"print('draftflow' + '-through')\n")
        if "draftflow-through" in answer.out:
            return None
        if answer.code:
            return fails(f"{host.python} fails with status {answer.code} ({answer.last})", remedy)
        what = "the program does not arrive at Python: something on the way reads it or withholds it"
        return HopError(
            host, "stdin", what, "Let the container pass stdin on (docker exec -i), and login scripts read nothing."
        )

    def _run(self, argv: list[str], seconds: float, program: bytes = b"", reached_in: float = 0) -> Answer:
        """Run a command with `program` on stdin; without the probe's mark after `reached_in` seconds it is stopped."""
        try:
            # a session of its own: no terminal that ssh could ask on, and one group to kill
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "LC_ALL": "C"} if argv[0] == "ssh" else None,
            )
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return Answer(code, "", f"{argv[0]}: {os.strerror(error.errno or 0)}")
        self._running.add(process)
        deadline, late = time.monotonic() + seconds, False
        out = err = b""
        try:
            if self._stopped:
                _kill(process)
            out, err = process.communicate(program, timeout=min(seconds, reached_in or seconds))
        except subprocess.TimeoutExpired as reached:
            late = STARTED.encode() not in (reached.output or b"")
            if not late:
                try:
                    out, err = process.communicate(timeout=max(0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    late = True
        finally:
            if late or process.returncode is None:
                _kill(process)
                try:
                    out, err = process.communicate(timeout=5)
                except subprocess.TimeoutExpired as held:  # by a process that left the group
                    out, err = held.output or b"", held.stderr or b""
            self._running.discard(process)
        text, complaint = out.decode(errors="replace"), err.decode(errors="replace")
        return Answer(None if late else process.returncode, text, complaint)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two reports, field by field in words: "torch git 70d99e9 -> 449b176".

    Of lists only what one of them does not have. A field that was not asked of one (no torch, no trial) is no
    difference; a variable that is set on one alone is.
    """
    old_fields, new_fields = before["fields"], now["fields"]
    found = []
    without_torch = old_fields["torch"] is None or new_fields["torch"] is None
    for name in dict.fromkeys([*old_fields, *new_fields]):
        if name == "compile race" and without_torch:
            continue
        old, new = old_fields.get(name), new_fields.get(name)
        asked = (name in old_fields and name in new_fields) or _VARIABLE.fullmatch(name)
        if old == new or not asked:
            continue
        if isinstance(old, list) and isinstance(new, list):
            old, new = [item for item in old if item not in new], [item for item in new if item not in old]
            if old == new:
                continue
        found.append(f"{name} {_words(old)} -> {_words(new)}")
    return found


def dangers(report: dict[str, Any]) -> list[str]:
    """Switches that make attention dense or lose the cache without an error, a sentence each."""
    fields = report["fields"]
    found = [f"{name} is {value} and {effect}." for name, value, effect in _SWITCHES if fields.get(name) is value]
    found += [
        f"{name}={fields[name]} {effect}."
        for name, effect in FOOT_GUNS.items()
        if fields.get(name, "") not in ("", "0", "false", "False")
    ]
    return found


def summary(host: Host, report: dict[str, Any]) -> list[str]:
    """A report in lines for the terminal."""
    fields, information = report["fields"], report["information"]

    def listed(name: str) -> str:
        return _words(fields.get(name))

    torch = "none"
    if fields["torch"] is not None:
        cuda = f"CUDA {fields['torch CUDA']}" if fields.get("torch CUDA") else "no CUDA"
        torch = f"{fields['torch']} (git {listed('torch git')}, {cuda}), triton {listed('triton')}"
    lines = [
        ("", f"{host.name}: {host.way} ({information['host']}, {information['seconds']:.1f} s)"),
        ("Python", f"{fields['Python']} {information['interpreter']}"),
        ("torch", torch),
        ("driver", f"{listed('driver')}, CUDA {listed('CUDA driver')}"),
        ("GPUs", f"of the driver: {listed('GPUs of the driver')}; of torch: {listed('GPUs of torch')}"),
    ]
    if "flex_attention operator" in fields:
        lines += [
            ("flex", f"operator {listed('flex_attention operator')}: {listed('flex_attention dispatch')}"),
            ("", f"called uncompiled: {listed('flex_attention uncompiled')}"),
        ]
    if "dynamo recompile_limit" in fields:
        limits = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
        lines += [("dynamo", ", ".join(f"{name} {listed(f'dynamo {name}')}" for name in limits))]
        lines += [("switches", sentence) for sentence in dangers(report) or ["none of the dangerous ones is set"]]
    lines += [(f"{name} cache", _cache(facts)) for name, facts in report["caches"].items()]
    race = report["race"]
    lines += [("race", f"{fields['compile race']}: {race['why']}")]
    lines += [("", f"{number} x {error}") for error, number in race["errors"].items()]
    lines += [("problem", problem) for problem in report["problems"]]
    title, *rest = lines
    return [title[1], *(f"  {name:15} {text}" for name, text in rest)]


def comparison(reports: dict[str, dict[str, Any]]) -> str:
    """Tab-separated table: field, whether all are the same, then a column per host."""
    names = dict.fromkeys(name for report in reports.values() for name in report["fields"])
    rows = [["field", "same", *reports]]
    for name in names:
        values = [report["fields"].get(name) for report in reports.values()]
        same = all(value == values[0] for value in values)
        rows.append([name, "yes" if same else "no", *(_words(value) for value in values)])
    return "".join("\t".join(cell.replace("\t", " ") for cell in row) + "\n" for row in rows)


def _cache(facts: dict[str, Any]) -> str:
    if not facts["exists"]:
        return f"{facts['path']}: not there"
    if not facts["files"]:
        return f"{facts['path']}: empty"
    size = f"{facts['bytes'] / 1e6:.1f} MB in {facts['files']} files"
    age = f"written {facts['oldest_hours']:.1f} to {facts['newest_hours']:.1f} hours ago"
    return f"{facts['path']}: {'' if facts['whole'] else 'more than '}{size}, {age}"


def _words(value: Any) -> str:
    if value is None or value == []:
        return "none"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    # a git commit is known by its first digits
    return text[:7] if len(text) == 40 and set(text) <= set("0123456789abcdef") else text


def main() -> None:
    """Probe all hosts; write and print what they say and how they differ."""
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--here", nargs="*", default=[], help="an interpreter of this machine")
    parser.add_argument("--output", type=Path, required=True, help="folder of the reports")
    arguments = parser.parse_args()
    settings = arguments.settings
    wanted = hosts(settings, arguments.here)
    prober = Prober(settings["hop_seconds"], settings["timeout_seconds"], settings["trial_seconds"])
    reports: dict[str, dict[str, Any]] = {}
    refusals: list[DraftflowError] = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    pool = ThreadPoolExecutor(len(wanted))
    try:
        waiting = [(host, pool.submit(prober.probe, host)) for host in wanted]
        for host, future in waiting:
            path = arguments.output / f"{host.name}.json"
            earlier = _earlier(path)
            facts: dict[str, Any] = {"host": host.name, "way": host.way}
            try:
                report = future.result()
            except HopError as refusal:
                refusals.append(refusal)
                write_json(path, {**facts, "failed": {"hop": refusal.hop, **refusal.parts()}})
                say(f"{host.name}: {host.way}: {refusal.hop} failed")
                continue
            reports[host.name] = report
            write_json(path, {**facts, **report})
            for line in summary(host, report):
                say(line)
            if earlier is not None and (changed := differences(earlier, report)):
                say(f"{host.name} has changed since {earlier['information']['time']}: {'; '.join(changed)}")
    finally:
        prober.stop()
        pool.shutdown(cancel_futures=True)
    write_text(arguments.output / "comparison.tsv", comparison(reports))
    first, *others = reports or [""]
    for name in others:
        found = differences(reports[first], reports[name])
        say(f"{first} and {name}: {'; '.join(found) if found else 'no difference'}")
    if refusals:
        for other in refusals[:-1]:
            print(f"draftflow: error: {other}", file=sys.stderr, flush=True)
        raise refusals[-1]


def _earlier(path: Path) -> dict[str, Any] | None:
    """The last report of a host; None where there is none, or it failed."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return report if "fields" in report else None


if __name__ == "__main__":
    run_stage(main)
