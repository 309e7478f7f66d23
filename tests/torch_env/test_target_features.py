import pytest

pytest.importorskip("torch")

import torch
from tiny import TOKENS, make_target

from draftflow.errors import DraftflowError
from draftflow.stage import Record
from draftflow.target.features import FeatureExtractor, tap_layers
from draftflow.target.load import load_target
from draftflow.target.prepare import prepare

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Each document is computed at another place of another batch than in the reference, which changes only the order of
# sums; hidden states here are of the order of 10.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folders = {}
    for kind in ("llama", "qwen2", "qwen3"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        source = make_target(folders[kind] / "model", kind)
        prepare({"source": str(source)}, None, folders[kind], Record("prepare_target"))
    return folders


def load(folder, device="cpu", dtype=torch.float32):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return load_target(folder, device, dtype)


def packed(device="cpu"):
    """Two rows of 24: documents of 9 and 11 tokens with padding; one of 24. (ids, document ids, positions)."""
    ids = torch.randint(0, TOKENS, (2, 24), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 9 + [1] * 11 + [-1] * 4, [0] * 24])
    positions = torch.tensor([[*range(9), *range(11), 0, 0, 0, 0], [*range(24)]])
    return ids.to(device), documents.to(device), positions.to(device)


def reference(target, ids, documents, layer_ids):
    """`output_hidden_states` of the whole model on each document alone, where the document lies in the row."""
    result = torch.full((*ids.shape, len(layer_ids) * target.embed_weight.shape[1]), float("nan"), device=ids.device)
    for row in range(len(ids)):
        for document in range(int(documents[row].max()) + 1):
            at = documents[row] == document
            with torch.no_grad():
                states = target.model(ids[row][at][None], output_hidden_states=True).hidden_states
            result[row, at] = torch.cat([states[layer + 1][0] for layer in layer_ids], dim=-1)
    return result


def test_taps_are_those_of_the_reference():
    assert tap_layers(36, 5) == [1, 9, 17, 25, 33]
    assert tap_layers(64, 5) == [1, 16, 31, 46, 61]
    assert tap_layers(30, 1) == [15]
    assert tap_layers(8, 5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("layers", "taps"), [(7, 5), (6, 4), (3, 2), (4, 2)])
def test_too_few_layers_for_the_taps_are_refused(layers, taps):
    with pytest.raises(DraftflowError, match=rf"drafter\.taps: A target of {layers} layers has no {taps}"):
        tap_layers(layers, taps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layer_ids", [[1, 2, 3, 4, 5], [0], [5, 2], [3, 7]])
def test_features_equal_hidden_states_of_each_document_alone(prepared, kind, layer_ids, device):
    target = load(prepared[kind], device)
    ids, documents, positions = packed(device)
    features = FeatureExtractor(target, layer_ids)(ids, documents, positions)
    expected = reference(target, ids, documents, layer_ids)
    real = documents >= 0
    assert features.shape == expected.shape
    assert (features[real] - expected[real]).abs().max() < TOLERANCE
    assert torch.isfinite(features).all()  # padding as well
    assert not features.requires_grad


def test_features_are_sensitive_to_the_layer(prepared):
    target = load(prepared["llama"])
    ids, documents, positions = packed()
    off_by_one = reference(target, ids, documents, [2])
    difference = FeatureExtractor(target, [1])(ids, documents, positions) - off_by_one
    assert difference[documents >= 0].abs().max() > 100 * TOLERANCE


def test_no_token_changes_what_another_document_or_an_earlier_token_sees(prepared):
    target = load(prepared["qwen3"])
    extract = FeatureExtractor(target, [1, 5])
    ids, documents, positions = packed()
    before = extract(ids, documents, positions)
    changed = ids.clone()
    changed[0, 12] = (ids[0, 12] + 1) % TOKENS
    difference = (extract(changed, documents, positions) - before).abs().amax(-1)
    assert difference[0, 12:20].min() > 0
    assert difference[0, :12].max() == 0
    assert difference[0, 20:].max() == 0
    assert difference[1].max() == 0


def test_layers_after_the_last_tap_and_the_head_do_not_run(prepared):
    target = load(prepared["llama"])
    ran = []
    for index, layer in enumerate(target.model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    target.model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    FeatureExtractor(target, [1, 4])(*packed())
    assert ran == [0, 1, 2, 3, 4]


def test_features_have_the_target_s_dtype(prepared):
    target = load(prepared["llama"], dtype=torch.bfloat16)
    features = FeatureExtractor(target, [1, 4])(*packed())
    assert features.dtype == torch.bfloat16
    assert torch.isfinite(features).all()
