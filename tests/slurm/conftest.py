"""The clusters of these tests, and the folder with a tiny target that they share."""

import cluster
import pytest


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Two nodes of two GPUs, with accounting."""
    yield from cluster.bring_up(tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="module")
def slurm_without_accounting(tmp_path_factory):
    """As `slurm`, without accounting."""
    yield from cluster.bring_up(tmp_path_factory.mktemp("slurm"), accounting=False)
