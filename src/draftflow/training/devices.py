"""Which devices train: the config key `training.devices` against the GPUs that are there. Standard library only."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from draftflow.errors import DraftflowError

KEY = "config key training.devices"

Role = Literal["drafter", "target", "drafter and target"]


class Gpu(Protocol):
    """What is read of a GPU: see `environment.builds.Gpu`."""

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def uuid(self) -> str: ...


@dataclass(frozen=True)
class Devices:
    """The devices of a run, GPUs or the CPU. Each has a process; those that train are ranks 0 to `count` - 1.

    Attributes:
        kind: `cpu` or `cuda`.
        ids: of the devices of a node that train: GPU indices as nvidia-smi counts them; process numbers on the CPU.
        slug: the device kind, or kinds, as a folder name, like `cpu` or `nvidia-h200`.
        target_ids: of the devices that only run the target (split topology); empty where those that train do both.
        nodes: number of nodes, each with devices of these ids; one in the split topology.
        allotted: whether a scheduler hands out the devices of a node: ids are positions among them.
    """

    kind: Literal["cpu", "cuda"]
    ids: tuple[int, ...]
    slug: str
    target_ids: tuple[int, ...] = ()
    nodes: int = 1
    allotted: bool = False

    @property
    def count(self) -> int:
        """Number of devices that train, on all nodes: the world size of a plan."""
        return len(self.ids) * self.nodes

    @property
    def per_node(self) -> int:
        """Number of processes on a node, of both roles."""
        return len(self.ids) + len(self.target_ids)

    @property
    def processes(self) -> int:
        """Number of processes, of both roles, on all nodes."""
        return self.per_node * self.nodes

    @property
    def gpus(self) -> int:
        """Number of GPUs of a node; one that has both roles counts once."""
        return len({*self.ids, *self.target_ids}) if self.kind == "cuda" else 0

    @property
    def split(self) -> bool:
        """Whether drafter and target are trained and run by processes of their own."""
        return bool(self.target_ids)

    @property
    def shared(self) -> bool:
        """Whether a GPU has both roles, in two processes."""
        return self.kind == "cuda" and not set(self.ids).isdisjoint(self.target_ids)

    def role(self, rank: int) -> Role:
        """What the process of `rank` does."""
        if not self.split:
            return "drafter and target"
        return "drafter" if rank < self.count else "target"

    def process(self, rank: int) -> str:
        """The process of `rank`, in words."""
        return (
            f"The {self.role(rank)} process of rank {rank} ({self.name(rank)})" if self.split else "A training process"
        )

    def name(self, rank: int) -> str:
        """The device of `rank` on its node, as in `cuda:5`."""
        return f"cuda:{(*self.ids, *self.target_ids)[rank % self.per_node]}" if self.kind == "cuda" else "cpu"

    def node(self, rank: int) -> int:
        """Number of the node on which `rank` runs: ranks are counted node by node."""
        return rank // self.per_node

    def topology(self, hosts: Sequence[str]) -> dict[str, Any]:
        """Kind of the topology, number of nodes, and role, device and host of every rank, for records.

        Args:
            hosts: name of the host of every node.
        """
        ranks = [
            {"rank": rank, "role": self.role(rank), "device": self.name(rank), "host": hosts[self.node(rank)]}
            for rank in range(self.processes)
        ]
        return {"kind": "split" if self.split else "colocated", "nodes": self.nodes, "ranks": ranks}


def resolve_devices(setting: Any, gpus: Sequence[Gpu], gpu_model: str | None = None) -> Devices:
    """The devices that `training.devices` asks for.

    Args:
        setting: `auto`, `cpu`, `cpu:N`, a number of GPUs, or a list of GPU indices. Or a mapping with the keys `target`
            and `drafter`, each `cpu`, `cpu:N` or a list: the split topology. Or one with the keys `nodes` and
            `per_node`, which is a number of GPUs, `cpu` or `cpu:N`: what a scheduler hands out, on other machines.
        gpus: the GPUs of this machine; those that CUDA_VISIBLE_DEVICES hides do not count.
        gpu_model: of the GPUs that a scheduler hands out.

    Raises:
        DraftflowError: no device is asked for, one does not exist or is named twice (in a role), devices that are not
            named are of different kinds, or the text is none of the above.
    """
    if isinstance(setting, Mapping) and "nodes" in setting:
        return _allotted(setting, gpu_model)
    seen = visible_gpus(gpus)
    if isinstance(setting, Mapping):
        return _split(setting, seen)
    if setting == "auto":
        return _cuda(seen, seen, named=False) if seen else _cpu(1)
    if isinstance(setting, str):
        return _cpu(_processes(setting, "Use auto, cpu, cpu:N, a number of GPUs or a list of GPU ids.", KEY))
    if isinstance(setting, int):
        if setting < 1:
            raise DraftflowError("There is no training on zero devices.", "Ask for one at least, or for `cpu`.", KEY)
        if setting > len(seen):
            raise DraftflowError(f"{setting} GPUs are asked for and {_there(seen)}.", _remedy(seen), KEY)
        return _cuda(seen[:setting], seen, named=False)
    return _cuda(_listed(setting, seen, KEY), seen, named=True)


def require_same_on_all_hosts(setting: Any) -> None:
    """Refuse a `training.devices` that means something else on every host: one that looks at the GPUs that are there.

    Raises:
        DraftflowError: it is `auto`, a number, or has a list of ids.
    """
    values = setting.values() if isinstance(setting, Mapping) else [setting]
    named = isinstance(setting, Mapping) and "nodes" in setting
    if not named and any(value == "auto" or not isinstance(value, str) for value in values):
        raise DraftflowError(
            f"{setting!r} depends on the GPUs of the host that reads it, and on a cluster that is not the one that "
            "trains.",
            "Say what the scheduler is to give: {nodes: 1, per_node: 8} for 8 GPUs, or cpu or cpu:N.",
            KEY,
        )


def check_depth(devices: Devices, depth: int) -> None:
    """Refuse buffers that are too few for all target devices to work at a time: one of `depth` per drafter device each.

    Raises:
        DraftflowError: some target devices would always wait.
    """
    if len(devices.target_ids) > devices.count * depth:
        least = -(-len(devices.target_ids) // devices.count)
        raise DraftflowError(
            f"{len(devices.target_ids)} target devices never work at a time: {devices.count} drafter devices have room "
            f"for {depth} batches each.",
            f"Use {least}, or fewer target devices.",
            "config key training.stream_depth",
        )


def from_settings(settings: dict[str, Any]) -> Devices:
    """The devices that the workflow resolved: the key `devices` of a stage's settings."""
    found = settings["devices"]
    ids = {name: tuple(found.get(name, ())) for name in ("ids", "target_ids")}
    nodes, allotted = found.get("nodes", 1), found.get("allotted", False)
    return Devices(found["kind"], slug=found["slug"], nodes=nodes, allotted=allotted, **ids)


def process_environment(devices: Devices, place: int) -> dict[str, str]:
    """Variables of a process, to be set before torch is imported: it sees its device alone.

    Each process calls its GPU cuda:0, so that compiled code does not depend on the number of the device. Ids are
    nvidia-smi's, which counts along the bus; CUDA by itself counts the fastest first. Where a scheduler hands out the
    devices, they are those of this process's own CUDA_VISIBLE_DEVICES, or if it set none, the first of the node.

    Args:
        devices: of the run.
        place: of the process on its node; its rank where there is one node.

    Raises:
        DraftflowError: the scheduler allotted fewer GPUs than that.
    """
    visible = str((*devices.ids, *devices.target_ids)[place]) if devices.kind == "cuda" else ""
    if devices.allotted and visible and (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        entries = [entry for entry in given.split(",") if entry]
        if place >= len(entries):
            raise DraftflowError(
                f"{len(entries)} of {devices.per_node} GPUs per node are allotted (CUDA_VISIBLE_DEVICES={given}).",
                "Ask the scheduler for that many on each node, or for fewer here.",
                KEY,
            )
        visible = entries[int(visible)]
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def threads_per_process(devices: Devices) -> dict[str, str]:
    """The variable that gives each process its share of the cores, or of the threads that the caller was granted."""
    granted = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return {"OMP_NUM_THREADS": str(max(1, granted // devices.per_node))}


def visible_gpus(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; CUDA stops reading at the first entry that it does not know."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in setting.split(","):
        match = [gpu for gpu in gpus if entry == str(gpu.index) or (entry and gpu.uuid.startswith(entry))]
        if not match:
            break
        found.append(match[0])
    return found


def _allotted(setting: Mapping[str, Any], gpu_model: str | None) -> Devices:
    """Devices on nodes of a scheduler; none is looked for, since this machine need not be one of them."""
    nodes, each = setting["nodes"], setting["per_node"]
    if isinstance(each, str):
        count = _processes(each, "Use a number of GPUs, cpu or cpu:N.", f"{KEY}.per_node")
        return Devices("cpu", tuple(range(count)), "cpu", nodes=nodes, allotted=True)
    if each < 1:
        raise DraftflowError(
            "There is no training on zero devices.", "Ask for one at least, or for `cpu`.", f"{KEY}.per_node"
        )
    slug = _slug(gpu_model or "") or "cuda"
    return Devices("cuda", tuple(range(each)), slug, nodes=nodes, allotted=True)


def _split(setting: Mapping[str, Any], seen: Sequence[Gpu]) -> Devices:
    """The devices of both roles."""
    remedy = "Use a list of GPU ids for target and drafter, or cpu or cpu:N for both."
    on_cpu = {role: isinstance(value, str) for role, value in setting.items()}
    if on_cpu["target"] != on_cpu["drafter"]:
        raise DraftflowError("One role is on GPUs and the other on the CPU.", remedy, KEY)
    where = {role: f"{KEY}.{role}" for role in setting}
    if on_cpu["target"]:
        counts = {role: _processes(value, remedy, where[role]) for role, value in setting.items()}
        ids = tuple(range(sum(counts.values())))
        return Devices("cpu", ids[: counts["drafter"]], "cpu", ids[counts["drafter"] :])
    gpus = {role: _listed(value, seen, where[role]) for role, value in setting.items()}
    both = _cuda([*gpus["drafter"], *gpus["target"]], seen, named=True)
    count = len(gpus["drafter"])
    return Devices("cuda", both.ids[:count], both.slug, both.ids[count:])


def _processes(setting: str, remedy: str, where: str) -> int:
    """The number of processes that `cpu` or `cpu:N` asks for."""
    match = re.fullmatch(r"cpu(?::(\d+))?", setting)
    if match is None:
        raise DraftflowError(f"{setting!r} names no devices.", remedy, where)
    count = int(match[1] or 1)
    if count < 1:
        raise DraftflowError("There is no training on zero devices.", "Use cpu or cpu:N with N at least 1.", where)
    return count


def _listed(ids: Sequence[int], seen: Sequence[Gpu], where: str) -> list[Gpu]:
    """The GPUs of a list of indices."""
    if not ids:
        raise DraftflowError("There is no training on zero devices.", "Name one at least, or `cpu`.", where)
    if len(set(ids)) < len(ids):
        raise DraftflowError(f"{list(ids)} names a GPU twice.", "Name each GPU once.", where)
    by_index = {gpu.index: gpu for gpu in seen}
    for index in ids:
        if index not in by_index:
            raise DraftflowError(f"GPU {index} does not exist: {_there(seen)}.", _remedy(seen), where)
    return [by_index[index] for index in ids]


def _cpu(count: int) -> Devices:
    return Devices("cpu", tuple(range(count)), "cpu")


def _cuda(chosen: Sequence[Gpu], seen: Sequence[Gpu], named: bool) -> Devices:
    """GPUs of several models only where each was named: `auto` is not to take a display's along."""
    names = sorted({gpu.name for gpu in chosen})
    if len(names) > 1 and not named:
        raise DraftflowError(
            f"The devices are of different kinds: {', '.join(names)}.",
            f"Name those that are meant by their ids; {_there(seen)}.",
            KEY,
        )
    return Devices("cuda", tuple(gpu.index for gpu in chosen), "-and-".join(map(_slug, names)))


def _slug(name: str) -> str:
    """A kind of GPU as the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _there(seen: Sequence[Gpu]) -> str:
    if not seen:
        hidden = " visible (CUDA_VISIBLE_DEVICES)" if os.environ.get("CUDA_VISIBLE_DEVICES") is not None else ""
        return f"there is no GPU{hidden}"
    return "there are " + ", ".join(f"{gpu.index} ({gpu.name})" for gpu in seen)


def _remedy(seen: Sequence[Gpu]) -> str:
    return "Name GPUs that exist, or `auto`." if seen else "Use `cpu`, or look at nvidia-smi."
