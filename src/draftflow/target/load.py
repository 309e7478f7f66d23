"""A prepared target as a frozen model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from draftflow.errors import DraftflowError


@dataclass(frozen=True)
class Target:
    """The language model that a drafter is trained for: in evaluation mode, without gradients.

    Args:
        model: Hugging Face causal language model.
        description: `target.json`.
    """

    model: PreTrainedModel
    description: dict[str, Any]

    @property
    def embed_weight(self) -> torch.Tensor:
        """Token embedding [V, H]."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> torch.Tensor:
        """Output head [V, H]; the embedding itself where the two are tied."""
        return self.model.get_output_embeddings().weight

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a response."""
        return self.description["eos_token_ids"]


def load_target(folder: Path, device: torch.device | str, dtype: torch.dtype, layers: bool = True) -> Target:
    """Load the target prepared in `folder` (it holds `target.json`) onto `device` in `dtype`.

    Without `layers`, it has embedding and head and nothing to compute features with; no more is read.

    Raises:
        DraftflowError: the target is not prepared, or its weights are gone or do not fit its config.
    """
    folder = Path(folder)
    try:
        description = json.loads((folder / "target.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DraftflowError(
            "The target is not prepared.", "Run `snakemake dataset`, which prepares it.", str(folder / "target.json")
        ) from None
    weights = folder / description["weights"]["path"]  # an absolute path stays what it is
    if not weights.is_dir():
        raise DraftflowError(
            "The weights of the target are gone.",
            f"Put them back, or delete {folder / 'target.json'} so that the target is prepared again.",
            str(weights),
        )
    config = AutoConfig.from_pretrained(weights, local_files_only=True)
    if not layers:
        config.num_hidden_layers = 0
    # a bar of weights is noise in a log, and so are the tensors that are left where they are
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model, report = AutoModelForCausalLM.from_pretrained(
        weights,
        config=config,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        output_loading_info=True,
    )
    if report["missing_keys"] or report["mismatched_keys"]:
        names = sorted(str(name) for name in [*report["missing_keys"], *report["mismatched_keys"]])
        raise DraftflowError(
            f"{len(names)} tensors of the target are missing or of the wrong shape, {names[0]} among them.",
            "Fetch the target again; its weights are not whole.",
            str(weights),
        )
    # A target's own sampling defaults (temperature, repetition penalty) would change what `generate` calls greedy.
    eos = description["eos_token_ids"]
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[0] if eos else 0)
    return Target(model.to(device).eval().requires_grad_(False), description)
