"""Targets of real shapes with random weights, prepared as the pipeline prepares one: for timing, not for training.

A target has fewer layers than its model: what is compiled and timed is the drafter, which takes from a target its
width, heads, vocabulary and head, and the tapped features.
"""

import json
from pathlib import Path
from typing import Any

import torch
from target_shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from draftflow.target.load import Target

# The fewest at which five evenly spread taps are distinct
LAYERS = 8


def make_target(folder: Path, name: str, layers: int = LAYERS) -> Path:
    """Write a prepared target (target.json, config and bf16 weights) of a shape of `SHAPES`; returns `folder`."""
    facts = _facts(name, layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    weights = folder / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    (weights / "config.json").write_text(json.dumps(facts))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights), dtype=torch.bfloat16)
    model.save_pretrained(weights)
    (folder / "target.json").write_text(json.dumps(_description(name, facts)))
    return folder


def random_target(name: str, layers: int, device: torch.device, dtype: torch.dtype) -> Target:
    """What `load_target` gives for a target of `make_target`, without a file in between."""
    facts = _facts(name, layers)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts), dtype=dtype, attn_implementation="sdpa")
    return Target(model.eval().requires_grad_(False), _description(name, facts))


def _facts(name: str, layers: int) -> dict[str, Any]:
    """`config.json`."""
    return {**SHAPES[name]["config"], "num_hidden_layers": layers, "eos_token_id": 2, "bos_token_id": 1}


def _description(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """`target.json`."""
    kept = {name: facts[name] for name in facts if name not in ("model_type", "architectures", "eos_token_id")}
    return kept | {
        "source": f"random weights of {name}'s shape, {facts['num_hidden_layers']} layers",
        "architecture": facts["model_type"],
        "eos_token_ids": [2],
        "mask_token_id_auto": facts["vocab_size"] - 1,
        "weights": {"kind": "folder", "path": "weights"},
        "sha256": "random",
    }


def step_settings(name: str, kind: str, slug: str, ids: list[int]) -> dict[str, Any]:
    """Settings of warm-up for a shape of `SHAPES`, as the workflow gives them."""
    step = SHAPES[name]["step"]
    return {
        "drafter": {
            "layers": 5,
            "block_size": step["block_size"],
            "taps": 5,
            "target_layers": None,
            "mask_token": "auto",
        },
        "row_length": step["row_length"],
        "rows_per_step": step["rows_per_step"] * len(ids),
        "anchors_per_row": step["anchors_per_row"],
        "precision": "auto",
        "devices": {"kind": kind, "ids": ids, "slug": slug},
    }
