import os

import pytest

from draftflow.compile_cache.location import FOOT_GUNS, SETTINGS, as_fingerprinted, prepare
from draftflow.errors import DraftflowError


def test_all_compiled_code_goes_below_the_folder(tmp_path):
    variables = prepare(tmp_path / "cache", {})
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert variables[name].startswith(str(tmp_path / "cache"))
        assert os.path.isdir(variables[name])  # noqa: PTH112


def test_warm_up_and_training_are_given_the_same_settings(tmp_path):
    one, two = prepare(tmp_path / "a", {}), prepare(tmp_path / "b", {})
    assert {name: one[name] for name in SETTINGS} == {name: two[name] for name in SETTINGS} == SETTINGS


@pytest.mark.parametrize("name", FOOT_GUNS)
def test_switches_that_make_attention_dense_or_the_cache_useless_are_refused(tmp_path, name):
    with pytest.raises(DraftflowError, match=f"{name}=1 .* Run `unset {name}`"):
        prepare(tmp_path, {name: "1"})


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE"])
def test_another_value_of_what_is_set_here_is_refused(tmp_path, name):
    with pytest.raises(DraftflowError, match=f"unset {name}"):
        prepare(tmp_path, {name: "0"})
    prepare(tmp_path, prepare(tmp_path, {}))  # the same values are no contradiction


def test_a_comparison_with_the_fingerprint_does_not_see_what_is_set_here(monkeypatch):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    own = next(iter(SETTINGS))
    with as_fingerprinted({own: "1", "torch": "2.11.0"}):
        assert [name for name in SETTINGS if name in os.environ] == [own]
    assert all(os.environ[name] == value for name, value in SETTINGS.items())
