"""`snakemake probe`: no environment, always anew, and a line for each host that fails."""

import json
import sys

import pytest


def hosts(**blocks):
    settings = {"hosts": blocks, "hop_seconds": 10, "trial_seconds": 0}
    return ["--config", f"probe={json.dumps(settings)}"]


def test_this_machine_is_probed_without_installing_anything_every_time(project):
    for _ in range(2):
        result = project.run("probe")
        assert result.jobs == {"probe": 1}
        assert "torch           none" in result.output
    report = json.loads((project.folder / "results/probe/here.json").read_text())
    assert report["fields"]["torch"] is None
    assert not (project.folder / "results/environments").exists()
    assert "torch           none" in (project.folder / "logs/probe.log").read_text()


def test_hosts_are_compared_and_one_that_fails_is_one_line(project):
    container = project.folder / "container"
    container.write_text('#!/bin/sh\necho "Last login: yesterday"\nexport TORCHINDUCTOR_FREEZING=1\nexec "$@"\n')
    container.chmod(0o755)
    result = project.snakemake(
        "probe",
        *hosts(
            plain={"python": sys.executable},
            inside={"container": [str(container)], "python": sys.executable},
            broken={"python": "/opt/venv/bin/python"},
        ),
    )
    assert result.code != 0
    assert "Traceback" not in result.output
    (line,) = result.errors
    assert "probe.hosts.broken: interpreter failed: there is no /opt/venv/bin/python" in line
    assert "plain and inside: TORCHINDUCTOR_FREEZING none -> 1" in result.output
    table = (project.folder / "results/probe/comparison.tsv").read_text().splitlines()
    assert table[0].split("\t") == ["field", "same", "plain", "inside"]
    assert "TORCHINDUCTOR_FREEZING\tno\tnone\t1" in table


def test_a_wrong_key_of_a_host_is_refused_before_anything_runs(project):
    result = project.snakemake("probe", *hosts(gpu1={"pyton": "x"}))
    assert result.code != 0
    (line,) = result.errors
    assert "probe.hosts.gpu1.pyton" in line
    assert "probe.hosts.gpu1.python?" in line
    assert not (project.folder / "results").exists()


@pytest.mark.parametrize(
    "block",
    [
        "torch={build: external, interpreter: no-such-python}",
        "torch={version: 2.12.0}",
        "training={devices: [5, 6, 7]}",
        "dataset={sources: [none.jsonl]}",
    ],
)
def test_what_cannot_be_built_here_is_no_reason_not_to_look_at_other_machines(project, block):
    command, blocks = hosts(there={"python": sys.executable})
    assert "torch           none" in project.run("probe", command, blocks, block).output
