"""AdamW on fp32 master weights: groups, learning rate, and one flat gradient that is reduced and clipped at once."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Hyperparameters:
    """What decides the numbers of a run beside its shapes; the meaning of each is in `config.Training`.

    Attributes:
        steps: optimizer steps of the whole run.
        gamma: decay of the loss weights exp(-(k - 1) / gamma).
        seed: of initial weights, order of rows and anchors.
    """

    steps: int
    gamma: float
    learning_rate: float = 6e-4
    warmup: float = 0.04
    min_learning_rate: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
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
    """Fused AdamW whose gradients lie in one buffer, with room for the statistics of the step behind them.

    The gradients of all ranks are sums, not means; so are the statistics. One all-reduce adds both up, and the division
    by the global sum of weights comes after. No number leaves the device.

    Args:
        module: parameters in fp32, on their device. Matrices decay, norms do not.
        hyper: learning rate and the like.
        statistics: numbers to be summed over the ranks with the gradients; number 1 is the sum of weights.

    Attributes:
        reduced: the buffer that is summed over ranks between backward and `step`.
        statistics: its tail, [statistics] fp32.
    """

    def __init__(self, module: nn.Module, hyper: Hyperparameters, statistics: int):
        self.hyper = hyper
        self.names, parameters = zip(*module.named_parameters(), strict=True)
        self.parameters: tuple[nn.Parameter, ...] = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.reduced = torch.zeros(sum(sizes) + statistics, device=parameters[0].device)
        self._gradient, self.statistics = self.reduced.split([sum(sizes), statistics])
        for parameter, gradient in zip(parameters, self._gradient.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in parameters if parameter.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": hyper.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=hyper.learning_rate, betas=hyper.betas, fused=True)

    @torch.no_grad()
    def step(self, step: int) -> Tensor:
        """Clip the mean gradient by its global norm, update the weights, clear the buffer.

        Args:
            step: number of the step from 0; decides the learning rate.

        Returns:
            Norm of the mean gradient before clipping, a scalar on the device.
        """
        weight = self.statistics[1].clamp(min=torch.finfo(torch.float32).tiny)
        norm = self._gradient.norm() / weight
        self._gradient *= (self.hyper.clip_norm / (norm + 1e-6)).clamp(max=1.0) / weight
        for group in self._adamw.param_groups:
            group["lr"] = self.hyper.learning_rate_at(step)
        self._adamw.step()
        self.reduced.zero_()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Moments of every parameter by its name, and the number of updates; empty before the first step."""
        tensors = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, value in self._adamw.state[parameter].items():
                tensors[f"{name}.{key}"] = value
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            prefix = f"{name}."
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            self._adamw.state[parameter] = {key: value.to(parameter.device).clone() for key, value in state.items()}
