"""The step: what one device does with one batch. Warm-up and training run this very object.

    features of the target (no gradient) -> mask -> fc, compiled layers, norm -> supervised rows only
    -> frozen head and cross-entropy, gradient made in the same pass -> backward -> one all-reduce -> clip -> AdamW

Everything that is compiled has the static shapes of the plan. The number of supervised rows changes from batch to
batch; what works on them (the loss) is not compiled. Nothing here waits for the device.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from draftflow.drafter.loss import linear_cross_entropy
from draftflow.drafter.mask import allowed, block_mask
from draftflow.drafter.model import Drafter
from draftflow.drafter.shape import DrafterShape
from draftflow.target.load import Target
from draftflow.training.data import Batch
from draftflow.training.optimizer import Hyperparameters, Optimizer
from draftflow.training.plan import Plan

# Statistics of a step: [sum of weighted losses, sum of weights, correct at k = 1.., supervised at k = 1..]
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
        drafter: fp32 weights.
        mark: called with the name of each part when it has been done (or, on a GPU, queued).
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
        self.drafter = Drafter(shape, torch.Generator().manual_seed(hyper.seed)).to(device)
        self.drafter.compile_layers()
        self.optimizer = Optimizer(self.drafter, hyper, SUMS + 2 * (plan.block_size - 1))
        self.mark: Callable[[str], None] = lambda part: None

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
        hidden = self._supervised_hidden(batch, features)
        self.mark("forward")
        loss, correct, _ = linear_cross_entropy(
            hidden, self.target.head_weight, batch.labels, batch.weights, self.plan.loss_chunk
        )
        self.mark("loss")
        loss.backward()
        self.optimizer.statistics += self._statistics(batch, loss.detach(), correct)
        self.mark("backward")
        self._sum_over_ranks(self.optimizer.reduced)
        self.mark("all_reduce")
        statistics = self.optimizer.statistics.clone()
        norm = self.optimizer.step(step)
        self.mark("optimizer")
        return torch.cat([statistics, norm[None]])

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> Tensor:
        """Statistics [2 + 2 * (Bk - 1)] of batches (on the host), on the device, summed over all ranks."""
        total = torch.zeros_like(self.optimizer.statistics)
        for batch in (batch.to(self.device) for batch in batches):
            hidden = self._supervised_hidden(batch, self.source(batch))
            loss, correct, _ = linear_cross_entropy(
                hidden, self.target.head_weight, batch.labels, batch.weights, self.plan.loss_chunk
            )
            total += self._statistics(batch, loss, correct)
        self._sum_over_ranks(total)
        self.mark("evaluation")
        return total

    def _supervised_hidden(self, batch: Batch, features: Tensor) -> Tensor:
        """Hidden states [M, H] of the block positions that the loss looks at."""
        make_mask = block_mask if self.device.type == "cuda" else allowed
        mask = make_mask(batch.anchors, batch.document_ids, self.plan.block_size)
        embeddings = F.embedding(batch.block_tokens, self.target.embed_weight)
        hidden = self.drafter(features, embeddings, batch.position_ids, batch.block_positions, mask)
        return hidden.flatten(0, 1).index_select(0, batch.supervised)

    def _statistics(self, batch: Batch, loss: Tensor, correct: Tensor) -> Tensor:
        counts = loss.new_zeros(2, self.plan.block_size)
        counts.index_add_(1, batch.offsets, torch.stack([correct, torch.ones_like(correct)]).to(counts.dtype))
        return torch.cat([torch.stack([loss, batch.weights.sum()]), counts[:, 1:].flatten()])

    def _sum_over_ranks(self, values: Tensor) -> None:
        if dist.is_initialized():
            dist.all_reduce(values)


def read_statistics(statistics: Tensor) -> tuple[float, list[float]]:
    """Mean loss and accuracy by position from summed statistics, on the host.

    Args:
        statistics: [2 + 2 * (Bk - 1)], from `train` (without the norm) or `evaluate`, or sums of several.

    Returns:
        Weighted mean of the cross-entropy in nats; share of correct tokens at k = 1 .. Bk - 1, 0 where none was
        supervised.
    """
    values = statistics.double().tolist()
    correct, counts = torch.tensor(values[SUMS:]).chunk(2)
    return values[0] / max(values[1], 1e-30), (correct / counts.clamp(min=1)).tolist()
