"""Sizes of real targets, and settings of a step that suit them. No torch."""

from typing import Any

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
# what the sizes of Qwen3 have in common
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "tie_word_embeddings": False,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
# one row of the length, with the anchors and the block, of the DFlash paper
PAPER = {"row_length": 3072, "rows_per_step": 1, "anchors_per_row": 512, "block_size": 16}

# `config.json` of the models, but for the number of layers, which stands beside; and the settings of a step that suits
# them
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "layers": 30,
        "config": LLAMA
        | {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        },
        "step": {"row_length": 256, "rows_per_step": 8, "anchors_per_row": 32, "block_size": 8},
        # for trainers that take one row at a time
        "one_row": {"row_length": 2048, "rows_per_step": 1, "anchors_per_row": 256},
    },
    "qwen3-4b": {
        "layers": 36,
        "config": QWEN3
        | {
            "tie_word_embeddings": True,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
        },
        "step": PAPER,
    },
    "qwen3-8b": {
        "layers": 36,
        "config": QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
        },
        "step": PAPER,
    },
    "qwen3-32b": {
        "layers": 64,
        "config": QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_attention_heads": 64,
        },
        "step": PAPER,
    },
    # of no model: to see on a CPU that a benchmark runs
    "tiny": {
        "layers": 8,
        "config": QWEN3
        | {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "vocab_size": 384,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "step": {"row_length": 128, "rows_per_step": 1, "anchors_per_row": 8, "block_size": 8},
    },
}
