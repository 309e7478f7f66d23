"""Which attention the layers of a target use for a while.

In a file of its own, so that an edit of one attention leaves alone what is made with another.
"""

import contextlib
from collections.abc import Iterator

from transformers import PretrainedConfig


@contextlib.contextmanager
def attending(config: PretrainedConfig, name: str) -> Iterator[None]:
    """While this holds, the layers of the model of `config` attend with what transformers finds under `name`."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
