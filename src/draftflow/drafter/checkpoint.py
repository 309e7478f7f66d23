"""The native checkpoint format of DFlash drafters: config.json and model.safetensors, as PyPI `dflash`, SGLang and vLLM
read it. Servers ignore a tensor whose name they do not know, or one that is missing,
so names and shapes are checked here, both ways.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftflow.drafter.model import Drafter
from draftflow.drafter.shape import DrafterShape
from draftflow.errors import DraftflowError
from draftflow.stage import write_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def native_config(shape: DrafterShape, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """`config.json` of a drafter: a Qwen3 config with what DFlash adds.

    RoPE stands in it twice, as transformers 5 writes it and as older loaders read it; the block size twice as well.

    `is_causal` holds for all layers, and where it is null servers take sliding layers for causal and full ones for
    not. So it is explicit where that is one answer, and null where causal sliding layers stand beside full ones.
    `dflash_config.causal` says the same to servers that do not know `is_causal`.
    """
    sliding = shape.sliding_layers
    causal: bool | None = False
    if sliding and shape.sliding_causal:
        causal = True if len(sliding) == shape.layers else None
    scaling = {key: value for key, value in shape.rope_parameters.items() if key != "rope_theta"}
    eos = list(shape.eos_token_ids)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": shape.block_size,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            **({} if causal is None else {"causal": causal}),
        },
        "num_target_layers": shape.num_target_layers,
        "is_causal": causal,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": dict(shape.rope_parameters),
        "rope_theta": shape.rope_theta,
        "rope_scaling": None if shape.rope_parameters["rope_type"] == "default" else scaling,
        "layer_types": [f"{'sliding' if i in sliding else 'full'}_attention" for i in range(shape.layers)],
        "sliding_window": shape.sliding_window,
        "use_sliding_window": bool(sliding),
        "max_window_layers": shape.layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def shape_of(config: dict[str, Any]) -> DrafterShape:
    """The shape that `native_config` wrote."""
    eos = config["eos_token_id"]
    sliding = tuple(i for i, kind in enumerate(config["layer_types"]) if kind == "sliding_attention")
    return DrafterShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=config["rope_parameters"],
        max_position_embeddings=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        block_size=config["dflash_config"]["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        num_target_layers=config["num_target_layers"],
        bos_token_id=config["bos_token_id"],
        eos_token_ids=tuple([] if eos is None else [eos] if isinstance(eos, int) else eos),
        sliding_window=config["sliding_window"],
        sliding_layers=sliding,
        sliding_causal=not sliding or config["is_causal"] is not False,
    )


def expected_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint: 3 and 11 per layer, no embedding, no head."""
    hidden, middle, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.heads * dim, shape.kv_heads * dim
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    return {
        "fc.weight": (hidden, len(shape.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **{f"layers.{i}.{name}.weight": size for i in range(shape.layers) for name, size in layer.items()},
    }


def export(
    drafter: Drafter,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a drafter in the native format, each file whole or not at all, the config last.

    Args:
        folder: made if it does not exist.
        dtype: of the weights in the file.
        extra: provenance, written to config.json under `draftflow`.
    """
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in drafter.state_dict().items()}
    _require_exact(tensors, drafter.shape, "the drafter")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS}.{os.getpid()}"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.replace(folder / WEIGHTS)
    finally:
        temporary.unlink(missing_ok=True)
    config = native_config(drafter.shape, dtype)
    write_json(folder / CONFIG, config if extra is None else {**config, "draftflow": extra})


def load(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Drafter:
    """Read a drafter that `export` wrote; its parameters in `dtype`, in evaluation mode.

    Raises:
        DraftflowError: a file is missing, or tensors are missing, unexpected or of another shape.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise DraftflowError(f"there is no {name}.", "Name a folder that export_drafter wrote.", str(folder))
    shape = shape_of(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    tensors = load_file(folder / WEIGHTS)
    _require_exact(tensors, shape, str(folder / WEIGHTS))
    drafter = Drafter(shape).to(device=device, dtype=dtype)
    drafter.load_state_dict(tensors)
    return drafter.eval()


def _require_exact(tensors: dict[str, torch.Tensor], shape: DrafterShape, where: str) -> None:
    expected = expected_tensors(shape)
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in expected]
    problems += [
        f"{name} is {list(value.shape)}, not {list(expected[name])}"
        for name, value in tensors.items()
        if name in expected and tuple(value.shape) != expected[name]
    ]
    if problems:
        raise DraftflowError(
            f"tensors do not fit the configuration: {', '.join(problems)}.",
            "Export the drafter again from its training checkpoint.",
            where,
        )
