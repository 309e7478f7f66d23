"""Makes Inductor look for tuned choices in the cache folder that is in use, wherever it was when they were made.

The choice among a kernel's configurations lies in a file beside the kernel's source. Up to torch 2.13, a graph from the
cache names that source by the path that it had when it was compiled: in a folder that was moved, or came in a bundle,
no choice is found, and every process times all kernels anew, and writes its choices to the old place. On an H200 that
was 1.2 s of a warm start of 4.0 s.
"""

import inspect
from pathlib import Path
from typing import Any


def find_choices_in_the_folder_in_use() -> None:
    """Have choices looked for, and kept, below the present cache folder. A torch that does so itself is left alone."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    set_up: Any = getattr(AutotuneCache, "_setup_local_cache", None)
    if set_up is None or "dirname" not in inspect.signature(set_up).parameters:
        return

    def set_up_here(self: Any, inductor_meta: Any, dirname: str, cache_key: str) -> None:
        # sources lie in folders of two letters, below the one of the cache
        set_up(self, inductor_meta, str(Path(cache_dir()) / Path(dirname).name), cache_key)

    AutotuneCache._setup_local_cache = set_up_here  # type: ignore[method-assign]
