"""Context features: the outputs of the tapped target layers, for packed rows.

The target runs only as far as the last tapped layer, without logits, without a cache and without a mask. A slow
reference is `output_hidden_states` of the whole model on each document alone (tests/torch_env/test_target_features.py).
"""

from collections.abc import Sequence

import torch

from draftflow.target.attention import documents_of, packed
from draftflow.target.load import Target
from draftflow.target.taps import tap_layers

__all__ = ["FeatureExtractor", "tap_layers"]


class FeatureExtractor:
    """Tapped hidden states of a target; layer id `i` gives what Hugging Face calls `hidden_states[i + 1]`.

    That is the output of layer `i` (from 0), but for the last layer it is the output of the final norm, which is what
    inference engines that read `hidden_states` feed to the drafter.

    Args:
        target: the frozen target.
        layer_ids: layers to tap, in the order in which their features are concatenated.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int]):
        self.layer_ids = list(layer_ids)
        decoder = target.model.get_decoder()
        self._config = decoder.config
        self._embed, self._rotary, self._norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self._layers = decoder.layers[: max(self.layer_ids) + 1]
        self._last = len(decoder.layers) - 1

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, document_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Features [B, S, len(layer_ids) * H] in the target's dtype.

        Args:
            input_ids: [B, S] int64.
            document_ids: [B, S], of runs: a token attends to earlier tokens of its own document. Padding (-1) counts as
                a document of its own, so that no row of attention is empty and nothing is NaN. On the host, so that
                nothing waits for the device.
            position_ids: [B, S] int64, restarting at 0 in every document.
        """
        documents = documents_of(document_ids, input_ids.device)
        hidden = self._embed(input_ids)
        positions = self._rotary(hidden, position_ids=position_ids)
        tapped = {}
        with packed(self._config):
            for index, layer in enumerate(self._layers):
                hidden = layer(
                    hidden,
                    attention_mask=None,
                    position_ids=position_ids,
                    position_embeddings=positions,
                    documents=documents,
                )
                if index in self.layer_ids:
                    tapped[index] = self._norm(hidden) if index == self._last else hidden
        return torch.cat([tapped[index] for index in self.layer_ids], dim=-1)
