"""Sums of gradients over the ranks, begun as the backward pass gives them."""

import torch
import torch.distributed as dist
from torch import Tensor

from draftflow.training.plan import SUMMED_BYTES


class Sums:
    """The sums of one step. All ranks add equal shapes in equal order.

    Args:
        at_least: bytes that are summed at a time, but at the end. Smaller gradients wait for others, since each by
            itself would take about as long as all of them.
    """

    def __init__(self, at_least: int = SUMMED_BYTES):
        self.at_least = at_least
        self._waiting: list[Tensor] = []
        self._begun: list[tuple[dist.Work, Tensor, list[Tensor]]] = []  # work, tensor, gradients that it is made of

    def add(self, gradient: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Sum a gradient over the ranks of `group` (None is all), now or with others."""
        if gradient.nbytes >= self.at_least:
            self.together([gradient], group)
            return
        self._waiting.append(gradient)
        if sum(waiting.nbytes for waiting in self._waiting) >= self.at_least:
            self.flush(group)

    def flush(self, group: dist.ProcessGroup | None = None) -> None:
        """Begin what waits."""
        if self._waiting:
            self.together(self._waiting, group)
            self._waiting = []

    def together(self, gradients: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Begin to sum them as one tensor."""
        one = gradients[0] if len(gradients) == 1 else torch.cat([gradient.flatten() for gradient in gradients])
        work = dist.all_reduce(one, group=group, async_op=True)
        assert work is not None
        self._begun.append((work, one, gradients))

    def end(self) -> None:
        """From now on the gradients are the sums; on a GPU, for what is launched after this."""
        for work, one, gradients in self._begun:
            work.wait()
            if len(gradients) > 1:
                parts = one.split([gradient.numel() for gradient in gradients])
                summed = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
                torch._foreach_copy_(gradients, summed)
        self._begun.clear()
