"""Context features: the outputs of the tapped target layers, for packed rows.

The target runs only as far as the last tapped layer, without logits, without a cache and without a mask. A slow
reference is `output_hidden_states` of the whole model on each document alone (tests/torch_env/test_target_features.py).

On GPUs its layers are compiled, which fuses what lies between the matrix products. On an H200, in bf16, a row of 3072
tokens through eight layers of Qwen3-8B's shape takes 12.1 ms; before they were compiled it took 17.3
(benchmarks/step_time.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftflow.target.attending import attending
from draftflow.target.attention import NAME, Documents, documents_of, flash_serves
from draftflow.target.load import Target
from draftflow.target.taps import tap_layers

__all__ = ["FeatureExtractor", "tap_layers"]


def _run_layer(
    layer: nn.Module, hidden: Tensor, position_ids: Tensor, angles: tuple[Tensor, Tensor], documents: Documents
) -> Any:
    return layer(
        hidden, attention_mask=None, position_ids=position_ids, position_embeddings=angles, documents=documents
    )


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
        self._run = _run_layer

    def compile_layers(self) -> None:
        """Compile the layers; nothing is compiled until the first call.

        One graph serves all layers of a kind and any documents; for rows of other shapes there would be another.
        """
        self._run = torch.compile(_run_layer, dynamic=False, fullgraph=True)

    @property
    def layer_parameters(self) -> int:
        """Number of weights of a layer."""
        return sum(parameter.numel() for parameter in self._layers[0].parameters())

    @property
    def reads_no_host_bounds(self) -> bool:
        """Whether attention is one kernel over all documents, wherever they begin."""
        weight, head_dim = self._embed.weight, self._layers[0].self_attn.head_dim
        return weight.is_cuda and flash_serves(weight.dtype, head_dim, weight.device.index)

    def __call__(self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Features [B, S, len(layer_ids) * H] in the target's dtype.

        Args:
            input_ids: [B, S] int64.
            document_ids: [B, S], of runs: a token attends to earlier tokens of its own document. Padding (-1) counts as
                a document of its own, so that no row of attention is empty and nothing is NaN. On the host, so that
                nothing waits for the device.
            position_ids: [B, S] int64, restarting at 0 in every document.
        """
        return self.of(input_ids, position_ids, documents_of(document_ids, input_ids.device))

    @torch.no_grad()
    def of(self, input_ids: Tensor, position_ids: Tensor, documents: Documents) -> Tensor:
        """Features, where it is known already where the documents lie; arguments as of a call."""
        if self._run is not _run_layer:
            for bounds in (documents.bounds, documents.host_bounds):
                torch._dynamo.mark_dynamic(bounds, 0)
        hidden = self._embed(input_ids)
        angles = self._rotary(hidden, position_ids=position_ids)
        tapped = {}
        with attending(self._config, NAME):
            for index, layer in enumerate(self._layers):
                hidden = self._run(layer, hidden, position_ids, angles, documents)
                if index in self.layer_ids:
                    tapped[index] = self._norm(hidden) if index == self._last else hidden
        return torch.cat([tapped[index] for index in self.layer_ids], dim=-1)
