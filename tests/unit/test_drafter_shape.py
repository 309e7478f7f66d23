import pytest

from draftflow.drafter.shape import DrafterShape
from draftflow.errors import DraftflowError

TARGET = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_ids": [2],
    "mask_token_id_auto": 16,
}
SETTINGS = {"layers": 2, "block_size": 8, "taps": 5, "target_layers": None, "mask_token": "auto"}


def test_shape_is_the_targets_but_for_layers_and_block():
    shape = DrafterShape.from_target(TARGET, SETTINGS)
    assert (shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim) == (576, 9, 3, 64)
    assert (shape.layers, shape.block_size, shape.mask_token_id) == (2, 8, 16)
    assert shape.target_layer_ids == (1, 8, 14, 20, 27)
    assert shape.num_target_layers == 30
    assert shape.rope_theta == 100000.0


def test_named_layers_and_mask_token_are_taken():
    shape = DrafterShape.from_target(TARGET, {**SETTINGS, "target_layers": [0, 28], "mask_token": 49151})
    assert shape.target_layer_ids == (0, 28)
    assert shape.mask_token_id == 49151


@pytest.mark.parametrize("token", [-1, 49152])
def test_mask_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(DraftflowError, match=f"drafter.mask_token: mask token {token} .* between 0 and 49151"):
        DrafterShape.from_target(TARGET, {**SETTINGS, "mask_token": token})


def test_auto_without_an_unused_token_is_refused():
    with pytest.raises(DraftflowError, match=r"drafter\.mask_token"):
        DrafterShape.from_target({**TARGET, "mask_token_id_auto": None}, SETTINGS)


@pytest.mark.parametrize("layers", [[], [-1], [29], [30], [3, 3], [4, 2]])
def test_target_layers_out_of_range_repeated_or_unordered_are_refused(layers):
    with pytest.raises(DraftflowError, match=r"drafter\.target_layers"):
        DrafterShape.from_target(TARGET, {**SETTINGS, "target_layers": layers})


def test_more_taps_than_layers_are_refused():
    with pytest.raises(DraftflowError, match=r"drafter\.taps"):
        DrafterShape.from_target({**TARGET, "num_hidden_layers": 6}, SETTINGS)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
)
def test_rope_that_a_drafter_cannot_have_is_refused(parameters):
    with pytest.raises(DraftflowError, match=r"target\.source"):
        DrafterShape.from_target({**TARGET, "rope_parameters": parameters}, SETTINGS)


def test_without_a_window_no_layer_slides():
    shape = DrafterShape.from_target(TARGET, {**SETTINGS, "sliding_window": None, "sliding_causal": False})
    assert (shape.sliding_window, shape.sliding_layers, shape.sliding_causal) == (None, (), True)
    assert shape == DrafterShape.from_target(TARGET, SETTINGS)


def test_with_a_window_all_layers_but_the_last_slide_and_are_causal():
    shape = DrafterShape.from_target(TARGET, {**SETTINGS, "layers": 5, "sliding_window": 2048})
    assert (shape.sliding_window, shape.sliding_layers, shape.sliding_causal) == (2048, (0, 1, 2, 3), True)


def test_named_sliding_layers_and_both_directions_are_taken():
    settings = {**SETTINGS, "sliding_window": 8, "sliding_layers": [1], "sliding_causal": False}
    shape = DrafterShape.from_target(TARGET, settings)
    assert (shape.sliding_window, shape.sliding_layers, shape.sliding_causal) == (8, (1,), False)


def test_window_smaller_than_a_block_is_refused():
    with pytest.raises(DraftflowError, match=r"drafter\.sliding_window: a window of 7 tokens .* block of 8"):
        DrafterShape.from_target(TARGET, {**SETTINGS, "sliding_window": 7})


@pytest.mark.parametrize("layers", [[], [-1], [2], [1, 1], [1, 0]])
def test_sliding_layers_out_of_range_repeated_or_unordered_are_refused(layers):
    with pytest.raises(DraftflowError, match=r"drafter\.sliding_layers"):
        DrafterShape.from_target(TARGET, {**SETTINGS, "sliding_window": 64, "sliding_layers": layers})


def test_a_window_for_the_only_layer_wants_the_layer_named():
    settings = {**SETTINGS, "layers": 1, "sliding_window": 64}
    with pytest.raises(DraftflowError, match=r"drafter\.sliding_layers: .* a drafter of 1\..*0 to 0"):
        DrafterShape.from_target(TARGET, settings)
    assert DrafterShape.from_target(TARGET, {**settings, "sliding_layers": [0]}).sliding_layers == (0,)


def test_sliding_layers_without_a_window_are_refused():
    with pytest.raises(DraftflowError, match=r"drafter\.sliding_layers: .*\[0\] have no window"):
        DrafterShape.from_target(TARGET, {**SETTINGS, "sliding_layers": [0]})
