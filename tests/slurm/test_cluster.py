"""What the other tests stand on: the cluster hands out pretended GPUs, and ends what it started."""

import cluster
import pytest


@pytest.fixture
def passing(tmp_path):
    """A cluster that goes down within the test."""
    brought_up = cluster.bring_up(tmp_path, accounting=False, kill_wait=2)
    yield next(brought_up), lambda: next(brought_up, None)
    brought_up.close()


def test_jobs_get_gpus_of_their_own_and_none_of_them_outlives_the_cluster(passing):
    slurm, bring_down = passing
    job = "trap '' TERM; echo $SLURMD_NODENAME:$CUDA_VISIBLE_DEVICES > {}; sleep 600"
    files = [slurm.folder / name for name in ("a", "b", "c", "d")]
    for file in files:
        slurm.run("sbatch", "--gpus=1", "--ntasks=1", "--mem=100", f"--wrap={job.format(file)}")
    slurm.wait(lambda: all(file.exists() and file.read_text() for file in files), "start of all jobs")
    assert sorted(file.read_text().strip() for file in files) == ["node1:0", "node1:1", "node2:0", "node2:1"]
    assert slurm.left_over()
    bring_down()
    assert not slurm.left_over()


def test_jobs_of_a_node_that_dies_are_in_the_queue_again_and_none_was_seen_to_fail(passing):
    slurm, _ = passing
    started = slurm.folder / "started"
    shell = "for _ in 1 2 3 4 5 6 7 8; do sleep 600 & done; srun sleep 600 & touch {}-$SLURM_JOB_ID; wait"
    jobs = [
        slurm.run(
            "sbatch", "--parsable", "--requeue", "--nodelist=node1", "--mem=100", f"--wrap={shell.format(started)}"
        ).strip()
        for _ in range(4)
    ]
    slurm.wait(lambda: all(slurm.folder.joinpath(f"started-{job}").exists() for job in jobs), "start of all jobs")
    slurm.lose("node1")
    slurm.wait(lambda: sorted(slurm.jobs()) == sorted([job, "PENDING", "(null)"] for job in jobs), "jobs in the queue")
    slurm.bring_back("node1")
