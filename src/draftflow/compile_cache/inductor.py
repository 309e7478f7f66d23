"""What a process that compiles, or loads what was compiled, does to Inductor first."""

import logging
from functools import cache

from draftflow.compile_cache.tuned_choices import find_choices_in_the_folder_in_use
from draftflow.compile_cache.vector_isa import load_probes_in_process


@cache
def prepare_inductor(device_kind: str) -> None:
    """Short cuts through what Inductor does on devices of a kind, `cpu` or `cuda`; once in a process."""
    if device_kind == "cuda":
        find_choices_in_the_folder_in_use()
        return
    load_probes_in_process()
    # a CUDA build says at each start that there is no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
