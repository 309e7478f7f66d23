"""The driver's side of the probe on this machine; tests/ssh has what goes over ssh."""

import json
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from draftflow import config
from draftflow.environment import hosts
from draftflow.environment.hosts import HopError, Host, Prober
from draftflow.errors import DraftflowError

# All that a shell could make something of, and that may stand between single quotes in every one of them.
STRANGE = 'a b $HOME $(id) `id` ~ * ? [x] {a,b} "q" & ; | < > # % = ^ ü'

REPORT = {
    "fields": {
        "Python": "3.11.7",
        "torch": "2.11.0+cu130",
        "torch git": "7" * 40,
        "GPUs of torch": ["8 x NVIDIA H200"],
    },
    "information": {"host": "gpu1", "interpreter": "/opt/venv/bin/python", "seconds": 20.0, "time": "2026-11-29"},
    "caches": {"inductor": {"path": "/tmp/i", "exists": False}},
    "race": {"affected": True, "why": "2 of 2 trials failed", "errors": {"RuntimeError: x": 2}},
    "problems": ["nvidia-smi fails."],
}


def with_fields(**fields):
    return {
        **REPORT,
        "fields": {**REPORT["fields"], **{name.replace("_", " "): value for name, value in fields.items()}},
    }


def here(**facts):
    return hosts.hosts({"hosts": {"here": facts}}, [])[0]


def prober(hop_seconds=60.0, timeout_seconds=120.0):
    return Prober(hop_seconds, timeout_seconds, 0.0)


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_the_configuration_takes_hosts_as_one_writes_them():
    text = "probe: {hosts: {here: , gpu1: {ssh: root@gpu1, ssh_options: [-p, 2222], container: [pct, exec, 200, --]}}}"
    settings = config.load(yaml.safe_load(text)).probe.model_dump(mode="json")
    found = hosts.hosts(settings, ["/no/such/python", sys.executable])
    assert found == [
        Host("here", sys.executable),
        Host("gpu1", "python3", "root@gpu1", ("-p", "2222"), ("pct", "exec", "200", "--")),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "probe: {hosts: {gpu1: {pyton: x}}}",
            "c.yaml: probe.hosts.gpu1.pyton: unknown key (value 'x'). Did you mean probe.hosts.gpu1.python?",
        ),
        (
            "probe: {hosts: {gpu1: {container: pct exec}}}",
            "c.yaml: probe.hosts.gpu1.container: 'pct exec' is not allowed. Allowed: a list of texts.",
        ),
        (
            "probe: {hosts: {gpu1: root@gpu1}}",
            "c.yaml: probe.hosts.gpu1: 'root@gpu1' is not allowed."
            " Allowed: a block with the keys ssh, ssh_options, container, python.",
        ),
        (
            "probe: {hosts: {a/b: {}}}",
            "c.yaml: probe.hosts: 'a/b' is not allowed."
            " Allowed: names of letters, digits, dots, dashes and underscores.",
        ),
        (
            "probe: {hosts: {gpu1: {ssh: -oProxyCommand=x}}}",
            "c.yaml: probe.hosts.gpu1.ssh: '-oProxyCommand=x' is not allowed."
            r" Allowed: a text | null, of the form ^[^-\s]\S*$.",
        ),
        (
            "probe: {hosts: [gpu1]}",
            "c.yaml: probe.hosts: ['gpu1'] is not allowed. Allowed: a block of names, each a block with the keys"
            " ssh, ssh_options, container, python.",
        ),
    ],
)
def test_a_wrong_host_is_one_line_with_key_value_and_what_is_allowed(text, message):
    with pytest.raises(DraftflowError) as caught:
        config.load(yaml.safe_load(text), "c.yaml")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"ssh": "gpu1", "python": "/opt/it's/python"}, ["Login shells do not agree", '"\'"']),
        ({"ssh": "gpu1", "container": ["sh", "a\nb"]}, ["Login shells do not agree", r"\n"]),
        ({"ssh": "gpu1", "container": ["a!b"]}, ["Login shells do not agree", "'!'"]),
        ({"ssh": "gpu1", "python": "~/venv/bin/python"}, ["would need a shell", "venv/bin/python"]),
        ({"ssh_options": ["-v"]}, ["ssh_options and no ssh"]),
    ],
)
def test_what_no_shell_must_decide_is_refused(facts, words):
    with pytest.raises(DraftflowError) as caught:
        here(**facts)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_every_shell_here_reads_the_words_of_a_command_the_same():
    words = [STRANGE, "=python3", "%1", "-x", "", "a=b", "true", "~root"]
    line = " ".join(hosts.quoted(word, Host("x", "python")) for word in ["printf", "%s|", *words])
    found = [
        path for name in ("sh", "bash", "dash", "zsh", "fish", "csh", "tcsh", "ksh") if (path := shutil.which(name))
    ]
    assert found
    for shell in found:
        read = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=True).stdout
        assert read == "".join(f"{word}|" for word in words), shell


def test_ssh_gets_one_word_to_run_and_can_ask_nobody():
    host = Host("x", "python3", "root@gpu1", ("-o", "BatchMode=no", "-p", "2222"), ("pct", "exec", "200", "--"))
    argv = hosts.command(host, [*host.container, host.python, "-"], 7)
    assert argv[-3:] == ["--", "root@gpu1", "'pct' 'exec' '200' '--' 'python3' '-'"]
    # ssh takes the first value that it meets
    assert argv.index("BatchMode=yes") < argv.index("BatchMode=no")
    assert "ConnectTimeout=7" in argv


def test_this_machine_is_probed_without_any_shell(tmp_path):
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    python = script(folder / "python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    report = prober().probe(here(python=python))
    assert report["fields"]["torch"] is None


def test_noise_before_and_after_the_report_does_no_harm(tmp_path):
    noisy = script(tmp_path / "noisy", '#!/bin/sh\nprintf "{\\"a\\": no json"; "$@"; printf "} bye"\n')
    assert prober().probe(here(container=[noisy], python=sys.executable))["fields"]["torch"] is None


@pytest.mark.parametrize(
    ("hop", "text", "words"),
    [
        ("container", "#!/bin/sh\necho 'CT 200 not running' >&2; exit 255\n", ["status 255 (CT 200 not running)"]),
        ("container", "#!/bin/sh\nsleep 600\n", ["does not run `true` in 6 s", "probe.hop_seconds"]),
        ("stdin", '#!/bin/sh\nexec "$@" </dev/null\n', ["does not arrive at Python"]),
        ("stdin", '#!/bin/sh\nhead -c 1000 >/dev/null; exec "$@"\n', ["does not arrive at Python"]),
    ],
)
def test_a_container_that_fails_is_named(tmp_path, hop, text, words):
    container = script(tmp_path / "container", text)
    with pytest.raises(HopError) as caught:
        prober(hop_seconds=1.0).probe(here(container=[container], python=sys.executable))
    assert caught.value.hop == hop
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/no/such/python", ["there is no /no/such/python"]),
        ("no-such-python", ["there is no no-such-python"]),
        ("/etc/passwd", ["/etc/passwd cannot be executed"]),
        ("/", ["/ cannot be executed"]),
        ("/bin/true", ["/bin/true is not a Python"]),
    ],
)
def test_an_interpreter_that_fails_is_named(python, words):
    with pytest.raises(HopError) as caught:
        prober().probe(here(python=python))
    assert caught.value.hop == "interpreter"
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_container_command_that_is_not_there_is_named():
    with pytest.raises(HopError, match="container failed: there is no command no-such-pct here") as caught:
        prober().probe(here(container=["no-such-pct", "exec", "200", "--"]))
    assert caught.value.hop == "container"


def test_a_report_that_was_damaged_is_no_report(tmp_path):
    damaged = script(tmp_path / "python", "#!/bin/sh\necho 'draftflow-probe-begin {\"fields\": draftflow-probe-end'\n")
    with pytest.raises(HopError, match="probe failed: its report is damaged"):
        prober().probe(here(python=damaged))


def test_a_probe_that_dies_on_the_way_says_its_last_words(tmp_path):
    dying = script(tmp_path / "python", "#!/bin/sh\necho draftflow-probe-started; echo Killed >&2; exit 137\n")
    with pytest.raises(HopError, match=r"probe failed: Python was reached, and stopped with status 137 \(Killed\)"):
        prober().probe(here(python=dying))


def test_stopping_kills_what_runs():
    one = prober(hop_seconds=600, timeout_seconds=600)
    threading.Timer(0.5, one.stop).start()
    start = time.monotonic()
    with pytest.raises(HopError):
        one.probe(here(container=["sh", "-c", "sleep 600"]))
    assert time.monotonic() - start < 30


def test_differences_are_said_field_by_field():
    other = with_fields(torch_git="4" * 40, GPUs_of_torch=["8 x NVIDIA H200", "1 x NVIDIA T4"], torch="2.10.0+cu128")
    other["information"] = {**REPORT["information"], "host": "gpu2", "seconds": 3.0}
    assert hosts.differences(REPORT, other) == [
        "torch 2.11.0+cu130 -> 2.10.0+cu128",
        "torch git 7777777 -> 4444444",
        "GPUs of torch none -> 1 x NVIDIA T4",
    ]
    assert hosts.differences(REPORT, REPORT) == []


def test_what_was_not_asked_is_no_difference_and_a_variable_of_one_host_is():
    without = {"fields": {"Python": "3.11.7", "torch": None, "compile race": "unknown", "NCCL": None}}
    full = {"fields": {**REPORT["fields"], "compile race": "affected", "TORCHINDUCTOR_FREEZING": "1"}}
    assert hosts.differences(full, without) == ["torch 2.11.0+cu130 -> none", "TORCHINDUCTOR_FREEZING 1 -> none"]


def test_dangerous_switches_are_said_with_what_they_do():
    report = {
        "fields": {
            "dynamo suppress_errors": True,
            "dynamo error_on_nested_fx_trace": False,
            "dynamo disable": False,
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_COMPILE_DISABLE": "0",
        }
    }
    found = hosts.dangers(report)
    assert [sentence.split(" and ")[0] for sentence in found[:2]] == [
        "dynamo suppress_errors is True",
        "dynamo error_on_nested_fx_trace is False",
    ]
    assert found[2].startswith("TORCHDYNAMO_DISABLE=1 switches compilation off")
    assert len(found) == 3


def test_the_comparison_is_a_table_of_every_field(tmp_path):
    table = hosts.comparison({"a": REPORT, "b": with_fields(torch_git="4" * 40)})
    rows = [line.split("\t") for line in table.splitlines()]
    assert rows[0] == ["field", "same", "a", "b"]
    assert ["torch git", "no", "7777777", "4444444"] in rows
    assert ["Python", "yes", "3.11.7", "3.11.7"] in rows


def run(folder: Path, blocks, *arguments):
    settings = {"hosts": blocks, "hop_seconds": 5.0, "timeout_seconds": 30.0, "trial_seconds": 0.0}
    command = [sys.executable, "-m", "draftflow.environment.hosts", "--settings", json.dumps(settings)]
    return subprocess.run(
        [*command, "--output", folder, *arguments], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )


def test_one_host_that_fails_does_not_stop_the_others(tmp_path):
    done = run(
        tmp_path, {"good": {"python": sys.executable}, "bad": {"python": "/no/python"}, "worse": {"python": "/"}}
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("draftflow: error: ")]
    assert [line.split(": ")[2] for line in lines] == ["probe.hosts.bad", "probe.hosts.worse"]
    assert json.loads((tmp_path / "good.json").read_text())["fields"]["torch"] is None
    assert json.loads((tmp_path / "bad.json").read_text())["failed"]["hop"] == "interpreter"


def test_what_changed_since_the_last_probe_is_said(tmp_path):
    block = {"here": {"python": sys.executable}}
    assert "has changed" not in run(tmp_path, block).stdout
    report = json.loads((tmp_path / "here.json").read_text())
    report["fields"]["driver"] = "550.54.15"
    (tmp_path / "here.json").write_text(json.dumps(report))
    assert "driver 550.54.15 -> none" in run(tmp_path, block).stdout


def test_without_a_host_this_machine_is_probed_with_the_installed_environment(tmp_path):
    python = script(tmp_path / "draftflow-python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    out = run(tmp_path / "out", {}, "--here", "/not/installed", python).stdout
    assert f"here: {python} (" in out
    assert "no environment is installed" in run(tmp_path / "out", {}, "--here", "/not/installed").stdout
