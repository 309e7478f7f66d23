"""Requests for kernels and tuned choices, which graphs on a GPU make; here they are made by hand."""

import json

import pytest

pytest.importorskip("torch")

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.triton_compat import Config

from draftflow.compile_cache.caches import requests
from draftflow.compile_cache.tuned_choices import find_choices_in_the_folder_in_use

META = {"autotune_local_cache": True, "autotune_remote_cache": False}
CONFIGS = [Config({"XBLOCK": size}, num_warps=4, num_stages=1) for size in (32, 64)]


@pytest.fixture
def original(monkeypatch):
    """The short cut undone at the end."""
    monkeypatch.setattr(AutotuneCache, "create", staticmethod(AutotuneCache.create))


def choose(path, config):
    """The cache of the kernel whose source is `path`, with a choice kept."""
    cache = AutotuneCache.create(META, str(path), "configs")
    cache.save(config, 1)
    return cache


def test_a_choice_is_found_in_the_folder_in_use_wherever_it_was_made(tmp_path, monkeypatch, original):
    (tmp_path / "old/ab").mkdir(parents=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "old"))
    find_choices_in_the_folder_in_use()
    choose(tmp_path / "old/ab/kernel.py", CONFIGS[1])
    (kept,) = (tmp_path / "old").rglob("*.best_config")
    assert json.loads(kept.read_text())["XBLOCK"] == 64

    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    moved = AutotuneCache.create(META, str(tmp_path / "old/ab/kernel.py"), "configs")
    assert moved.read_best(META, CONFIGS) is CONFIGS[1]
    assert not (tmp_path / "old").exists()


def test_choices_that_are_found_are_noted_and_others_are_not(tmp_path, monkeypatch, original):
    (tmp_path / "ab").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    choose(tmp_path / "ab/one.py", CONFIGS[0])
    with requests() as asked:
        for name in ("one", "one", "two"):
            AutotuneCache.create(META, str(tmp_path / f"ab/{name}.py"), "configs").read_best(META, CONFIGS)
    assert len(asked.choices) == 1


def test_kernels_are_noted_by_their_source(monkeypatch):
    monkeypatch.setattr(AsyncCompile, "triton", lambda self, name, source, device_str="cuda": name)
    with requests() as asked:
        assert AsyncCompile().triton("kernel_0", "a", device_str="cuda") == "kernel_0"
        AsyncCompile().triton("kernel_0", "a"), AsyncCompile().triton("kernel_1", "b")
    assert asked.kernels == {"a", "b"}
    AsyncCompile().triton("kernel_2", "c")
    assert asked.kernels == {"a", "b"}
