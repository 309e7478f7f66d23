import json

import pytest

torch = pytest.importorskip("torch")

from drafter_cases import SLIDING, tiny_shape  # noqa: E402
from safetensors.torch import load_file, safe_open, save_file  # noqa: E402

from draftflow.drafter.checkpoint import expected_tensors, export, load, native_config, shape_of  # noqa: E402
from draftflow.drafter.model import Drafter  # noqa: E402
from draftflow.errors import DraftflowError  # noqa: E402

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}


def drafter(**changes):
    return Drafter(tiny_shape(**changes), torch.Generator().manual_seed(0))


def test_five_layers_make_58_tensors():
    assert len(expected_tensors(tiny_shape(layers=5))) == 58


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_parameters": YARN}, {"eos_token_ids": (2, 7)}, {"bos_token_id": None}, *SLIDING.values()],
)
def test_config_gives_the_shape_back(changes):
    shape = tiny_shape(**changes)
    assert shape_of(json.loads(json.dumps(native_config(shape)))) == shape


def test_config_says_what_servers_read():
    config = native_config(tiny_shape(rope_parameters=YARN))
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["is_causal"] is False
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["dflash_config"]["target_layer_ids"] == [1, 3, 5]
    assert config["rope_parameters"] == YARN
    assert config["rope_theta"] == 1e6
    assert config["rope_scaling"] == {name: value for name, value in YARN.items() if name != "rope_theta"}
    assert native_config(tiny_shape())["rope_scaling"] is None


def inferred(config, layer, knows_is_causal=True):
    """Window and causality that a server takes from a config: what is said of all layers, else by the layer's type."""
    sliding = config["layer_types"][layer] == "sliding_attention"
    causal = config.get("is_causal") if knows_is_causal else None
    if causal is None:
        causal = config["dflash_config"].get("causal")
    return config["sliding_window"] if sliding else None, sliding if causal is None else causal


@pytest.mark.parametrize("changes", [{}, *SLIDING.values()], ids=["full", *SLIDING])
@pytest.mark.parametrize("knows_is_causal", [True, False])
def test_servers_infer_the_windows_and_causality_of_training(changes, knows_is_causal):
    shape = tiny_shape(**changes)
    config = native_config(shape)
    for layer in range(shape.layers):
        trained = (shape.sliding_window, shape.sliding_causal) if layer in shape.sliding_layers else (None, False)
        assert inferred(config, layer, knows_is_causal) == trained
    assert config["use_sliding_window"] is bool(shape.sliding_layers)


def test_causality_is_explicit_unless_layers_differ_in_it():
    found = {name: native_config(tiny_shape(**changes))["is_causal"] for name, changes in SLIDING.items()}
    assert found == {"mixed": None, "mixed, both directions": False, "all": True, "all, both directions": False}


@pytest.mark.parametrize("changes", SLIDING.values(), ids=SLIDING)
def test_reference_implementation_reads_windows_and_causality(tmp_path, changes):
    model = pytest.importorskip("dflash.model")
    one = drafter(**changes)
    export(one, tmp_path, torch.float32)
    reference = model.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    for number, layer in enumerate(reference.layers):
        attention, slides = layer.self_attn, number in one.shape.sliding_layers
        assert attention.sliding_window == (one.shape.sliding_window if slides else None)
        assert attention.is_causal is (slides and one.shape.sliding_causal)


def test_export_and_load_give_the_same_drafter(tmp_path):
    one = drafter()
    export(one, tmp_path / "drafter", torch.float32, {"env_id": "torch-2.11.0"})
    other = load(tmp_path / "drafter", "cpu", torch.float32)
    assert other.shape == one.shape
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in other.state_dict().items())
    assert not other.training
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "drafter/config.json").read_text())["draftflow"] == {"env_id": "torch-2.11.0"}


def test_default_file_is_bf16_and_says_so(tmp_path):
    export(drafter(), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_reference_implementation_loads_every_tensor(tmp_path):
    model = pytest.importorskip("dflash.model")
    one = drafter(rope_parameters=YARN)
    export(one, tmp_path, torch.float32)
    reference, report = model.DFlashDraftModel.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (reference.block_size, reference.mask_token_id) == (8, 95)
    assert reference.target_layer_ids == [1, 3, 5]
    assert not any(layer.self_attn.is_causal for layer in reference.layers)
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in reference.state_dict().items())


def damaged(folder, change):
    export(drafter(), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("fc.weight"), r"missing fc\.weight"),
        (lambda tensors: tensors.update(embed=torch.ones(1)), "unexpected embed"),
        (
            lambda tensors: tensors.update({"norm.weight": torch.ones(63)}),
            r"norm\.weight is \[63\], not \[64\]",
        ),
    ],
)
def test_file_with_other_tensors_is_refused_by_name(tmp_path, change, message):
    damaged(tmp_path, change)
    with pytest.raises(DraftflowError, match=message):
        load(tmp_path, "cpu", torch.float32)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_refused(tmp_path, name):
    export(drafter(), tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DraftflowError, match=f"there is no {name}"):
        load(tmp_path, "cpu", torch.float32)


def test_interrupted_export_leaves_no_half_file(tmp_path, monkeypatch):
    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftflow.drafter.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="No space"):
        export(drafter(), tmp_path)
    assert list(tmp_path.iterdir()) == []
