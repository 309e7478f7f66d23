import pytest

pytest.importorskip("torch")

import torch
from tiny import TOKENS, make_config, make_target
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftflow.errors import DraftflowError
from draftflow.stage import Record
from draftflow.target import attention
from draftflow.target.attending import attending
from draftflow.target.attention import NAME, documents_of, packed_attention
from draftflow.target.decoding import decoding_attention
from draftflow.target.features import FeatureExtractor, tap_layers
from draftflow.target.load import Target, load_target
from draftflow.target.prepare import ARCHITECTURES, prepare

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Each document is computed at another place of another batch than in the reference, which changes only the order of
# sums; hidden states here are of the order of 10.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folders = {}
    for kind in ARCHITECTURES:
        folders[kind] = tmp_path_factory.mktemp(kind)
        source = make_target(folders[kind] / "model", kind)
        prepare({"source": str(source)}, None, folders[kind], Record("prepare_target"))
    return folders


def load(folder, device="cpu", dtype=torch.float32):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return load_target(folder, device, dtype)


def packed_rows(device="cpu"):
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
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("layer_ids", [[1, 2, 3, 4, 5], [0], [5, 2], [3, 7]])
def test_features_equal_hidden_states_of_each_document_alone(prepared, kind, layer_ids, device):
    target = load(prepared[kind], device)
    ids, documents, positions = packed_rows(device)
    features = FeatureExtractor(target, layer_ids)(ids, documents, positions)
    expected = reference(target, ids, documents, layer_ids)
    real = documents >= 0
    assert features.shape == expected.shape
    assert (features[real] - expected[real]).abs().max() < TOLERANCE
    assert torch.isfinite(features).all()  # padding as well
    assert not features.requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [1, 4, 10, 11, 30])  # within, at and beyond the documents of 9, 11 and 24 tokens
def test_sliding_layers_see_their_window_of_each_document(window, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kinds = ["full_attention", "sliding_attention"] * 4
    config = AutoConfig.for_model(
        **make_config("qwen3"), layer_types=kinds, sliding_window=window, use_sliding_window=True
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().to(device)
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, window] * 4
    target = Target(model, {})
    ids, documents, positions = packed_rows(device)
    features = FeatureExtractor(target, [1, 6])(ids, documents, positions)
    real = documents >= 0
    assert (features[real] - reference(target, ids, documents, [1, 6])[real]).abs().max() < TOLERANCE


def test_features_are_sensitive_to_the_layer(prepared):
    target = load(prepared["llama"])
    ids, documents, positions = packed_rows()
    off_by_one = reference(target, ids, documents, [2])
    difference = FeatureExtractor(target, [1])(ids, documents, positions) - off_by_one
    assert difference[documents >= 0].abs().max() > 100 * TOLERANCE


def test_no_token_changes_what_another_document_or_an_earlier_token_sees(prepared):
    target = load(prepared["qwen3"])
    extract = FeatureExtractor(target, [1, 5])
    ids, documents, positions = packed_rows()
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
    FeatureExtractor(target, [1, 4])(*packed_rows())
    assert ran == [0, 1, 2, 3, 4]


def test_features_have_the_target_s_dtype(prepared):
    target = load(prepared["llama"], dtype=torch.bfloat16)
    features = FeatureExtractor(target, [1, 4])(*packed_rows())
    assert features.dtype == torch.bfloat16
    assert torch.isfinite(features).all()


def test_padding_and_every_run_of_an_id_is_a_document():
    _, documents, _ = packed_rows()
    found = documents_of(documents, torch.device("cpu"))
    assert found.bounds.tolist() == found.host_bounds.tolist() == [0, 9, 20, 24, 48]
    assert found.bounds.dtype == torch.int32
    assert found.longest == 24
    assert documents_of(torch.zeros(3, 5), torch.device("cpu")).bounds.tolist() == [0, 5, 10, 15]


def test_generation_keeps_its_own_attention(prepared):
    target = load(prepared["llama"])
    extract = FeatureExtractor(target, [1])
    extract(*packed_rows())
    assert target.model.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError):
        extract(packed_rows()[0] + TOKENS * 2, *packed_rows()[1:])
    assert target.model.config._attn_implementation == "sdpa"
    with attending(target.model.config, NAME):
        assert target.model.model.layers[0].self_attn.config._attn_implementation == "draftflow_packed"
    assert target.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("wish", "word"),
    [
        ({"attention_mask": torch.ones(1, 1, 24, 24)}, "a mask of its own"),
        ({"softcap": 30.0}, "capped scores"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
    ],
)
def test_attention_of_another_kind_is_refused(wish, word):
    states = torch.randn(1, 4, 24, 16)
    documents = documents_of(torch.zeros(1, 24), torch.device("cpu"))
    with pytest.raises(DraftflowError, match=f"Linear wants {word}"):
        packed_attention(
            torch.nn.Linear(1, 1), states, states, states, **{"attention_mask": None, **wish}, documents=documents
        )


def test_scale_and_groups_are_the_layer_s():
    query, key, value = torch.randn(2, 6, 24, 16), torch.randn(2, 3, 24, 16), torch.randn(2, 3, 24, 16)
    _, ids, _ = packed_rows()
    module, documents = torch.nn.Identity(), documents_of(ids, torch.device("cpu"))
    found, _ = packed_attention(module, query, key, value, None, documents=documents, scaling=0.7)
    seen = (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(24, 24, dtype=torch.bool).tril()
    scores = 0.7 * query @ key.repeat_interleave(2, dim=1).transpose(-1, -2)
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(2, dim=1)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize(("heads", "tokens"), [((6, 2), 1), ((6, 6), 1), ((6, 1), 1), ((6, 2), 5)])
@pytest.mark.parametrize("masked", [True, False])
def test_decoding_attention_is_that_of_transformers(heads, tokens, masked):
    module = torch.nn.Identity()
    module.num_key_value_groups = heads[0] // heads[1]
    query, key, value = torch.randn(3, heads[0], tokens, 16), *torch.randn(2, 3, heads[1], 12, 16)
    mask = torch.ones(3, 1, tokens, 12, dtype=torch.bool).tril(12 - tokens) if masked else None
    if masked:
        mask[1, ..., :5] = False  # padding on the left
        mask[2, ..., :11] = False
        mask[2, ..., -1] = True
    found, _ = decoding_attention(module, query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert found.shape == (3, tokens, heads[0], 16)
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_mask_of_each_head_is_kept():
    module = torch.nn.Identity()
    module.num_key_value_groups = 3
    query, key, value = torch.randn(2, 6, 1, 16), *torch.randn(2, 2, 2, 12, 16)
    mask = torch.rand(2, 6, 1, 12) < 0.5
    mask[..., 0] = True
    found, _ = decoding_attention(module, query, key, value, mask)
    assert torch.equal(found, sdpa_attention_forward(module, query, key, value, mask)[0])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_one_compiled_graph_serves_all_layers_and_documents(prepared, kind):
    target = load(prepared[kind])
    eager, compiled = FeatureExtractor(target, [1, 5]), FeatureExtractor(target, [1, 5])
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled.compile_layers()
    ids, documents, positions = packed_rows()
    others = torch.tensor([[0] * 12 + [1] * 12, [0] * 8 + [1] * 8 + [2] * 8])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids_of in (documents, others, documents * 0, others.flip(1), torch.arange(24).expand(2, -1)):
            found, expected = compiled(ids, ids_of, positions), eager(ids, ids_of, positions)
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0.0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs == 1


def test_the_kernel_of_this_torch_takes_what_it_is_given(monkeypatch):
    monkeypatch.setattr(attention, "flash_serves", lambda *_: True)
    documents = documents_of(packed_rows()[1], torch.device("meta"))
    query, key = torch.empty(48, 6, 64, device="meta"), torch.empty(48, 3, 64, device="meta")
    assert attention._on_gpu(query, key, key, *documents, scale=0.1, window=8).shape == query.shape
