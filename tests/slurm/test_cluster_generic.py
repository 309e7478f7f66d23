"""profiles/cluster-generic with a submit command that only runs the job's script, beside Snakemake."""

import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

# prints an id, as qsub does; what is appended is the script
SUBMIT = "sh -c " + shlex.quote('setsid sh "$0" > /dev/null 2>&1 & echo $!')


def test_a_dataset_is_made_by_jobs_that_any_command_submits(tiny_folder, shared_project):
    folder, files = tiny_folder
    profile = yaml.safe_load((ROOT / "profiles/cluster-generic/config.yaml").read_text())
    assert "qsub" in profile["cluster-generic-submit-cmd"]
    profile |= {"cluster-generic-submit-cmd": SUBMIT, "latency-wait": 10}
    (folder / "profile-generic").mkdir()
    (folder / "profile-generic/config.yaml").write_text(yaml.safe_dump(profile))
    project = type(shared_project)(folder)
    result = project.run(
        "dataset",
        "--profile",
        "profile-generic",
        *files,
        "--config",
        "dataset={sources: [given.jsonl], responses: given}",
        timeout=900,
    )
    assert result.output.count("with external jobid") == 1  # read_conversations and pack_rows share it
