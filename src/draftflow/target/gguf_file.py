"""A GGUF file as an ordinary Hugging Face folder: config, dequantized fp32 weights and tokenizer, without torch.

transformers reads a GGUF by itself, but takes 10 s for one of 135M parameters (it reads the vocabulary twice and builds
the table of names once per module), in every process, and needs torch even for the tokenizer. Here its tables and its
tensor transformations, and gguf's dequantization, are applied once. The numbers are the same, and loading the result
takes under a second. fp32, since that is what dequantization gives: 4 bytes per parameter on disk.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING, GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from draftflow.errors import DraftflowError
from draftflow.target.files import write_tensors

SHARD_BYTES = 4 * 2**30

# Architectures, and the pre-tokenizers of their files that transformers' conversion reproduces.
PRE_TOKENIZERS = {"llama": ["smollm"], "qwen2": ["qwen2"], "qwen3": ["qwen2"]}
BIASES = {"llama": [], "qwen2": ["attn_q", "attn_k", "attn_v"], "qwen3": []}
CONTROL, USER_DEFINED, UNUSED = (int(gguf.TokenType[name]) for name in ("CONTROL", "USER_DEFINED", "UNUSED"))


class GgufFile:
    """A GGUF file of a Llama, Qwen2 or Qwen3.

    Raises:
        DraftflowError: the file is not a whole GGUF file, or of another architecture.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
            raise DraftflowError(
                f"Not a whole GGUF file ({error}).", "Download it again, or name another file.", str(path)
            ) from None
        self._metadata = {name: field.contents() for name, field in self._reader.fields.items()}
        self.architecture = str(self._metadata.get("general.architecture"))
        if self.architecture not in PRE_TOKENIZERS:
            raise self._refusal(f"The architecture is {self.architecture}; {', '.join(PRE_TOKENIZERS)} can be targets.")

    def _refusal(self, what: str) -> DraftflowError:
        return DraftflowError(
            what, "Take the safetensors form of the model (a folder or a hub id) as target.source.", str(self.path)
        )

    def config(self) -> dict[str, Any]:
        """`config.json`, with special token ids, tied embeddings and vocabulary size as the file has them."""
        architecture, metadata = self.architecture, self._metadata
        if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
            raise self._refusal("The file scales RoPE, and its scaling is not read from GGUF.")
        names = {tensor.name: tensor for tensor in self._reader.tensors}
        config = {
            name: metadata[f"{architecture}.{key}"]
            for key, name in {**GGUF_CONFIG_MAPPING[architecture], "attention.key_length": "head_dim"}.items()
            if name is not None and f"{architecture}.{key}" in metadata
        }
        return config | {
            "model_type": architecture,
            "vocab_size": int(names["token_embd.weight"].shape[1]),
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.eos_token_ids(),
            "dtype": "float32",
        }

    def eos_token_ids(self) -> list[int]:
        """End of text and end of turn."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return sorted({self._metadata[key] for key in keys if key in self._metadata})

    def write_model(self, folder: Path) -> None:
        """Write `config.json` and the weights in safetensors shards to `folder`."""
        config = self.config()
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        index: dict[str, str] = {}
        shard: dict[str, np.ndarray] = {}

        def write_shard() -> None:
            name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            write_tensors(folder / name, shard, {"format": "pt"})
            index.update(dict.fromkeys(shard, name))
            shard.clear()

        for name, values in self._tensors(config):
            if sum(tensor.nbytes for tensor in shard.values()) + values.nbytes > SHARD_BYTES:
                write_shard()
            shard[name] = values
        write_shard()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}) + "\n")

    def _tensors(self, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
        """Hugging Face names and fp32 values of all tensors, each exactly once."""
        expected = self._names(config)
        processor = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)(config=config)
        for tensor in self._reader.tensors:
            name = expected.pop(tensor.name, None)
            if name is None:
                raise self._refusal(f"Tensor {tensor.name} has no place in a {self.architecture}.")
            try:
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise self._refusal(f"Tensors of type {tensor.tensor_type.name} cannot be dequantized.") from None
            values = processor.process(weights=values, name=tensor.name).weights
            yield name, np.ascontiguousarray(values, dtype=np.float32)
        if expected:
            raise self._refusal(f"Tensor {min(expected)} is missing.")

    def _names(self, config: dict[str, Any]) -> dict[str, str]:
        """GGUF name -> Hugging Face name of every tensor of the architecture."""
        model = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == self.architecture)
        table = gguf.get_tensor_name_map(model, config["num_hidden_layers"])
        projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
            f"mlp.{name}_proj" for name in ("gate", "up", "down")
        ]
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.architecture == "qwen3":
            norms += ["self_attn.q_norm", "self_attn.k_norm"]
        modules = ["model.embed_tokens", "model.norm"] + ([] if config["tie_word_embeddings"] else ["lm_head"])
        for index in range(config["num_hidden_layers"]):
            modules += [f"model.layers.{index}.{name}" for name in projections + norms]
        names = {}
        for module in modules:
            short = table.get_name(module)
            names[f"{short}.weight"] = f"{module}.weight"
            if short.rpartition(".")[2] in BIASES[self.architecture]:
                names[f"{short}.bias"] = f"{module}.bias"
        return names

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, as transformers converts it, with the special tokens and chat template of the file."""
        metadata = self._metadata
        kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if kind != "gpt2" or pre not in PRE_TOKENIZERS[self.architecture]:
            raise DraftflowError(
                f"The tokenizer in the file ({kind}, {pre}) cannot be converted exactly.",
                "Put the model's tokenizer.json and tokenizer_config.json beside the file.",
                str(self.path),
            )
        settings = {
            name: metadata[f"tokenizer.{key}"]
            for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
            # the conversion only mixes these two up; they are set below
            if f"tokenizer.{key}" in metadata and name not in ("bos_token_id", "eos_token_id")
        }
        settings["add_prefix_space"] = False  # what llama.cpp does for byte-level BPE, whether the file says so or not
        tokens = settings["tokens"]
        types = settings["token_type"] = np.array(settings["token_type"])
        # Rows that only fill the embedding up are named in the file; without names they are free for the mask token.
        used = int(np.flatnonzero(types != UNUSED)[-1]) + 1
        settings["tokens"], settings["token_type"] = tokens[:used], types[:used]
        backend, _ = convert_gguf_tokenizer(self.architecture, settings)
        for token_type, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
            add([AddedToken(tokens[index], normalized=False) for index in np.flatnonzero(types[:used] == token_type)])
        special = {
            name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in (
                ("bos_token", "bos"),
                ("eos_token", "eos"),
                ("unk_token", "unknown"),
                ("pad_token", "padding"),
            )
            if f"tokenizer.ggml.{key}_token_id" in metadata
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), **special
        )
