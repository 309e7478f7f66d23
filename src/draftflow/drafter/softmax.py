"""The softmax of the loss in plain torch: what `softmax_kernels` does on GPUs, on any device and in any precision.

Logits [rows, V] are overwritten by their gradient; sums are in fp32, or in fp64 for logits in fp64.
"""

import torch
from torch import Tensor


def statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the loss has to know of each row.

    Args:
        logits: [rows, V].
        labels: [rows] int64.

    Returns:
        log of the sum of exponentials, cross-entropy in nats, and whether no logit is above the label's; [rows] each.
    """
    wide = _wide(logits)
    lse = wide.logsumexp(1)
    of_label = wide.gather(1, labels[:, None]).squeeze(1)
    return lse, lse - of_label, of_label >= wide.amax(1)


def gradient_(logits: Tensor, lse: Tensor, labels: Tensor, weights: Tensor) -> None:
    """Overwrite logits [rows, V] by weights * (softmax - onehot of the labels); the other arguments are [rows]."""
    gradient = _wide(logits).sub_(lse[:, None]).exp_()  # where it is wide already, in place
    gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), -1.0))
    logits.copy_(gradient.mul_(weights[:, None]))


def divergence_(
    logits: Tensor, teacher: Tensor, lse: Tensor, teacher_lse: Tensor, weights: Tensor, write: bool
) -> Tensor:
    """KL(softmax of `teacher` || softmax of `logits`) in nats, [rows].

    Args:
        logits, teacher: [rows, V].
        lse, teacher_lse: [rows], of `statistics`.
        weights: [rows].
        write: overwrite `logits` by weights * (their softmax - the teacher's).
    """
    log_q, log_p = _wide(logits) - lse[:, None], _wide(teacher) - teacher_lse[:, None]
    kl = (log_p.exp() * (log_p - log_q)).sum(1)
    if write:
        logits.copy_((log_q.exp() - log_p.exp()) * weights[:, None])
    return kl


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
