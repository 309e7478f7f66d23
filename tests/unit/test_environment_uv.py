"""What uv is told of the user's pip settings, and what the user is told of uv's complaints."""

import os
from pathlib import Path

import pytest
from wheels import isolate

from draftflow.environment.uv import explain, sources


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose pip has a configuration file for everybody and one for the user."""
    isolate(monkeypatch, tmp_path)
    monkeypatch.delenv("PIP_CONFIG_FILE")
    for name in ("SSL_CERT_FILE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    for folder in ("etc/pip", "home/.config/pip"):
        (tmp_path / folder).mkdir(parents=True)
    everybody = "[global]\nindex-url = https://everybody.example/simple\nfind-links =\n    /first\n    /second\n"
    (tmp_path / "etc" / "pip" / "pip.conf").write_text(everybody)
    mine = "[global]\nindex-url = https://me:secret@mine.example/simple\n[install]\ntrusted-host = mine.example\n"
    (tmp_path / "home" / ".config" / "pip" / "pip.conf").write_text(mine)
    return tmp_path


def test_pip_configuration_files_are_read_the_users_over_everybodys(machine: Path):
    where = sources()
    assert where.environment["UV_DEFAULT_INDEX"] == "https://me:secret@mine.example/simple"
    assert where.environment["UV_INSECURE_HOST"] == "mine.example"
    assert where.find_links == ["/first", "/second"]


def test_the_environment_wins_over_files_and_uvs_own_settings_over_both(machine: Path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://shell.example/simple")
    monkeypatch.setenv("PIP_CERT", "/etc/site.pem")
    monkeypatch.setenv("PIP_FIND_LINKS", "/third")
    where = sources()
    assert where.environment["UV_DEFAULT_INDEX"] == "https://shell.example/simple"
    assert where.environment["SSL_CERT_FILE"] == "/etc/site.pem"
    assert where.find_links == ["/third"]
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv.example/simple")
    monkeypatch.setenv("UV_FIND_LINKS", "/fourth,/fifth")
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/uv.pem")
    where = sources()
    assert where.environment["UV_DEFAULT_INDEX"] == "https://uv.example/simple"
    assert where.environment["SSL_CERT_FILE"] == "/etc/uv.pem"
    assert where.find_links == ["/fourth", "/fifth"]
    assert len(where.taken) == 1  # the trusted host


def test_what_was_taken_over_is_said_with_its_origin_and_without_passwords(machine: Path):
    said = "\n".join(sources().taken)
    assert f"index-url=https://***@mine.example/simple ({machine / 'home/.config/pip/pip.conf'})" in said
    assert "secret" not in said


def test_pip_configuration_can_be_switched_off(machine: Path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert sources().taken == []


def test_settings_of_the_shell_that_would_change_the_result_are_left_out(machine: Path, monkeypatch):
    monkeypatch.setenv("UV_TORCH_BACKEND", "cpu")
    monkeypatch.setenv("UV_EXCLUDE_NEWER", "2020-01-01")
    assert not {"UV_TORCH_BACKEND", "UV_EXCLUDE_NEWER"} & sources().environment.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            """error: Failed to download `six==1.0`
              cause: Hash mismatch for `six==1.0`

                     Expected:
                       sha256:aa

                     Computed:
                       sha256:bb""",
            "The file of six==1.0 has another hash than the lock names (sha256:bb, not sha256:aa).",
        ),
        (
            """error: Request failed after 3 retries in 9s
              cause: Failed to fetch: https://me:pw@i.example/simple/six/
              cause: client error (Connect)
              cause: invalid peer certificate: UnknownIssuer""",
            "https://***@i.example/simple/six/ is not reachable (invalid peer certificate: UnknownIssuer).",
        ),
        ("error: Failed to install\n  cause: No space left on device (os error 28)", "The disk is full."),
        (
            "warning: something\nerror: No interpreter found for Python 3.12 in search path",
            "No interpreter found for Python 3.12 in search path.",
        ),
        ("error: something new\n  cause: and why", "uv failed: something new; and why."),
    ],
)
def test_a_complaint_of_uv_becomes_one_sentence(text: str, words: str):
    refusal = explain(text.splitlines(), "envs/locks/lock.txt")
    assert refusal.what == words
    assert refusal.remedy
    assert "\n" not in str(refusal)
