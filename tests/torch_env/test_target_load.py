import json

import pytest

pytest.importorskip("torch")

import torch
from safetensors.numpy import load_file, save_file
from tiny import make_target, make_weights

from draftflow.errors import DraftflowError
from draftflow.stage import Record
from draftflow.target.load import load_target
from draftflow.target.prepare import prepare


@pytest.fixture
def prepared(tmp_path):
    def make(kind="llama"):
        source = make_target(tmp_path / "model", kind)
        prepare({"source": str(source)}, None, tmp_path / "target", Record("prepare_target"))
        return source, tmp_path / "target"

    return make


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_target_is_the_folder_s_model_frozen(prepared, kind):
    source, folder = prepared(kind)
    target = load_target(folder, "cpu", torch.float32)
    weights = make_weights(json.loads((source / "config.json").read_text()))
    assert (target.embed_weight.numpy() == weights["model.embed_tokens.weight"]).all()
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    assert (target.head_weight.numpy() == head).all()
    assert target.eos_token_ids == [2]
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.model.config._attn_implementation == "sdpa"


def test_dtype_is_the_one_asked_for(prepared):
    target = load_target(prepared()[1], "cpu", torch.bfloat16)
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}


def test_sampling_defaults_of_the_source_do_not_change_greedy_decoding(prepared):
    source, folder = prepared()
    ids = torch.tensor([[1, 87, 201, 298, 351]])
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    before = load_target(folder, "cpu", torch.float32).model.generate(ids, **settings)
    (source / "generation_config.json").write_text(
        json.dumps({"repetition_penalty": 5.0, "do_sample": True, "eos_token_id": 2})
    )
    assert load_target(folder, "cpu", torch.float32).model.generate(ids, **settings).tolist() == before.tolist()


def test_missing_target_weights_and_tensors_are_refused(prepared, tmp_path):
    with pytest.raises(DraftflowError, match=r"target\.json: The target is not prepared"):
        load_target(tmp_path, "cpu", torch.float32)
    source, folder = prepared()
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DraftflowError, match=r"1 tensors .*model\.layers\.3\.mlp\.up_proj\.weight"):
        load_target(folder, "cpu", torch.float32)
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(DraftflowError, match="The weights of the target are gone"):
        load_target(folder, "cpu", torch.float32)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_without_layers_there_are_the_same_embedding_and_head(prepared, kind):
    _, folder = prepared(kind)
    whole, ends = (load_target(folder, "cpu", torch.bfloat16, layers=layers) for layers in (True, False))
    assert torch.equal(ends.embed_weight, whole.embed_weight)
    assert torch.equal(ends.head_weight, whole.head_weight)
    assert (ends.head_weight is ends.embed_weight) == (kind == "llama")
    names = [name for name, _ in ends.model.named_parameters()]
    assert names == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"][: 2 if kind == "llama" else 3]
