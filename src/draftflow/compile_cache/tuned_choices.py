"""Makes Inductor look for tuned choices in the cache folder that is in use, wherever it was when they were made.

The choice among a kernel's configurations lies in a file beside the kernel's source, and a graph from the cache names
that source by the path that it had when it was compiled. In a folder that was moved, or came in a bundle, no choice is
found, and every process times all kernels anew and writes its choices to the old place. On an H200 that was 1.2 s of a
warm start of 4.0 s.
"""

from pathlib import Path
from typing import Any


def find_choices_in_the_folder_in_use() -> None:
    """Have choices looked for, and kept, below the present cache folder. A torch that does otherwise is left alone."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    create: Any = getattr(AutotuneCache, "create", None)
    if create is None:
        return

    def create_here(inductor_meta: Any, filename: str, configs_hash: str) -> Any:
        # sources lie in folders of two letters, below the one of the cache
        source = Path(filename)
        return create(inductor_meta, str(Path(cache_dir()) / source.parent.name / source.name), configs_hash)

    AutotuneCache.create = staticmethod(create_here)  # type: ignore[method-assign, assignment]
