"""Statistics of speculative decoding: acceptance length, its confidence interval, acceptance by position.

A block emits the accepted proposals and one token of the target, so a block of acceptance length 1 accepted nothing.
With `a` the acceptance length, proposals 1 .. a-1 of the block were accepted, proposal `a` was proposed and rejected
(unless the block or the generation ended there), and those after it were never compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval."""

    lower: float
    upper: float


def acceptance_length(lengths: Sequence[Sequence[int]]) -> float:
    """Emitted tokens per target forward after prefill: all tokens over all blocks, so long answers count more.

    Args:
        lengths: for each prompt, the acceptance length of each of its blocks; a prompt may have none.
    """
    blocks = sum(len(prompt) for prompt in lengths)
    return sum(sum(prompt) for prompt in lengths) / blocks if blocks else 0.0


def bootstrap_interval(
    lengths: Sequence[Sequence[int]], resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Percentile bootstrap of `acceptance_length` over prompts: blocks of one prompt are not independent, prompts are.

    Args:
        lengths: as in `acceptance_length`; prompts without blocks are left out.
        resamples: sets of prompts drawn with replacement.
        seed: of the drawing, so that the same lengths give the same interval.
    """
    tokens = np.array([sum(prompt) for prompt in lengths if prompt], dtype=np.float64)
    blocks = np.array([len(prompt) for prompt in lengths if prompt], dtype=np.float64)
    if not len(tokens):
        return Interval(0.0, 0.0)
    drawn = np.random.default_rng(seed).integers(0, len(tokens), size=(resamples, len(tokens)))
    ratios = tokens[drawn].sum(axis=1) / blocks[drawn].sum(axis=1)
    tail = (1 - confidence) / 2
    lower, upper = np.quantile(ratios, [tail, 1 - tail])
    return Interval(float(lower), float(upper))
