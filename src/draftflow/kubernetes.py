"""Jobs of a workflow as Kubernetes jobs, through `kubectl`; for profiles/kubernetes. Standard library only.

    python -m draftflow.kubernetes submit --image IMAGE --claim CLAIM --mount FOLDER ... SCRIPT    prints the job's name
    python -m draftflow.kubernetes status NAME                      prints running, success or failed

A pod has the volume of the claim where this host has it, so that the script, the project and its results are at the
same paths, and nothing is copied. The volume must be one that several nodes mount (ReadWriteMany).
"""

import argparse
import json
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from draftflow.errors import DraftflowError
from draftflow.stage import run_stage

# What training may take to write a checkpoint after it was told to end, in seconds
GRACE_SECONDS = 180

# The first process of a container, which alone is told that the pod shall end, and which no signal ends that it does
# not expect. It hands on the one on which training writes its checkpoint, and which all else ignores.
# A signal ends `wait`, which then has to be asked again for how the script ended; asked once too often it says 127.
FIRST = """\
trap 'told=yes; kill -USR1 -1' TERM
(trap '' USR1; exec sh "$0") &
status=127
while
    told=
    wait $!; found=$?
    [ $found -eq 127 ] || status=$found
    [ "$told" ] && [ $found -gt 128 ]
do :; done
exit $status
"""


def job(arguments: argparse.Namespace) -> dict[str, Any]:
    """The manifest of a job that runs a script.

    Args:
        arguments: of `submit`.

    Raises:
        DraftflowError: the script is not on the volume, or several nodes are asked for.
    """
    script, mount = arguments.script.resolve(), arguments.mount.resolve()
    for path in (script, Path.cwd()):
        if not path.is_relative_to(mount):
            raise DraftflowError(
                f"{path} is not below {mount}, so that no pod sees it.",
                "Put the project on the volume, and give --mount the folder where this host has it.",
                "profiles/kubernetes",
            )
    if arguments.nodes > 1:
        raise DraftflowError(
            f"A job of {arguments.nodes} nodes is asked for, and a pod has one.",
            "Set training.devices: {nodes: 1, per_node: N}.",
            "profiles/kubernetes",
        )
    wanted = {"cpu": str(arguments.cpus), "memory": f"{arguments.memory_mb}M"}
    if arguments.gpus:
        wanted["nvidia.com/gpu"] = str(arguments.gpus)
    container = {
        "name": "stage",
        "image": arguments.image,
        "command": ["sh", "-c", FIRST, str(script)],
        "workingDir": str(Path.cwd()),
        "resources": {"requests": wanted, "limits": wanted},
        # processes of one training exchange data through shared memory, of which a container has 64 MB by itself
        "volumeMounts": [{"name": "project", "mountPath": str(mount)}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "activeDeadlineSeconds": arguments.minutes * 60,  # of the pod: a job's would count the wait for a node
        "containers": [container],
        "volumes": [
            {"name": "project", "persistentVolumeClaim": {"claimName": arguments.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if arguments.gpus and arguments.gpu_product:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": arguments.gpu_product}
    labels = {"app": "draftflow"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"draftflow-{uuid.uuid4().hex[:12]}", "labels": labels},
        "spec": {
            "backoffLimit": 0,  # Snakemake submits again
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def state(told: dict[str, Any]) -> str:
    """`running`, `success` or `failed`, from what Kubernetes tells of a job: its object, as JSON."""
    conditions = told.get("status", {}).get("conditions", [])
    held = {condition["type"] for condition in conditions if condition.get("status") == "True"}
    if "Complete" in held:
        return "success"
    return "failed" if "Failed" in held else "running"


def ask(name: str) -> str:
    """The state of the job `name`: failed if it was removed, running as long as the cluster does not answer.

    Raises:
        DraftflowError: there is no kubectl.
    """
    try:
        told = kubectl("get", "job", name, "--ignore-not-found", "--output=json")
    except DraftflowError as error:
        if shutil.which("kubectl") is None:
            raise
        print(f"draftflow: {error}", file=sys.stderr)  # a failure of this command would end the workflow
        return "running"
    return state(json.loads(told)) if told.strip() else "failed"


def kubectl(*arguments: str, given: str | None = None) -> str:
    """What `kubectl` answers.

    Raises:
        DraftflowError: it is not installed, or refuses.
    """
    try:
        done = subprocess.run(["kubectl", *arguments], input=given, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise DraftflowError("There is no kubectl here.", "Install it, or add it to PATH.", "kubectl") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise DraftflowError(f"{said[-1].rstrip('.')}.", "See that `kubectl get jobs` works here.", "kubectl")
    return done.stdout


def main() -> None:
    """Submit a script, or ask for the state of a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    submit = commands.add_parser("submit", help="submit a script as a job; prints its name")
    submit.add_argument("--image", required=True, help="of the container: any with the Python that runs Snakemake")
    submit.add_argument("--claim", required=True, help="name of the PersistentVolumeClaim")
    submit.add_argument("--mount", type=Path, required=True, help="where its volume is, here and in the pods")
    submit.add_argument("--gpu-product", help="only nodes whose label nvidia.com/gpu.product is this")
    submit.add_argument("--gpus", type=int, default=0)
    submit.add_argument("--nodes", type=int, default=1)
    submit.add_argument("--cpus", type=int, default=1)
    submit.add_argument("--memory-mb", type=int, required=True)
    submit.add_argument("--minutes", type=int, required=True)
    submit.add_argument("script", type=Path)
    status = commands.add_parser("status", help="print running, success or failed")
    status.add_argument("name", help="as printed by submit")
    arguments = parser.parse_args()
    if arguments.command == "status":
        print(ask(arguments.name))
        return
    manifest = job(arguments)
    kubectl("create", "--filename=-", given=json.dumps(manifest))
    print(manifest["metadata"]["name"])


if __name__ == "__main__":
    run_stage(main)
