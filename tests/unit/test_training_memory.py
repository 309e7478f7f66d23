from dataclasses import replace

import pytest

from draftflow.training.memory import dense_scores_bytes, drafter_parameters, step_bound
from draftflow.training.plan import Plan

QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layers": 5,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "block_size": 16,
    "target_layer_ids": [1, 9, 17, 25, 33],
}
PLAN = Plan("cuda", "bfloat16", 1, 3072, 512, 16, 1760, QWEN3_8B)


def test_the_parameters_of_a_drafter_at_the_shape_of_qwen3_8b():
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 2 * 128 + 3 * 4096 * 12288 + 2 * 4096
    assert drafter_parameters(QWEN3_8B) == 5 * 4096 * 4096 + 5 * layer + 2 * 4096


def test_the_bound_is_the_sum_of_its_parts_and_grows_with_what_a_step_holds():
    bound = step_bound(PLAN, target_bytes=1000)
    assert bound.pop("total") == sum(bound.values())
    assert bound["target_weights"] == 1000
    assert bound["drafter_weights"] == (4 + 4 + 4 + 2 + 2) * drafter_parameters(QWEN3_8B)
    assert bound["float8"] == 0
    in_float8 = step_bound(replace(PLAN, float8=True), 1000)
    assert in_float8["float8"] > 2 * drafter_parameters(QWEN3_8B)
    longer = step_bound(Plan("cuda", "bfloat16", 1, 6144, 512, 16, 1760, QWEN3_8B), 1000)
    assert longer["features"] == 2 * bound["features"]


def test_gradients_that_are_summed_over_ranks_together_are_there_twice():
    assert step_bound(PLAN, 0)["sums"] == 0  # each of them is large, the smallest 8 MiB
    few = replace(PLAN, anchors=64)  # a step that is replayed
    assert step_bound(few, 0)["sums"] == 2 * drafter_parameters(QWEN3_8B)
    # as many heads for keys as for queries: four small matrices of a size, three large ones, and fc
    sizes = {"hidden_size": 1024, "heads": 8, "intermediate_size": 8192}
    small = replace(PLAN, rows=64, drafter={**QWEN3_8B, **sizes})
    assert step_bound(small, 0)["sums"] == 2 * 5 * 4 * 1024 * 1024


@pytest.mark.parametrize(("heads", "expected"), [(32, 32 * 8192 * 11264 * 4), (16, 16 * 8192 * 11264 * 4)])
def test_the_scores_of_dense_attention_alone_are_larger_than_a_layer_s_share_of_the_bound(heads, expected):
    plan = Plan("cuda", "bfloat16", 1, 3072, 512, 16, 1760, {**QWEN3_8B, "heads": heads})
    assert dense_scores_bytes(plan) == expected
    assert expected > step_bound(plan, 0)["activations"] / 5
