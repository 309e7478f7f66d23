"""The step: what one device does with one batch. Warm-up and training run this very object.

    features of the target (no gradient) -> mask -> fc, compiled layers, norm -> supervised proposals only
    -> frozen head and loss, gradient made in the same pass -> backward, gradients summed over the ranks when they are
    there -> clip -> AdamW or Muon

Everything that is compiled has the static shapes of the plan. The number of supervised rows changes from batch to
batch; what works on them (the loss) is not compiled. Nothing here waits for the device. On a GPU that is faster than
its host, the drafter's forward and backward are recorded in the second step and replayed from then on (`captured.py`).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from draftflow.drafter.loss import Dpace, head_loss_and_gradient
from draftflow.drafter.mask import layer_masks
from draftflow.drafter.model import Drafter
from draftflow.drafter.shape import DrafterShape
from draftflow.target.load import Target
from draftflow.training.captured import Captured
from draftflow.training.data import Batch
from draftflow.training.optimizer import Hyperparameters, Optimizer
from draftflow.training.plan import Plan, worth_capturing
from draftflow.training.sums import Sums

# Statistics of a step: [sum of weighted losses, what it is divided by, correct at k = 1.., supervised at k = 1..]
SUMS = 2


class Step:
    """Drafter, loss and optimizer on one device.

    Args:
        plan: static shapes.
        shape: of the drafter.
        target: its frozen embedding and head are used; in the plan's precision, on `device`.
        source: features of a batch, [B, S, taps * H].
        hyper: what decides the numbers. Two steps of equal shape and seed start from equal weights.
        device: where all of this lives.

    Attributes:
        drafter: in the precision of the plan; `optimizer` has its weights in fp32.
        statistics: numbers in what `train` and `evaluate` give.
        mark: called with the name of each part when it has been done (or, on a GPU, queued).
        group: the ranks that train; None is all of them.
        sums: of gradients over those.
    """

    def __init__(
        self,
        plan: Plan,
        shape: DrafterShape,
        target: Target,
        source: Callable[[Batch], Tensor],
        hyper: Hyperparameters,
        device: torch.device,
    ):
        self.plan, self.target, self.source, self.device = plan, target, source, device
        self.objective = hyper.objective
        self.drafter = Drafter(shape, torch.Generator().manual_seed(hyper.seed)).to(device)
        self.drafter.compile_layers()
        self.drafter.use_float8(plan.float8)
        self.optimizer = Optimizer(self.drafter, hyper, getattr(torch, plan.precision))
        self.statistics = SUMS + 2 * (plan.block_size - 1)
        self.mark: Callable[[str], None] = lambda part: None
        self.group: dist.ProcessGroup | None = None
        self.sums = Sums()
        self._replays = worth_capturing(plan)
        self._taps = self.drafter.fc.weight.shape[1]  # of the features, what the drafter reads
        self._trained = False
        self._captured: Captured | None = None
        for parameter in self.drafter.parameters():
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def train(self, batch: Batch, step: int) -> Tensor:
        """One optimizer step.

        Args:
            batch: on the device.
            step: number of the step, from 0.

        Returns:
            On the device, summed over all ranks: the statistics [2 + 2 * (Bk - 1)] (see `read_statistics`), and the
            norm of the gradient behind them.
        """
        features = self.source(batch)
        self.mark("features")
        statistics = self.forward_backward(batch, features)
        self._sum_over_ranks(statistics)
        self.sums.end()
        self.mark("all_reduce")
        norm = self.optimizer.step(step, statistics[1])
        self.mark("optimizer")
        return torch.cat([statistics, norm[None]])

    def forward_backward(self, batch: Batch, features: Tensor) -> Tensor:
        """Gradients of a batch and its features, and statistics [2 + 2 * (Bk - 1)] as of `train`, of this rank."""
        if self._captured is None and self._trained and self._replays:
            parameters = list(self.drafter.parameters())
            self._captured = Captured(self._hidden, parameters, batch, features[..., : self._taps])
        self._trained = True
        forward = self._hidden if self._captured is None else self._captured.forward
        hidden = forward(batch, features[..., : self._taps])
        self.mark("forward")
        loss, correct, gradient = self._loss(batch, hidden, features, differentiate=True)
        assert gradient is not None
        self.mark("loss")
        if self._captured is None:
            hidden.backward(torch.zeros_like(hidden).index_copy_(0, batch.supervised, gradient))
        else:
            self._captured.backward(batch.supervised, gradient)
        if self._several_ranks() and self._replays:
            gradients = [parameter.grad for parameter in self.drafter.parameters()]
            self.sums.together([gradient for gradient in gradients if gradient is not None], self.group)
        self.sums.flush(self.group)
        statistics = self._statistics(batch, loss, correct)
        self.mark("backward")
        return statistics

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> Tensor:
        """Statistics [2 + 2 * (Bk - 1)] of batches (on the host), on the device, summed over all ranks."""
        total = torch.zeros(self.statistics, device=self.device)
        for batch in (batch.to(self.device) for batch in batches):
            features = self.source(batch)
            hidden = self._hidden(batch, features[..., : self._taps])
            loss, correct, _ = self._loss(batch, hidden, features, differentiate=False)
            total += self._statistics(batch, loss, correct)
        self._sum_over_ranks(total)
        self.mark("evaluation")
        return total

    def _hidden(self, batch: Batch, features: Tensor) -> Tensor:
        """Hidden states of all proposals, [B * N * (Bk - 1), H]."""
        masks = layer_masks(batch.anchors, batch.document_ids, self.drafter.shape, features.dtype)
        embed_weight = self.target.embed_weight
        embeddings = F.embedding(batch.anchor_tokens, embed_weight), embed_weight[self.drafter.shape.mask_token_id]
        hidden = self.drafter(features, *embeddings, batch.position_ids, batch.block_positions, *masks)
        return hidden.flatten(0, 1)

    def _loss(
        self, batch: Batch, hidden: Tensor, features: Tensor, differentiate: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sum of the weighted losses; [M] bool, where the drafter's first choice is right; [M, H], the gradient of the
        supervised rows of `hidden`, if it is asked for: the others have none."""
        weights, dpace, teacher = batch.weights, None, None
        if self.objective.kind == "dpace":
            dpace = Dpace(batch.offsets, self.objective.alpha, self.plan.block_size)
            weights = torch.ones_like(weights)
        elif self.objective.kind == "kl":
            teacher = self._teacher(batch, features)
        supervised = hidden.detach().index_select(0, batch.supervised)
        arguments = (supervised, self.target.head_weight, batch.labels, weights, batch.chunks, dpace, teacher)
        loss, correct, _, gradient = head_loss_and_gradient(
            *arguments, differentiate=differentiate, capacity=min(self.plan.loss_chunk, len(hidden))
        )
        return loss, correct, gradient

    def _teacher(self, batch: Batch, features: Tensor) -> Tensor:
        """[M, H], what the target's head reads at the token before each supervised position; behind the tapped ones."""
        block = batch.supervised // (self.plan.block_size - 1)
        before = batch.anchors.positions.flatten()[block] + batch.offsets - 1
        last = features[..., self._taps :].flatten(0, 1)
        return last.index_select(0, block // self.plan.anchors * self.plan.row_length + before)

    def _statistics(self, batch: Batch, loss: Tensor, correct: Tensor) -> Tensor:
        counts = loss.new_zeros(2, self.plan.block_size)
        counts.index_add_(1, batch.offsets, torch.stack([correct, torch.ones_like(correct)]).to(counts.dtype))
        # a block with a supervised position has one at k = 1
        normalizer = counts[1, 1] if self.objective.kind == "dpace" else batch.weights.sum()
        return torch.cat([torch.stack([loss, normalizer]), counts[:, 1:].flatten()])

    def forget(self) -> None:
        """Give back what was recorded; needed where parameters have moved."""
        self._captured, self._trained = None, False

    def _reduce(self, parameter: Tensor) -> None:
        """Begin to sum a gradient over the ranks, beside the backward pass of what comes before it.

        Those of a step that is replayed wait for its end, also where it is launched: the numbers are to be the same.
        """
        if self._several_ranks() and not self._replays:
            assert parameter.grad is not None
            self.sums.add(parameter.grad, self.group)

    def _several_ranks(self) -> bool:
        return dist.is_initialized() and dist.get_world_size(self.group) > 1

    def _sum_over_ranks(self, values: Tensor) -> None:
        if dist.is_initialized():
            dist.all_reduce(values, group=self.group)


def read_statistics(statistics: Tensor) -> tuple[float, list[float]]:
    """Mean loss and accuracy by position from summed statistics, on the host.

    Args:
        statistics: [2 + 2 * (Bk - 1)], from `train` (without the norm) or `evaluate`, or sums of several.

    Returns:
        Mean loss in nats, by the objective's weights; share of correct tokens at k = 1 .. Bk - 1, 0 where none was
        supervised.
    """
    values = statistics.double().tolist()
    correct, counts = torch.tensor(values[SUMS:]).chunk(2)
    return values[0] / max(values[1], 1e-30), (correct / counts.clamp(min=1)).tolist()
