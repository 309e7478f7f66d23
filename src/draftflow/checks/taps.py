"""Are the features that the drafter learned from the target's own layer outputs, of the layers that it names?"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftflow.checks.result import Check
from draftflow.target.load import Target

LIMIT = 1e-3  # fp32 rounding gives 1e-5; the layer next to the right one differs by tenths


@torch.no_grad()
def tap_error(
    target: Target, extract: Callable[[Tensor, Tensor, Tensor], Tensor], layer_ids: list[int], row: dict[str, Tensor]
) -> float:
    """Largest relative difference between features of a packed row and Hugging Face's `output_hidden_states` of each
    of its documents alone.

    Relative per token and tapped layer, since a few tokens have states a thousand times as long as the others.

    Args:
        extract: the feature extractor of training, for `layer_ids`.
        row: `input_ids`, `document_ids` and `position_ids`, [S] each.
    """
    device = target.embed_weight.device
    ids, documents, positions = (
        row[name].to(device).long()[None] for name in ("input_ids", "document_ids", "position_ids")
    )
    features = extract(ids, documents, positions)[0].unflatten(-1, (len(layer_ids), -1))  # [S, taps, H]
    worst = 0.0
    for document in range(int(documents.max()) + 1):
        inside = documents[0] == document
        states = target.model(ids[:, inside], output_hidden_states=True).hidden_states
        expected = torch.stack([states[layer + 1][0] for layer in layer_ids], dim=1)  # [length, taps, H]
        error = (features[inside] - expected).norm(dim=-1) / expected.norm(dim=-1)
        # a comparison with NaN is false, and must not pass for a small error
        worst = max(worst, error.nan_to_num(nan=torch.inf).max().item())
    return worst


def features_check(error: float) -> Check:
    """The features that training used are right; `error` is from `tap_error`.

    They are looked at in fp32 and layer by layer. On GPUs training has the same layers compiled, in its own precision,
    and perhaps replayed; that this is the same is for the tests on a GPU (tests/gpu/test_target_forward.py).
    """
    return Check(
        "taps_features",
        error <= LIMIT,
        error,
        f"<= {LIMIT:g}",
        "Largest relative difference between the features of a held-out row and the target's hidden states, document "
        "by document.",
        "target/features.py: layer numbers, positions and the document mask",
    )


def layers_check(exported: list[int], trained: list[int]) -> Check:
    """The exported drafter names the layers that it was trained with, so that servers give it the same features."""
    return Check(
        "taps_layers",
        exported == trained,
        ", ".join(map(str, exported)),
        f"layers {', '.join(map(str, trained))}",
        "target_layer_ids in the exported config.json, against the layers tapped in training.",
        "drafter/checkpoint.py and drafter.target_layers",
    )
