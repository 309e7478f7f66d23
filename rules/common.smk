# Functions only: what the rules take from the configuration. The logic is in src/draftflow/workflow.py.
import json
import os
import re
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

sys.path.insert(0, str(Path(workflow.basedir) / "src"))

from draftflow import config as configuration
from draftflow import drivers, scheduler, sources
from draftflow.errors import DraftflowError
from draftflow.processes import Process
from draftflow.stage import say
from draftflow.training.devices import process_environment
from draftflow.workflow import Workflow


def command_line():
    """Snakemake's own reading of its command line and profiles; None where it was not started by one.

    What of it concerns the execution, the workflow is told only after this file was read.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "args_to_api":
        frame = frame.f_back
    return frame and frame.f_locals["args"]


def takes_jobs_elsewhere():
    """Whether a scheduler takes the jobs to other hosts, as this Snakemake was told or was itself told by one."""
    arguments = command_line()
    if workflow.remote_exec or arguments is None:
        return workflow.remote_exec
    plugin = ExecutorPluginRegistry().get_plugin(arguments.executor)
    return not plugin.common_settings.local_exec


def before_parsing_on():
    """Mend what a killed Snakemake left here, if this one is about to run jobs."""
    arguments = command_line()
    if arguments and not (
        workflow.remote_exec or arguments.dryrun or arguments.nolock or arguments.unlock
    ):
        if mended := drivers.remove_stale_locks():
            say(mended)


def before_first_job():
    """Refuse what a job of a killed Snakemake still does, and tell the next one what this one's jobs do."""
    outputs = {}
    for job in workflow.dag.needrun_jobs():
        name = (workflow.dag.get_job_group(job) or job).name
        outputs.setdefault(name, []).extend(str(output) for output in job.output)
    executor = workflow.scheduler._executor
    try:
        drivers.require_not_submitted(outputs, scheduler.queued_jobs())
    except DraftflowError as error:
        sys.exit(f"draftflow: error: {error}")
    drivers.register(
        Process.here(), getattr(executor, "run_uuid", f"local-{os.getpid()}"), outputs
    )
    if hasattr(workflow.executor_settings, "status_command"):
        if warning := scheduler.make_jobs_visible(workflow.executor_settings):
            say(f"warning: {warning}")


def resolve():
    """The workflow of this configuration; a refusal is one line and no traceback.

    A probe only reads its own block: what else cannot be had here is no reason not to look at other machines.
    """
    try:
        flow = Workflow(
            configuration.load(config),
            Path(workflow.basedir),
            locking="lock" in sys.argv[1:],
            remote=takes_jobs_elsewhere(),
        )
        if not probing:
            flow.environments, flow.dataset_id, flow.warm_record, flow.bundle, flow.kinds
    except DraftflowError as error:
        sys.exit(f"draftflow: error: {error}")
    return flow


def code(*stages):
    """Source files of a rule's stages, as inputs: their content decides whether the rule runs again."""
    return [
        os.path.relpath(file)
        for file in sources.modules(*(f"draftflow.{stage}" for stage in stages))
    ]


def as_json(value):
    return json.dumps(value, sort_keys=True)


def log_of(stem, suffix=".log"):
    """`results/x/y` -> `logs/x/y.log`."""
    return "logs/" + str(stem).removeprefix("results/") + suffix


def benchmark_of(stem):
    return log_of(stem, ".benchmark.tsv")


def fingerprint(environment):
    return str(environment.folder / "fingerprint.json")


def of_kind(path, kind):
    """A file of a kind of node after the first, beside that of the first: `warm.json` -> `warm-KIND.json`."""
    name, _, suffix = Path(path).name.partition(".")
    return str(Path(path).with_name(f"{name}-{kind}.{suffix}"))


def of_all_kinds(path):
    """A file of the first kind of node, and those of the others."""
    return [str(path), *(of_kind(path, kind) for kind in flow.other_kinds)]


def on_kind(gpus):
    """Resources of a rule whose jobs take a node of the kind in their wildcards."""

    def asked(name):
        return lambda wildcards: flow.kinds[wildcards.kind][name]

    return {
        **flow.resources(gpus),
        **{name: asked(name) for name in flow.first_kind},
    }


def archive(environment):
    """What nodes copy an environment from, as inputs of the stages that run there. Its checksum says whether it changed."""
    if not flow.copied:
        return []
    return [ancient(str(environment.archive)), f"{environment.archive}.sha256"]


def requirements(environment):
    """What an external interpreter must have for the stages that run in it."""
    name = "train" if environment == flow.environment.id else "dataset"
    return f"{workflow.basedir}/envs/{name}.in"


def on_first_device():
    """Variables for a stage that works on one device: it sees the first that trains and no other."""
    if flow.devices.allotted and flow.devices.kind == "cuda":
        # said by the node that the stage runs on, and the same text wherever this is read
        first = '"$(cut -d, -f1 <<< "${CUDA_VISIBLE_DEVICES:-0}")"'
        return f"CUDA_VISIBLE_DEVICES={first} CUDA_DEVICE_ORDER=PCI_BUS_ID"
    visible = process_environment(flow.devices, 0)
    return " ".join(f"{name}={value}" for name, value in visible.items())


def forced(*rules):
    """Whether --forcerun names one of these rules, or everything is forced."""
    settings = workflow.dag_settings
    return settings.forceall or not settings.forcerun.isdisjoint(rules)


def cores(devices):
    """Threads of a rule that works on so many devices: all cores of this machine, or what a cluster's job asks for."""
    return flow.cores(devices) if flow.remote else lambda wildcards: workflow.cores or 1


probing = "probe" in sys.argv[1:]
before_parsing_on()
flow = resolve()

# A driver's variables must not reach the stages' interpreters; they get the package and nothing else.
os.environ["DRAFTFLOW_SRC"] = str(Path(workflow.basedir) / "src")

# A variable before the command of a stage, which then runs from its node's own copy of the environment. Not before
# those that run on the host of the workflow or for a moment, nor where the target writes responses: what a stage is
# copied from is among its inputs, and responses are not to be written anew because of it.
NODE_LOCAL = flow.config.environment.node_local
on_node = f"DRAFTFLOW_NODE_LOCAL={quote(NODE_LOCAL)}" if flow.copied else ""
if NODE_LOCAL and not flow.copied and workflow.is_main_process:
    print(
        "draftflow: environment.node_local holds for the compile cache;"
        " an external interpreter is not copied",
        file=sys.stderr,
    )

OTHER_KINDS = "|".join(map(re.escape, flow.other_kinds))

# What a stage prints is seen and kept. A signal to all processes of a job must not end this, nor the shell that waits
# for the stage, before the stage has written its last words: a scheduler ends what the shell leaves. A prefix of one's
# own replaces Snakemake's, strict mode included.
shell.prefix(
    "set -euo pipefail; trap : TERM; logged() {{ (trap '' INT TERM HUP USR1; exec tee \"$1\"); }}; "
)

# Another warning of a scheduler, which would end Snakemake, and the shell between, before the stage has answered.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)

# GPUs of this machine are counted only against a limit, and a profile or --resources may give another.
if not (
    probing
    or "gpu" in workflow.global_resources
    or flow.remote
    or flow.devices.allotted
):
    workflow.register_resource("gpu", max(1, len(flow.gpus)))
