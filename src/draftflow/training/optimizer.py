"""AdamW or Muon on fp32 master weights: learning rate, clipping, and the copy of the weights that backward works on."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from draftflow.drafter.loss import Objective

EPSILON = 1e-8


@dataclass(frozen=True)
class Hyperparameters:
    """What decides the numbers of a run beside its shapes; the meaning of each is in `config.Training`.

    Attributes:
        steps: optimizer steps of the whole run.
        objective: what is minimized.
        optimizer: of the matrices, `adamw` or `muon`; norms get AdamW.
        anchors_per_document: most draft blocks of one document and step, or None.
        seed: of initial weights, order of rows and anchors.
    """

    steps: int
    objective: Objective
    learning_rate: float = 6e-4
    warmup: float = 0.04
    min_learning_rate: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    anchors_per_document: int | None = None
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of `step` (from 0): linear rise over the warm-up, then a cosine down to the least."""
        warmup = round(self.warmup * self.steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = (step + 1 - warmup) / (self.steps - warmup)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (self.min_learning_rate + (1 - self.min_learning_rate) * cosine)


class Optimizer:
    """Keeps the weights of a module in fp32, and in the module a copy of them in the precision of the products.

    Gradients come as sums over the supervised positions of all ranks, in the precision of the products; what they are
    divided by comes from the device, and no number leaves it.

    Args:
        module: parameters in fp32, on their device; they are replaced by copies in `dtype`. Matrices decay, norms do
            not.
        hyper: learning rate and the like.
        dtype: fp32 or bf16.

    Attributes:
        names, parameters: of the module.
        masters: the weights in fp32, in the same order; in fp32 they are those of the module.
    """

    def __init__(self, module: nn.Module, hyper: Hyperparameters, dtype: torch.dtype):
        self.hyper = hyper
        self.names, parameters = zip(*module.named_parameters(), strict=True)
        self.parameters: tuple[nn.Parameter, ...] = parameters
        self.masters = [parameter.detach() for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)
        matrices = [index for index, parameter in enumerate(parameters) if parameter.dim() >= 2]
        vectors = [index for index, parameter in enumerate(parameters) if parameter.dim() < 2]
        decays = [hyper.weight_decay if parameter.dim() >= 2 else 0.0 for parameter in parameters]
        self._updates: list[tuple[list[int], AdamW | Muon]] = []
        groups: list[tuple[list[int], type[AdamW | Muon]]] = [(matrices + vectors, AdamW)]
        if hyper.optimizer == "muon":
            groups = [(matrices, Muon), (vectors, AdamW)]
        for group, kind in groups:
            if group:
                copies, weights = ([values[index] for index in group] for values in (parameters, self.masters))
                self._updates.append((group, kind(copies, weights, [decays[index] for index in group], hyper)))

    @torch.no_grad()
    def step(self, step: int, normalizer: Tensor) -> Tensor:
        """Divide the gradients, clip them by their global norm, update the weights and their copy, drop the gradients.

        Args:
            step: number of the step from 0; decides the learning rate.
            normalizer: scalar fp32 on the device, what the sums of the gradients are divided by.

        Returns:
            Norm of the divided gradient before clipping, a scalar fp32 on the device.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        divisor = normalizer.clamp(min=torch.finfo(torch.float32).tiny)
        norms = torch._foreach_norm(gradients, dtype=torch.float32)
        norm = torch.stack(norms).norm() / divisor
        scale = (self.hyper.clip_norm / (norm + 1e-6)).clamp(max=1.0) / divisor
        for group, update in self._updates:
            update.step([gradients[index] for index in group], scale, self.hyper.learning_rate_at(step))
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights by name."""
        return dict(zip(self.names, self.masters, strict=True))

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `weights` gave."""
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            master.copy_(tensors[name])
            parameter.copy_(master)

    def state(self) -> dict[str, Tensor]:
        """Moments by `<name of the parameter>.<kind>`, and the number of updates, `updates`."""
        tensors = {"updates": torch.tensor(self._updates[0][1].updates)}
        for group, update in self._updates:
            for kind, values in update.moments.items():
                tensors |= {f"{self.names[index]}.{kind}": value for index, value in zip(group, values, strict=True)}
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave."""
        for group, update in self._updates:
            update.updates = int(tensors["updates"])
            for kind, values in update.moments.items():
                for index, value in zip(group, values, strict=True):
                    value.copy_(tensors[f"{self.names[index]}.{kind}"])


class AdamW:
    """AdamW (arXiv 1711.05101) of some tensors: one kernel on GPUs, plain torch elsewhere.

    Args:
        copies: of the weights, in the precision of the products; in fp32, the weights.
        weights: fp32.
        decays: weight decay of each.
        hyper: its betas.

    Attributes:
        moments: first (`exp_avg`) and second (`exp_avg_sq`) moments of each tensor, fp32.
        updates: that were made.
    """

    def __init__(
        self, copies: Sequence[Tensor], weights: Sequence[Tensor], decays: Sequence[float], hyper: Hyperparameters
    ):
        self.copies, self.weights, self.decays, self.betas = copies, weights, decays, hyper.betas
        self.moments = {name: [torch.zeros_like(weight) for weight in weights] for name in ("exp_avg", "exp_avg_sq")}
        self.updates = 0
        self._kernel = None
        if weights[0].is_cuda:
            from draftflow.training.adamw_kernel import Kernel

            first, second = self.moments.values()
            self._kernel = Kernel(copies, weights, first, second, decays)

    def step(self, gradients: Sequence[Tensor], scale: Tensor, rate: float) -> None:
        """Update by gradients in the dtype of the copies, times the scalar `scale`, at the learning rate `rate`."""
        self.updates += 1
        if self._kernel is not None:
            self._kernel(gradients, scale, rate, self.betas, EPSILON, self.updates)
            return
        first, second = self.betas
        roots = math.sqrt(1 - second**self.updates)
        tensors = zip(self.copies, self.weights, gradients, self.decays, *self.moments.values(), strict=True)
        for copy, weight, gradient, decay, moment, square in tensors:
            scaled = gradient.float() * scale
            moment.lerp_(scaled, 1 - first)
            square.mul_(second).addcmul_(scaled, scaled, value=1 - second)
            weight.mul_(1 - rate * decay)
            weight.addcdiv_(moment, square.sqrt().div_(roots).add_(EPSILON), value=-rate / (1 - first**self.updates))
            copy.copy_(weight)


class Muon:
    """Muon (arXiv 2502.16982) of some matrices, with updates of the size of AdamW's: one learning rate serves both.

        m <- m + (1 - mu) (g - m),  u = orthogonal factor of g + mu (m - g),  w <- w - lr (d w + 0.2 sqrt(max(a, b)) u)

    for a matrix [a, b]. The factor comes from five Newton-Schulz iterations in bf16, of all matrices of one shape at a
    time: one by one, small matrices would take longer to launch than to compute.

    Args: as of `AdamW`; the betas are not used.

    Attributes:
        moments: `momentum_buffer` of each matrix, fp32.
        updates: that were made.
    """

    MOMENTUM = 0.95
    COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    ITERATIONS = 5
    AT_ONCE = 2**28  # elements of a stack; the iterations hold three of them in bf16

    def __init__(
        self, copies: Sequence[Tensor], weights: Sequence[Tensor], decays: Sequence[float], hyper: Hyperparameters
    ):
        self.copies, self.weights, self.decays = copies, weights, decays
        self.moments = {"momentum_buffer": [torch.zeros_like(weight) for weight in weights]}
        self.updates = 0
        self._stacks: list[list[int]] = []
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, weight in enumerate(weights):
            by_shape[tuple(sorted(weight.shape))].append(index)
        for (rows, columns), members in by_shape.items():
            size = max(1, self.AT_ONCE // (rows * columns))
            self._stacks += [members[start : start + size] for start in range(0, len(members), size)]

    def step(self, gradients: Sequence[Tensor], scale: Tensor, rate: float) -> None:
        """As of `AdamW`."""
        self.updates += 1
        scaled = [gradient.float() for gradient in gradients]
        torch._foreach_mul_(scaled, scale)
        moments = self.moments["momentum_buffer"]
        torch._foreach_lerp_(moments, scaled, 1 - self.MOMENTUM)
        torch._foreach_lerp_(scaled, moments, self.MOMENTUM)
        for members in self._stacks:
            wide = [scaled[index].shape[0] <= scaled[index].shape[1] for index in members]
            stack = torch.stack(
                [
                    (scaled[index] if fits else scaled[index].T).bfloat16()
                    for index, fits in zip(members, wide, strict=True)
                ]
            )
            rates = 0.2 * math.sqrt(stack.shape[2]) * rate
            for index, fits, factor in zip(members, wide, self._orthogonal(stack), strict=True):
                self.weights[index].mul_(1 - rate * self.decays[index])
                self.weights[index].add_(factor if fits else factor.T, alpha=-rates)
        torch._foreach_copy_(list(self.copies), list(self.weights))

    def _orthogonal(self, stack: Tensor) -> Tensor:
        """Orthogonal factors of matrices [n, a, b], a <= b, as far as the iterations bring them."""
        first, second, third = self.COEFFICIENTS
        stack = stack / stack.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        for _ in range(self.ITERATIONS):
            gram = stack @ stack.mT
            step = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
            stack = torch.baddbmm(stack, step, stack, beta=first)
        return stack
