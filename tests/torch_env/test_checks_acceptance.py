"""Statistics of acceptance, against counts done by hand."""

import pytest

np = pytest.importorskip("numpy")

from draftflow.checks.acceptance import acceptance_length, bootstrap_interval  # noqa: E402


def test_acceptance_length_is_all_tokens_over_all_blocks():
    assert acceptance_length([[1, 3], [2], []]) == pytest.approx(6 / 3)


def test_no_block_at_all_is_no_gain():
    assert acceptance_length([[], []]) == 0
    assert bootstrap_interval([[]]).lower == 0


def test_the_interval_of_equal_prompts_is_a_point():
    interval = bootstrap_interval([[2, 1]] * 10)
    assert (interval.lower, interval.upper) == pytest.approx((1.5, 1.5))


def test_the_interval_is_that_of_a_slow_reference():
    rng = np.random.default_rng(3)
    lengths = [list(rng.integers(1, 5, size=rng.integers(5, 20))) for _ in range(12)]
    draw = np.random.default_rng(0).integers(0, 12, size=(2000, 12))
    slow = [acceptance_length([lengths[index] for index in row]) for row in draw]
    interval = bootstrap_interval(lengths)
    assert (interval.lower, interval.upper) == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])))
    assert interval.lower < acceptance_length(lengths) < interval.upper


def test_a_drafter_that_helps_one_prompt_of_many_has_no_certain_gain():
    assert bootstrap_interval([[1] * 10] * 23 + [[2] * 10]).lower == 1.0
