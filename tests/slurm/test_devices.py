"""Which of the GPUs that Slurm hands out each process of a stage sees."""

import json
import sys

WALK = """
import json
from draftflow.training.devices import process_environment, resolve_devices
devices = resolve_devices({"nodes": 1, "per_node": 2}, [])
print(json.dumps([process_environment(devices, place)["CUDA_VISIBLE_DEVICES"] for place in range(devices.count)]))
"""


def test_the_walk_over_devices_takes_those_of_the_allocation_in_order(slurm_without_accounting):
    slurm = slurm_without_accounting
    slurm.run("sbatch", "--gpus=1", "--ntasks=1", "--mem=100", "--nodelist=node1", "--wrap=sleep 600")
    slurm.wait(lambda: [job[1] for job in slurm.jobs()] == ["RUNNING"], "a job that holds the first GPU")
    two = ["srun", "--quiet", "--gpus=2", "--nodes=1", "--ntasks=1", "--mem=200", "--nodelist=node1"]
    try:
        assert slurm.run(*two, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").strip() == "1,2"
        assert json.loads(slurm.run(*two, sys.executable, "-c", WALK)) == ["1", "2"]
    finally:
        slurm.run("scancel", "--user=root")
        slurm.wait(lambda: not slurm.jobs(), "end of the job", 300)
