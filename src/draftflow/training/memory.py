"""How much device memory a step may take: a bound by arithmetic from the plan, to hold the measured peak against.

Every term counts what is alive at the worst moment as if all were alive at once. What is not in it is the scores of
dense attention: a step that makes them is far beyond the bound. Standard library only.
"""

from draftflow.training.plan import SUMMED_BYTES, Plan, drafter_parameters, worth_capturing

# torch's allocator rounds and keeps pieces; cuBLAS and flex_attention have workspaces of their own
SLACK_BYTES = 256 * 2**20


def step_bound(plan: Plan, target_bytes: int) -> dict[str, int]:
    """Bytes on the device of one training step, by part, and their sum `total`.

    Args:
        plan: static shapes of the step.
        target_bytes: of the target's weights as loaded.
    """
    shape, width = plan.drafter, {"float32": 4, "bfloat16": 2}[plan.precision]
    hidden, middle = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    context = plan.rows * plan.row_length
    blocks = plan.rows * plan.anchors * plan.block_size
    weights = drafter_parameters(shape)
    taps = len(plan.feature_layers)
    # of one layer, kept for the backward: norms and residuals, q and the output of attention, k and v with their
    # rotated forms, the three of the MLP
    layer = width * (
        blocks * (6 * hidden + 4 * queries + 4 * middle) + (blocks + context) * 6 * keys + 2 * context * hidden
    )
    # bytes of what is multiplied in float8, both ways round: weights and inputs, which are kept, and gradients
    float8 = 2 * (weights + shape["layers"] * (blocks * (2 * hidden + queries + middle) + context * hidden))
    float8 += 2 * context * len(shape["target_layer_ids"]) * hidden + 2 * blocks * max(middle, hidden, queries)
    # gradients that are summed over ranks together, in a tensor of their own, where there are several
    fc = len(shape["target_layer_ids"]) * hidden * hidden
    matrices = [fc, *shape["layers"] * (2 * [hidden * queries] + 2 * [hidden * keys] + 3 * [hidden * middle])]
    small = sum(size for size in matrices if size * width < SUMMED_BYTES)
    together = weights if worth_capturing(plan) else small
    parts = {
        "target_weights": target_bytes,
        # fp32 weights and two moments; gradients, and the weights themselves, in the precision of the products
        "drafter_weights": weights * (12 + width + (width if width < 4 else 0)),
        # Muon has its gradients in fp32, and iterates on some of the matrices in bf16
        "optimizer": weights * 4 + 8 * min(weights, 2**28) if plan.optimizer == "muon" else 0,
        "sums": together * width,
        "features": 2 * context * taps * hidden * width,  # and their gradient, or the next batch
        "activations": shape["layers"] * layer + 4 * context * hidden * width,
        # gradients of one layer's tensors while it is gone through backward
        "backward": 2 * layer,
        "float8": float8 if plan.float8 else 0,
        # logits of a chunk, and the target's for its distribution; hidden states, their gradient and the target's
        "loss": min(plan.loss_chunk, blocks) * shape["vocab_size"] * width * (2 if plan.loss == "kl" else 1)
        + 4 * blocks * hidden * (width + 4),
        # one layer of the target at a time
        "target_forward": context * (8 * hidden + 4 * queries + 4 * middle) * width,
        "slack": SLACK_BYTES,
    }
    return {**parts, "total": sum(parts.values())}


def dense_scores_bytes(plan: Plan) -> int:
    """Bytes of the scores of one layer's attention if it were dense, in fp32: [B, heads, N * Bk, S + N * Bk]."""
    blocks = plan.anchors * plan.block_size
    return 4 * plan.rows * plan.drafter["heads"] * blocks * (plan.row_length + blocks)
