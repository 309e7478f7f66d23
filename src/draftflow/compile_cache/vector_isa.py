"""A short cut through Inductor's search for the CPU's vector instructions.

For every instruction set that a CPU claims, Inductor builds a small library and loads it in a new Python process that
first imports torch: six processes on a CPU with AMX, each time a process compiles or loads a kernel. With a warm cache
that took 28 of 30 s on two cores. Loading the libraries in this process, which has torch already, answers the same.
"""

import subprocess
import types
from collections.abc import Sequence
from typing import Any


def load_probes_in_process() -> None:
    """Have Inductor load its instruction set libraries here. A torch that does it otherwise is left as it is."""
    from torch._inductor import cpu_vec_isa

    def check_call(command: Sequence[str], **options: Any) -> int:
        if len(command) != 3 or command[1] != "-c":
            return subprocess.check_call(command, **options)
        exec(
            command[2], {}
        )  # "import torch ... cdll.LoadLibrary(...)"; what it raises means no, as a failed process does
        return 0

    if hasattr(cpu_vec_isa, "subprocess"):
        cpu_vec_isa.subprocess = types.SimpleNamespace(**{**vars(subprocess), "check_call": check_call})
