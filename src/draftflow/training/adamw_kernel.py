"""AdamW over many tensors in one Triton kernel, with fp32 master weights and their rounded copy for the products.

Per element, with the gradient g as it came out of backward and a factor s that holds normalization and clipping:

    m <- m + (1 - b1) (s g - m),  v <- v + (1 - b2) ((s g)^2 - v)
    w <- w - lr (d w + m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)),  copy <- round(w)

In bf16 that is 14 bytes read and 14 written per weight, which is all that must move; s comes from the device, so that
nothing waits. Tensors are found through a table of their addresses.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,misc"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of one program, all of one tensor

_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _pointer(table, tensor, dtype: tl.constexpr):
    return tl.multiple_of(tl.load(table + tensor).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["addresses", "gradients", "programs"])
def draftflow_adamw(
    addresses,  # [4, tensors] int64: copy, weight, m, v
    gradients,  # [tensors] int64
    programs,  # [programs, 2] int32: tensor, block of it
    sizes,  # [tensors] int64
    decays,  # [tensors] fp32
    scale,  # [] fp32
    rate,
    keep_moment,
    keep_square,
    moment_bias,
    square_bias,
    epsilon,
    tensors: tl.constexpr,
    dtype: tl.constexpr,
    aligned: tl.constexpr,  # sizes are multiples of 8, so that a thread loads 16 bytes at once
    block_size: tl.constexpr,
):
    tensor = tl.load(programs + 2 * tl.program_id(0))
    block = tl.load(programs + 2 * tl.program_id(0) + 1).to(tl.int64)
    element = block * block_size + tl.arange(0, block_size)
    size = tl.load(sizes + tensor)
    if aligned:
        size = tl.multiple_of(size, 8)
    inside = element < size
    weight_at = _pointer(addresses + tensors, tensor, tl.float32) + element
    moment_at = _pointer(addresses + 2 * tensors, tensor, tl.float32) + element
    square_at = _pointer(addresses + 3 * tensors, tensor, tl.float32) + element
    gradient = tl.load(_pointer(gradients, tensor, dtype) + element, mask=inside).to(tl.float32) * tl.load(scale)
    weight = tl.load(weight_at, mask=inside)
    moment = tl.load(moment_at, mask=inside)
    square = tl.load(square_at, mask=inside)
    moment += (1 - keep_moment) * (gradient - moment)
    square += (1 - keep_square) * (gradient * gradient - square)
    update = moment / moment_bias / (tl.sqrt(square / square_bias) + epsilon)
    weight -= rate * (tl.load(decays + tensor) * weight + update)
    tl.store(moment_at, moment, mask=inside)
    tl.store(square_at, square, mask=inside)
    tl.store(weight_at, weight, mask=inside)
    if dtype != tl.float32:
        tl.store(_pointer(addresses, tensor, dtype) + element, weight.to(dtype), mask=inside)


class Kernel:
    """The update for a fixed set of tensors, on one device.

    Args:
        copies: what backward works on, in fp32 or bf16; in fp32, the weights themselves.
        weights, moments, squares: fp32, contiguous, of the same shapes; all stay where they are.
        decays: weight decay of each.
    """

    def __init__(
        self,
        copies: Sequence[Tensor],
        weights: Sequence[Tensor],
        moments: Sequence[Tensor],
        squares: Sequence[Tensor],
        decays: Sequence[float],
    ):
        device, sizes = weights[0].device, [weight.numel() for weight in weights]
        kinds = (copies, weights, moments, squares)
        self._held = kinds  # for as long as their addresses are used
        self.addresses = torch.tensor([[one.data_ptr() for one in kind] for kind in kinds], device=device)
        self.sizes = torch.tensor(sizes, device=device)
        self.decays = torch.tensor(decays, dtype=torch.float32, device=device)
        blocks = [(tensor, block) for tensor, size in enumerate(sizes) for block in range(triton.cdiv(size, BLOCK))]
        self.programs = torch.tensor(blocks, dtype=torch.int32, device=device)
        self.aligned = all(size % 8 == 0 for size in sizes)
        self.dtype = _TRITON[copies[0].dtype]
        self._gradients: tuple[list[int], Tensor] | None = None

    def __call__(
        self,
        gradients: Sequence[Tensor],
        scale: Tensor,
        rate: float,
        betas: tuple[float, float],
        epsilon: float,
        updates: int,
    ) -> None:
        """One update, number `updates` from 1, with gradients in the dtype of the copies times the scalar `scale`."""
        first, second = map(float, betas)  # Triton compiles for an integer apart
        draftflow_adamw[(len(self.programs),)](
            self.addresses,
            self._addresses(gradients),
            self.programs,
            self.sizes,
            self.decays,
            scale,
            float(rate),
            first,
            second,
            1 - first**updates,
            1 - second**updates,
            epsilon,
            tensors=len(self.sizes),
            dtype=self.dtype,
            aligned=self.aligned,
            block_size=BLOCK,
            num_warps=8,
        )

    def _addresses(self, gradients: Sequence[Tensor]) -> Tensor:
        """Addresses of the gradients on the device; they are mostly those of a step before."""
        found = [gradient.data_ptr() for gradient in gradients]
        if self._gradients is None or self._gradients[0] != found:
            assert not any(address % 16 for address in found), "a gradient that is not aligned"
            table = torch.tensor(found, pin_memory=self.sizes.is_cuda)
            self._gradients = (found, table.to(self.sizes.device, non_blocking=True))
        return self._gradients[1]
