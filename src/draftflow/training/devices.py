"""Which devices train: the config key `training.devices` against the GPUs that are there. Standard library only."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from draftflow.errors import DraftflowError

KEY = "config key training.devices"


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
    """The devices of a run, all of one kind.

    Attributes:
        kind: `cpu` or `cuda`.
        ids: GPU indices as nvidia-smi counts them; process numbers on the CPU.
        slug: the device kind as a folder name, like `cpu` or `nvidia-h200`.
    """

    kind: Literal["cpu", "cuda"]
    ids: tuple[int, ...]
    slug: str

    @property
    def count(self) -> int:
        """Number of devices, which is the number of processes."""
        return len(self.ids)


def resolve_devices(setting: Any, gpus: Sequence[Gpu]) -> Devices:
    """The devices that `training.devices` asks for.

    Args:
        setting: `auto`, `cpu`, `cpu:N`, a number of GPUs, or a list of GPU indices.
        gpus: the GPUs of this machine; those that CUDA_VISIBLE_DEVICES hides do not count.

    Raises:
        DraftflowError: no device is asked for, one does not exist or is named twice, the GPUs are of different kinds,
            or the text is none of the above.
    """
    seen = _visible(gpus)
    if setting == "auto":
        return _cuda(seen, seen) if seen else _cpu(1)
    if isinstance(setting, str):
        match = re.fullmatch(r"cpu(?::(\d+))?", setting)
        if match is None:
            raise DraftflowError(
                f"{setting!r} names no devices.", "Use auto, cpu, cpu:N, a number of GPUs or a list of GPU ids.", KEY
            )
        return _cpu(int(match[1] or 1))
    if isinstance(setting, int):
        if setting < 1:
            raise DraftflowError("There is no training on zero devices.", "Ask for one at least, or for `cpu`.", KEY)
        if setting > len(seen):
            raise DraftflowError(f"{setting} GPUs are asked for and {_there(seen)}.", _remedy(seen), KEY)
        return _cuda(seen[:setting], seen)
    ids = list(setting)
    if not ids:
        raise DraftflowError("There is no training on zero devices.", "Name one at least, or `cpu`.", KEY)
    if len(set(ids)) < len(ids):
        raise DraftflowError(f"{ids} names a GPU twice.", "Name each GPU once.", KEY)
    by_index = {gpu.index: gpu for gpu in seen}
    for index in ids:
        if index not in by_index:
            raise DraftflowError(f"GPU {index} does not exist: {_there(seen)}.", _remedy(seen), KEY)
    return _cuda([by_index[index] for index in ids], seen)


def from_settings(settings: dict[str, Any]) -> Devices:
    """The devices that the workflow resolved: the key `devices` of a stage's settings."""
    found = settings["devices"]
    return Devices(found["kind"], tuple(found["ids"]), found["slug"])


def process_environment(devices: Devices, rank: int) -> dict[str, str]:
    """Variables of the process of one device, to be set before torch is imported: it sees that device alone.

    Each process calls its GPU cuda:0, so that compiled code does not depend on the number of the device. Ids are
    nvidia-smi's, which counts along the bus; CUDA by itself counts the fastest first.
    """
    visible = str(devices.ids[rank]) if devices.kind == "cuda" else ""
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def threads_per_process(devices: Devices) -> dict[str, str]:
    """The variable that gives each process its share of the cores, or of the threads that the caller was granted."""
    granted = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return {"OMP_NUM_THREADS": str(max(1, granted // devices.count))}


def _visible(gpus: Sequence[Gpu]) -> list[Gpu]:
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


def _cpu(count: int) -> Devices:
    if count < 1:
        raise DraftflowError("There is no training on zero devices.", "Use cpu or cpu:N with N at least 1.", KEY)
    return Devices("cpu", tuple(range(count)), "cpu")


def _cuda(chosen: Sequence[Gpu], seen: Sequence[Gpu]) -> Devices:
    names = sorted({gpu.name for gpu in chosen})
    if len(names) > 1:
        raise DraftflowError(
            f"The devices are of different kinds: {', '.join(names)}.",
            f"Name devices of one kind; {_there(seen)}.",
            KEY,
        )
    slug = re.sub(r"[^a-z0-9]+", "-", names[0].lower()).strip("-")
    return Devices("cuda", tuple(gpu.index for gpu in chosen), slug)


def _there(seen: Sequence[Gpu]) -> str:
    if not seen:
        hidden = " visible (CUDA_VISIBLE_DEVICES)" if os.environ.get("CUDA_VISIBLE_DEVICES") is not None else ""
        return f"there is no GPU{hidden}"
    return "there are " + ", ".join(f"{gpu.index} ({gpu.name})" for gpu in seen)


def _remedy(seen: Sequence[Gpu]) -> str:
    return "Name GPUs that exist, or `auto`." if seen else "Use `cpu`, or look at nvidia-smi."
