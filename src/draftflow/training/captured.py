"""The drafter's forward and backward as two CUDA graphs, for steps that are launched more slowly than computed.

A step of a small drafter is some hundred kernels of microseconds each, and Python starts one after the other. All their
shapes are the plan's, so that they can be recorded once and started as one. The loss between the two, whose number of
rows changes from batch to batch, stays as it is. Recorded are the kernels that would run anyway, in their order: the
numbers are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from draftflow.drafter.anchors import Anchors
from draftflow.training.data import Batch

# What the drafter's forward reads of a batch, beside its anchors: of static shapes.
READ = ("document_ids", "position_ids", "anchor_tokens", "block_positions")


class Captured:
    """A forward and its backward, recorded with the memory that they work in.

    Args:
        forward: from a batch and features to hidden states. It has run before, forward and backward, so that nothing is
            compiled or loaded while it is recorded; it waits for no device.
        parameters: what the hidden states are differentiated in.
        batch, features: of the shapes of all that follow.
    """

    def __init__(
        self,
        forward: Callable[[Batch, Tensor], Tensor],
        parameters: Sequence[nn.Parameter],
        batch: Batch,
        features: Tensor,
    ):
        self._parameters = list(parameters)
        self._inputs = [_alike(value) for value in self._read(batch, features)]
        fixed_features, positions, valid, *rest = self._inputs
        fixed = replace(batch, anchors=Anchors(positions, valid), **dict(zip(READ, rest, strict=True)))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # cuBLAS has a workspace for each stream
            hidden = forward(fixed, fixed_features)
            torch.autograd.grad(hidden, self._parameters, torch.zeros_like(hidden))
            self._gradient = torch.zeros_like(hidden)
        torch.cuda.current_stream().wait_stream(stream)
        del hidden
        pool = torch.cuda.graph_pool_handle()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # other threads may go on: what they do is not on this stream
        with torch.cuda.graph(self._forward, pool, stream, "thread_local"):
            hidden = forward(fixed, fixed_features)
        with torch.cuda.graph(self._backward, pool, stream, "thread_local"):
            found = torch.autograd.grad(hidden, self._parameters, self._gradient)
            self._gradients = [gradient.contiguous() for gradient in found]  # as `backward` leaves them
        self._hidden = hidden.detach()

    def forward(self, batch: Batch, features: Tensor) -> Tensor:
        """Hidden states, which stand until the next call."""
        torch._foreach_copy_(self._inputs, self._read(batch, features), non_blocking=True)
        self._forward.replay()
        return self._hidden

    def backward(self, rows: Tensor, gradient: Tensor) -> None:
        """Set the parameters' `grad`, which stand until the next `forward`: that has the same memory to work in.

        Args:
            rows: [M] int64, of the hidden states that have a gradient; the others have none.
            gradient: [M, H].
        """
        self._gradient.zero_().index_copy_(0, rows, gradient)
        self._backward.replay()
        for parameter, found in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = found

    @staticmethod
    def _read(batch: Batch, features: Tensor) -> list[Tensor]:
        return [features, *batch.anchors, *(getattr(batch, name) for name in READ)]


def _alike(value: Tensor) -> Tensor:
    """A copy with the strides of `value`, for which code was compiled: features may be a part of wider ones."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
