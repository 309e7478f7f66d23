"""The clusters of these tests, and the folder with a tiny target that they share."""

import os

import cluster
import pytest


def bring_up(folder, **settings):
    """A running cluster; where there can be none the test is skipped, and under .ci/run it fails."""
    if lacking := cluster.missing(settings.get("accounting", True)):
        reason = f"the workflow on Slurm is not tested: no {', '.join(lacking)}"
        if os.environ.get("DRAFTFLOW_CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with cluster.running(folder, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Two nodes of two GPUs, with accounting."""
    yield from bring_up(tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="module")
def slurm_without_accounting(tmp_path_factory):
    """As `slurm`, without accounting."""
    yield from bring_up(tmp_path_factory.mktemp("slurm"), accounting=False)
