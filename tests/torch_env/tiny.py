"""A tiny, randomly initialised target in Hugging Face form, for tests: `python tests/torch_env/tiny.py FOLDER`.

Made without torch (weights are drawn by numpy), so that it works in every environment of the pipeline. Eight layers:
the fewest at which five evenly spread taps are distinct. The vocabulary has 384 tokens and the embedding 400 rows, so
that a row is left for the mask token.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS, ROWS = 384, 400
TEXT = """The quick brown fox jumps over the lazy dog. How many apples are there? There are twelve apples in the box.
Write a function that returns the sum of two numbers. def add(a, b): return a + b
Explain why the sky is blue. You are a helpful assistant. Please answer the question in one short sentence."""


def make_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 384 tokens; the first three are special, `<|im_end|>` (2) ends a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=chat_template
    )


def make_config(kind: str = "llama", layers: int = 8) -> dict:
    """`config.json` of a tiny Llama, Qwen2 or Qwen3."""
    return {
        "architectures": [
            {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
        ],
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 1024,
        "vocab_size": ROWS,
        "tie_word_embeddings": kind == "llama",
        "eos_token_id": 2,
        "dtype": "float32",
    }


def make_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """fp32 tensors by their Hugging Face names: norms near one, matrices large enough for varied greedy text."""
    generator = np.random.default_rng(seed)
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def matrix(*shape: int) -> np.ndarray:
        return generator.normal(0.0, 0.12, shape).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return generator.normal(1.0, 0.05, size).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": norm(hidden)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        weights[f"{layer}.input_layernorm.weight"] = norm(hidden)
        weights[f"{layer}.post_attention_layernorm.weight"] = norm(hidden)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = matrix(size, hidden)
            if config["model_type"] == "qwen2":
                weights[f"{layer}.self_attn.{name}_proj.bias"] = matrix(size)
        weights[f"{layer}.self_attn.o_proj.weight"] = matrix(hidden, queries)
        if config["model_type"] == "qwen3":
            weights[f"{layer}.self_attn.q_norm.weight"] = norm(config["head_dim"])
            weights[f"{layer}.self_attn.k_norm.weight"] = norm(config["head_dim"])
        weights[f"{layer}.mlp.gate_proj.weight"] = matrix(middle, hidden)
        weights[f"{layer}.mlp.up_proj.weight"] = matrix(middle, hidden)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(hidden, middle)
    return weights


def make_target(folder: Path, kind: str = "llama", layers: int = 8, seed: int = 0, **changes: Any) -> Path:
    """Write config (with `changes`), weights and tokenizer to `folder`, as a user's own folder of a target has them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**make_config(kind, layers), **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(make_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=["llama", "qwen2", "qwen3"], default="llama")
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    make_target(arguments.folder, arguments.kind, arguments.layers)
