"""Stage: what an environment is, on this machine, in three parts, each with a digest.

compile      what makes a compiled kernel stale: torch, CUDA, triton, GPU, driver, compiler, Inductor's settings
numbers      what can change a result: all of that, libraries, every package, precision switches, number of devices
information  what only helps to understand: host, CPU, time, who, state of the project

A stage that runs later or elsewhere calls `require_same` before it starts. Runs in the torch environment.
"""

import ctypes
import getpass
import hashlib
import json
import locale
import os
import platform
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from draftflow.environment import record as records
from draftflow.environment.builds import detect_gpus, driver_too_old, drives
from draftflow.errors import DraftflowError
from draftflow.stage import Record, run_stage, say, stage_parser

# Settings that change speed of compilation or its log, not what is compiled.
_HARMLESS = ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_WORKER_START", "TRITON_PRINT_AUTOTUNING")

_PRECISION = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")


def take(install_record: dict[str, Any]) -> dict[str, Any]:
    """The fingerprint of this process: {"compile", "numbers", "information"}, each {"digest", "fields"}.

    Args:
        install_record: `install.json`; which packages count is taken from it, their state from what is there now.
    """
    compile_fields, number_fields = _compile_fields(), _number_fields(install_record)
    return {
        "compile": {"digest": _digest(compile_fields), "fields": compile_fields},
        "numbers": {"digest": _digest({**compile_fields, **number_fields}), "fields": number_fields},
        "information": _with_digest(_information()),
    }


def differences(recorded: dict[str, Any], current: dict[str, Any], part: str) -> list[str]:
    """What differs in one part of two fingerprints, in words: "torch git 70d99e9 -> 449b176".

    A process need not see all the GPUs that were recorded, but none of another kind.
    """
    before, now = recorded[part]["fields"], current[part]["fields"]
    found = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, list) and isinstance(new, list):
            other = [item for item in new if item not in old]
            if other:
                found.append(f"{name} {_words(old)} -> {_words(other)}")
        elif old != new:
            found.append(f"{name} {_words(old)} -> {_words(new)}")
    return found


def require_same(recorded_path: Path, parts: tuple[str, ...] = ("compile",)) -> None:
    """See that this process runs in what `fingerprint.json` recorded; `install.json` lies beside it.

    Raises:
        DraftflowError: naming each field that differs.
    """
    recorded = json.loads(recorded_path.read_text())
    current = take(json.loads((recorded_path.parent / "install.json").read_text()))
    found = [difference for part in parts for difference in differences(recorded, current, part)]
    if found:
        raise DraftflowError(
            f"This is not what was fingerprinted: {'; '.join(found)}.",
            "Restore it, or run `snakemake --forcerun fingerprint`, which also compiles anew.",
            str(recorded_path),
        )


def _compile_fields() -> dict[str, Any]:
    import torch

    fields: dict[str, Any] = {
        "torch": torch.__version__,
        "torch git": torch.version.git_version,
        "torch CUDA": torch.version.cuda,
        "triton": records.packages(["triton"]).get("triton", {}).get("version"),
        "Python": ".".join(map(str, sys.version_info[:2])),
        "GPUs": sorted({_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())}),
        "driver": _driver(),
        "CUDA driver": _cuda_driver(),
        "C++ compiler": _compiler(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }
    for name, value in sorted(os.environ.items()):
        is_path = os.sep in value or name.endswith(("_DIR", "_PATH", "_HOME"))
        if name.startswith(("TORCHINDUCTOR_", "TRITON_")) and not is_path and name not in _HARMLESS:
            fields[name] = value
    return fields


def _number_fields(install_record: dict[str, Any]) -> dict[str, Any]:
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    fields: dict[str, Any] = {
        "cuDNN": cudnn.version(),
        "cuBLAS": _cublas(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "devices": torch.cuda.device_count(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "TF32 in matmul": matmul.allow_tf32,
        "TF32 in cuDNN": cudnn.allow_tf32,
        "bf16 reductions": matmul.allow_bf16_reduced_precision_reduction,
        "fp16 reductions": matmul.allow_fp16_reduced_precision_reduction,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cuDNN benchmark": cudnn.benchmark,
    }
    fields |= {name: os.environ[name] for name in _PRECISION if name in os.environ}
    for name, facts in records.packages(list(install_record["packages"])).items():
        fields[name] = f"{facts['version']} ({facts['record']})"
    return fields


def _information() -> dict[str, Any]:
    def first(path: str, key: str) -> str | None:
        lines = Path(path).read_text().splitlines() if Path(path).exists() else []
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container with a user id and no name
        user = str(os.getuid())
    project = Path(__file__).resolve().parents[3]
    return {
        "host": platform.node(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME") if Path("/etc/os-release").exists() else None,
        "kernel": platform.release(),
        "CPU": first("/proc/cpuinfo", "model name"),
        "CPU cores": len(os.sched_getaffinity(0)),
        "memory": first("/proc/meminfo", "MemTotal"),
        "Python": platform.python_version(),
        "environment": sys.prefix,
        "locale": ".".join(part or "?" for part in locale.getlocale()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "user": user,
        "project": _line("git", "-C", str(project), "describe", "--always", "--dirty", "--abbrev=40"),
    }


def _gpu(properties: Any) -> str:
    """Name, capability, multiprocessors and memory class (whole GiB): what kernels are built and tuned for."""
    gib = round(properties.total_memory / 2**30)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, capability {capability}, {properties.multi_processor_count} SMs, {gib} GiB"


def _driver() -> str | None:
    """Version of the kernel driver."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else None


def _cuda_driver() -> str | None:
    """The CUDA version that the driver library speaks (compatibility packages raise it above the kernel driver's)."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _cublas(cuda: str | None) -> str | None:
    """Version of the cuBLAS that torch loaded."""
    if cuda is None:
        return None
    number, parts = ctypes.c_int(), []
    try:
        library = ctypes.CDLL(f"libcublas.so.{cuda.split('.')[0]}")
    except OSError:
        return None
    for part in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of libraryPropertyType
        library.cublasGetProperty(part, ctypes.byref(number))
        parts.append(str(number.value))
    return ".".join(parts)


def _compiler() -> str | None:
    """First line of the version of the C++ compiler that Inductor calls."""
    return _line(os.environ.get("CXX", "g++"), "--version")


def _line(*command: str) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return answer.stdout.splitlines()[0] if answer.returncode == 0 and answer.stdout else None


def _with_digest(fields: dict[str, Any]) -> dict[str, Any]:
    return {"digest": _digest(fields), "fields": fields}


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def _words(value: Any) -> str:
    if value is None or value == []:
        return "none"
    text = ", ".join(value) if isinstance(value, list) else str(value)
    # a git commit is known by its first digits
    return text[:7] if len(text) == 40 and set(text) <= set("0123456789abcdef") else text


def require_compiler() -> None:
    """See that compiled kernels can be built here: a C++ compiler and Python's headers.

    Raises:
        DraftflowError: one is missing.
    """
    if _compiler() is None:
        raise DraftflowError(
            f"There is no C++ compiler ({os.environ.get('CXX', 'g++')}), which compiled kernels need.",
            "Install one (on Debian: apt install g++), or name it in CXX.",
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise DraftflowError(
            f"Python's headers are not there ({header}), which compiled kernels need.",
            "Install them (on Debian: apt install python3-dev), or choose a Python that has them (torch.python).",
        )


def require_driver() -> None:
    """See that the driver of this machine, which need not be the one that installed, runs this torch.

    Raises:
        DraftflowError: it is too old; torch would only warn, and train on the CPU.
    """
    import torch

    gpus = detect_gpus()
    build = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    if gpus and not drives(gpus, build):
        raise driver_too_old(torch.__version__.partition("+")[0], build, gpus)


def require_unchanged(install_record: dict[str, Any]) -> None:
    """See that the packages are those that were installed.

    Raises:
        DraftflowError: naming each package that was changed, added to or removed since.
    """
    before = install_record["packages"]
    now = records.packages(list(before))
    changed = [
        f"{name} {old['version']} -> {now[name]['version'] if name in now else 'none'}"
        for name, old in before.items()
        if now.get(name) != old
    ]
    if changed:
        raise DraftflowError(
            f"Packages were changed after installation: {', '.join(changed)}.",
            "Run `snakemake --forcerun install`.",
            sys.prefix,
        )


def main() -> None:
    """Take the fingerprint of this environment on this machine."""
    parser = stage_parser(__doc__ or "", settings=False)
    parser.add_argument("--install", type=Path, required=True, help="install.json")
    parser.add_argument("--output", type=Path, required=True, help="fingerprint.json")
    arguments = parser.parse_args()
    record = Record("fingerprint")
    install_record = json.loads(arguments.install.read_text())
    require_compiler()
    require_driver()
    require_unchanged(install_record)
    for part, value in take(install_record).items():
        record[part] = value
    record.write(arguments.output)
    fields = record["compile"]["fields"]
    say(f"torch {fields['torch']}, {_words(fields['GPUs'])}: compile {record['compile']['digest']}")


if __name__ == "__main__":
    run_stage(main)
