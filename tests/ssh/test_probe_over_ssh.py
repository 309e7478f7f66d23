"""The probe through a real sshd: login shells, containers, and what is said of each hop that fails."""

import time

import pytest

from draftflow.environment import hosts
from draftflow.environment.hosts import HopError, Prober

SETTINGS = {"hop_seconds": 10.0, "timeout_seconds": 60.0, "trial_seconds": 0.0}

# All that a shell could make something of between words, and is allowed in a path.
STRANGE = 'a b $HOME $(id) `id` ~ * ? [x] {a,b} "q" & ; | < > # % = ^ ü'


def probe(facts, **settings):
    values = {**SETTINGS, **settings}
    (host,) = hosts.hosts({"hosts": {"there": facts}, **values}, [])
    return Prober(**values).probe(host)


def failure(facts, **settings):
    """The hop that failed and the sentence about it, from a probe whose hops get two seconds each."""
    with pytest.raises(HopError) as caught:
        probe(facts, **{"hop_seconds": 2.0, "timeout_seconds": 20.0, **settings})
    assert str(caught.value).startswith("probe.hosts.there: ")
    assert "\n" not in str(caught.value)
    return caught.value.hop, str(caught.value)


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh"])
@pytest.mark.parametrize("container", [None, ["pct", "exec", "200", "--"], ["docker", "exec", "-i", "trainer"]])
def test_a_probe_arrives_whole_through_each_login_shell(server, shell, container):
    words = [] if container is None else [str(server.commands / container[0]), *container[1:]]
    report = probe(server.host(shell, container=words))
    assert report["information"]["user"] == f"draftflow-{shell}"
    assert report["fields"]["torch"] is None
    assert report["race"]["affected"] is None


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh"])
def test_no_login_shell_reads_anything_into_a_path(server, shell):
    folder = server.folder / STRANGE
    folder.mkdir(exist_ok=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {server.python} "$@"\n')
    python.chmod(0o755)
    assert probe(server.host(shell, python=str(python)))["fields"]["torch"] is None


FAILURES = {
    "an unknown host": (
        lambda s: {**s.host("sh"), "ssh": "gpu1.invalid"},
        "ssh",
        ["no such host", "gpu1.invalid", "~/.ssh/config"],
    ),
    "a closed port": (
        lambda s: {**s.host("sh"), "ssh_options": s.options(port=1)},
        "ssh",
        ["nothing listens", "refused", "-p, PORT"],
    ),
    "a key that is not accepted": (
        lambda s: {**s.host("sh"), "ssh_options": s.options(key="other_key")},
        "ssh",
        ["no key was accepted", "publickey", "ssh-add"],
    ),
    "a key file that is not there": (
        lambda s: {**s.host("sh"), "ssh_options": s.options(key="no_key")},
        "ssh",
        ["key file cannot be read", "no_key"],
    ),
    "a host that is not known": (
        lambda s: {**s.host("sh"), "ssh_options": s.options(known_hosts="no_hosts")},
        "ssh",
        ["key is not known", "by hand: ssh"],
    ),
    "a host with another key": (
        lambda s: {**s.host("sh"), "ssh_options": s.options(known_hosts="changed_hosts")},
        "ssh",
        ["another key", "ssh-keygen -R", "by hand: ssh"],
    ),
    "an option that ssh does not have": (
        lambda s: {**s.host("sh"), "ssh_options": ["-o", "NoSuchOption=1"]},
        "ssh",
        ["options", "nosuchoption", "ssh_options"],
    ),
    "an account without a shell": (
        lambda s: s.host("nologin"),
        "login shell",
        ["does not run", "not available"],
    ),
    "a login script that waits": (
        lambda s: s.host("waiting"),
        "login shell",
        ["does not run `true` in", "key was accepted", "login scripts"],
    ),
    "a container command that is not there": (
        lambda s: s.host("zsh", container=["pct", "exec", "200", "--"]),
        "container",
        ["there is no command pct", "whole path"],
    ),
    "a container that does not run": (
        lambda s: s.host("zsh", container=[f"{s.commands}/pct", "exec", "999", "--"]),
        "container",
        ["container '999' not running", "by hand: ssh"],
    ),
    "a container that does not answer": (
        lambda s: s.host("bash", container=[f"{s.commands}/stuck"]),
        "container",
        ["does not run `true` in", "probe.hop_seconds"],
    ),
    "a container that withholds stdin": (
        lambda s: s.host("bash", container=[f"{s.commands}/docker", "exec", "trainer"]),
        "stdin",
        ["does not arrive", "docker exec -i"],
    ),
    "an interpreter that is not there": (
        lambda s: s.host("zsh", python="/opt/venv/bin/python"),
        "interpreter",
        ["there is no /opt/venv/bin/python", "probe.hosts.there.python"],
    ),
    "an interpreter that is not there, in a container": (
        lambda s: s.host("sh", container=[f"{s.commands}/pct", "exec", "200", "--"], python="/opt/venv/bin/python"),
        "interpreter",
        ["there is no /opt/venv/bin/python"],
    ),
    "an interpreter that may not be executed": (
        lambda s: s.host("bash", python=str(s.folder / "sshd_config")),
        "interpreter",
        ["cannot be executed", "ermission denied"],
    ),
    "an interpreter that is no Python": (
        lambda s: s.host("zsh", python="/bin/echo"),
        "interpreter",
        ["/bin/echo is not a Python", "-V"],
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_names_its_hop_and_what_to_do(server, name):
    facts, hop, words = FAILURES[name]
    found, sentence = failure(facts(server))
    assert (found, [word for word in words if word not in sentence]) == (hop, []), sentence


def test_an_interpreter_too_old_for_the_probe_is_named(server):
    old = server.folder / "old-python"
    old.write_text("#!/bin/sh\necho Python 2.7.18 >&2\n")
    old.chmod(0o755)
    hop, sentence = failure(server.host("sh", python=str(old)))
    assert hop == "interpreter"
    assert "Python 2.7" in sentence


def test_a_probe_that_is_reached_and_does_not_finish_is_no_failure_of_the_way(server):
    slow = server.folder / "slow-python"
    slow.write_text("#!/bin/sh\necho draftflow-probe-started 3.11.2\nsleep 600\n")
    slow.chmod(0o755)
    start = time.monotonic()
    hop, sentence = failure(server.host("sh", python=str(slow)), timeout_seconds=4.0)
    assert hop == "probe"
    assert "did not finish in 4 s" in sentence
    assert time.monotonic() - start < 15
