"""Which torch is which CUDA, which driver that needs, and which build the configuration therefore means.

Read while the Snakefile is parsed: standard library only.
"""

import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from draftflow.errors import DraftflowError

PYTORCH_INDEX = "https://download.pytorch.org/whl"

# What a lock covers.
PYTHONS = ("3.11", "3.12", "3.13")

# Build -> CUDA as torch.version.cuda says it. Newest first: that is the order of preference on a GPU.
CUDA: dict[str, str | None] = {"cu130": "13.0", "cu128": "12.8", "cu126": "12.6", "cpu": None}

# Least Linux driver of a CUDA major version (NVIDIA's table of minor version compatibility: a driver of the same
# major version runs every build of it).
LEAST_DRIVER = {"12": "525.60.13", "13": "580.65.06"}

# Torch minor version -> its one build on PyPI for Linux x86-64.
PYPI = {"2.10": "cu128", "2.11": "cu130", "2.12": "cu130", "2.13": "cu130", "2.14": "cu130"}


@dataclass(frozen=True)
class Choice:
    """A torch build: `version` as 2.11.0, `build` a key of CUDA or "external", `kind` of index that its lock is for."""

    version: str
    build: str
    kind: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it; `memory_mib` is 0 where the memory is the host's."""

    index: int
    name: str
    uuid: str
    memory_mib: int
    driver: str
    compute_capability: str

    @property
    def capability(self) -> tuple[int, ...]:
        """The compute capability in numbers; none where nvidia-smi does not say it."""
        return _numbers(self.compute_capability)


def detect_gpus() -> list[Gpu]:
    """The GPUs of this machine, [] where there is none.

    Raises:
        DraftflowError: there is an NVIDIA driver, but it does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    query = "index,name,uuid,memory.total,driver_version,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode in (6, 9, 12):  # no device, no driver loaded, no driver library: a host without GPUs
        return []
    if answer.returncode:
        reason = next(iter((answer.stdout + answer.stderr).strip().splitlines()), f"status {answer.returncode}")
        raise DraftflowError(
            f"The NVIDIA driver does not answer: {reason}.",
            "Make `nvidia-smi` work (a reboot after a driver update, a driver of 525.60.13 or newer).",
            "nvidia-smi",
        )
    gpus = []
    for line in answer.stdout.strip().splitlines():
        index, name, uuid, memory, driver, capability = [field.strip() for field in line.split(",")]
        gpus.append(Gpu(int(index), name, uuid, int(memory) if memory.isdigit() else 0, driver, capability))
    return gpus


def choose(version: str, build: str, index: str, gpus: list[Gpu]) -> Choice:
    """The build that `torch.version`, `torch.build` and `torch.index` mean on a machine with these GPUs.

    Without a GPU `auto` is what PyPI carries for the version (or the nearest that the index has); with GPUs the newest
    CUDA that the index carries and the driver runs. `index: auto` is PyPI if it has such a build, else PyTorch's.

    Raises:
        DraftflowError: no such build exists, or the driver cannot run it; the remedy names what is possible.
    """
    if build == "external":
        return Choice(version, build, build)
    offered = _offered(version, index)
    wanted = [choice for choice in offered if build in ("auto", choice.build)]
    if not wanted:
        carried = ", ".join(sorted({choice.build for choice in offered})) or "nothing that draftflow knows"
        where = {"pypi": "PyPI", "auto": "PyPI", "pytorch": PYTORCH_INDEX}.get(index, index)
        asked = f"torch {version}" if build == "auto" else f"torch {version} as {build}"
        raise DraftflowError(f"{where} has no {asked}; it has {carried}.", _possible(version, build, gpus), "torch")
    if not gpus:
        usual = PYPI.get(_minor(version))
        return min(wanted, key=lambda choice: (choice.build != usual, choice.build != "cpu"))
    # A CPU build on a GPU machine is only taken where it is asked for or the index has no other.
    cuda = [choice for choice in wanted if choice.build != "cpu"] or wanted
    runs = [choice for choice in cuda if drives(gpus, choice.build)]
    if not runs:
        raise driver_too_old(version, cuda[0].build, gpus)
    return runs[0]


def drives(gpus: list[Gpu], build: str) -> bool:
    """Whether the driver of every GPU runs this build."""
    return all(_numbers(gpu.driver) >= _numbers(least_driver(build)) for gpu in gpus)


def driver_too_old(version: str, build: str, gpus: list[Gpu]) -> DraftflowError:
    """The refusal of a build that the driver cannot run, with the builds that it can."""
    return DraftflowError(
        f"torch {version} as {build} needs an NVIDIA driver of {least_driver(build)} or newer; "
        f"this machine's is {gpus[0].driver}.",
        _possible(version, build, gpus),
        "torch.build",
    )


def least_driver(build: str) -> str:
    """Least driver version of a build; "0" for CPU builds."""
    cuda = re.fullmatch(r"cu(\d+)\d", build)
    return LEAST_DRIVER[cuda[1]] if cuda else "0"


def torch_source(choice: Choice, index: str) -> str | None:
    """Where torch itself comes from: a PEP 503 index URL, an absolute folder, or None for PyPI (as everything else)."""
    if choice.kind == "pypi":
        return None
    folder = _folder(index)
    if folder is not None:
        return str(folder.resolve())
    base = PYTORCH_INDEX if choice.kind == "pytorch" else index.rstrip("/")
    return f"{base}/{choice.build}"


def torch_requirement(choice: Choice, index: str) -> str:
    """The torch of this choice as a requirement that only its own build satisfies, `torch===2.11.0+cu128`.

    Three equals signs: `==2.11.0` would be satisfied by 2.11.0+cpu as well.
    """
    folder = None if choice.kind == "pypi" else _folder(index)
    if folder is not None:
        return f"torch==={_wheels(folder, choice.version)[choice.build]}"
    return f"torch==={choice.version}" + ("" if choice.kind == "pypi" else f"+{choice.build}")


def _offered(version: str, index: str) -> list[Choice]:
    """What the index carries, in order of preference."""
    usual = PYPI.get(_minor(version))
    on_pypi = [Choice(version, usual, "pypi")] if usual else []
    if index == "pypi":
        return on_pypi
    on_pytorch = [Choice(version, build, "pytorch") for build in CUDA]
    if index in ("auto", "pytorch"):
        # A version that nobody knows is asked of PyTorch's index only by name: `auto` would hide a typing error.
        return on_pytorch if index == "pytorch" else on_pypi and on_pypi + on_pytorch
    kind = "index-" + hashlib.sha256(index.rstrip("/").encode()).hexdigest()[:8]
    folder = _folder(index)
    carried = CUDA if folder is None else [build for build in CUDA if build in _wheels(folder, version)]
    return [Choice(version, build, kind) for build in carried]


def _folder(index: str) -> Path | None:
    """`index` as a folder of wheels, None if it is the name or the URL of an index."""
    if index in ("auto", "pypi", "pytorch") or re.match(r"https?://", index):
        return None
    folder = Path(index.removeprefix("file://")).expanduser()
    if not folder.is_dir():
        raise DraftflowError(
            f"{index!r} is neither auto, pypi, pytorch, an http(s) URL nor a folder that exists.",
            "Name one of these.",
            "torch.index",
        )
    return folder


def _wheels(folder: Path, version: str) -> dict[str, str]:
    """Build -> full version of the torch wheels of this version in a folder."""
    found = {}
    for wheel in folder.glob("torch-*.whl"):
        full = unquote(wheel.name).split("-")[1]
        public, _, local = full.partition("+")
        if public == version and wheel.name.endswith(("x86_64.whl", "any.whl")):
            found[local or PYPI.get(_minor(version), "unknown")] = full
    return found


def _possible(version: str, build: str, gpus: list[Gpu]) -> str:
    """A sentence of what can be had instead: other builds of this version, and versions of this build on PyPI."""
    builds = [name for name in CUDA if drives(gpus, name)]
    usual = PYPI.get(_minor(version))
    ways = [f"torch.build: {usual} (index: pypi)"] if usual in builds else []
    if usual or build != "auto":
        ways.append(f"torch.index: pytorch with build {' | '.join(builds)}")
    on_pypi = []
    for name in builds:
        minors = [minor for minor, carried in PYPI.items() if carried == name]
        if minors:
            on_pypi.append(f"{' to '.join(dict.fromkeys([minors[0], minors[-1]]))} as {name}")
    if on_pypi:
        ways.append(f"PyPI's torch {', '.join(on_pypi)}")
    machine = f" with driver {gpus[0].driver}" if gpus else ""
    return f"Possible{machine}: {'; '.join(ways)}."


def _minor(version: str) -> str:
    return version.rpartition(".")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
