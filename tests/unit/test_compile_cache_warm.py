"""Which devices are walked, proved and mended, with a stand-in for the process that compiles."""

import json
from dataclasses import dataclass, field

import pytest

from draftflow.compile_cache import warm
from draftflow.compile_cache.warm import WarmUp, in_use
from draftflow.stage import Record, write_json
from draftflow.training.plan import make_plan

SHAPE = {"block_size": 8, "vocab_size": 49152, "target_layer_ids": (1, 7), "num_attention_heads": 8}
SETTINGS = {"row_length": 256, "rows_per_step": 12, "anchors_per_row": 32, "precision": "auto"}
H100, A100 = "NVIDIA H100", "NVIDIA A100"


@dataclass(frozen=True)
class Compiling(WarmUp):
    """Notes the ranks of the devices that it was called for; each kind has a kernel of its own."""

    kinds: tuple[str, ...] = ()
    ranks: list[int] = field(default_factory=list)

    def on(self, rank, compile_environment, hold=None):
        self.ranks.append(rank)
        kernel = self.folder_of(compile_environment) / f"{self.kinds[rank]}.so"
        cold = not kernel.exists()
        kernel.write_text(self.kinds[rank])
        caches = {"fx_graph": {"hits": int(not cold), "misses": int(cold)}}
        counts = {"fx_graph_hits": int(not cold), "fx_graph_bypasses": 0, "autograd_bypasses": 0, "benchmarks": 0}
        seconds = {"first_pass_seconds": 1.5, "peak_memory_bytes": {"gpu": 1}, "memory_bound_bytes": None}
        return {"kind": self.kinds[rank], "caches": caches, "counts": counts, **seconds}

    @staticmethod
    def folder_of(compile_environment):
        return warm.Path(compile_environment["TRITON_CACHE_DIR"])


@pytest.mark.parametrize(("kinds", "one_of_each"), [([H100, A100, H100], [0, 1]), ([H100, H100, H100], [0])])
def test_one_device_of_each_kind_is_proved_and_mended(tmp_path, monkeypatch, kinds, one_of_each):
    devices = {"kind": "cuda", "ids": [4, 5, 6], "slug": "mixed"}
    plan = make_plan(SHAPE, SETTINGS, "cuda", 3)
    monkeypatch.setattr(warm, "plan_of_run", lambda *_: (None, plan))
    monkeypatch.setattr(warm, "dense_scores_bytes", lambda _: 0)
    write_json(tmp_path / "fingerprint.json", {"compile": {"digest": "both", "fields": {"GPUs": [A100, H100]}}})
    work = Compiling({"devices": devices}, tmp_path / "fingerprint.json", tmp_path, tuple(kinds))
    record = Record("warm_cache")
    warm.warm(work, tmp_path / "cache", False, record)
    assert work.ranks == [0, 1, 2, *one_of_each]
    assert [device["cold"] for device in record["devices"]] == [True, len(one_of_each) == 2, False]
    assert record["proof"]["kind"] == H100
    assert [proof["kind"] for proof in record.facts.get("proofs_of_other_kinds", [])] == kinds[1 : len(one_of_each)]

    record["folder"] = f"cache/{record['key']}"
    record.write(tmp_path / "warm.json")
    kernel = tmp_path / record["folder"] / f"triton/{H100}.so"
    kernel.write_text("")
    work.ranks.clear()
    told = Record("train")
    with in_use(work, tmp_path / "warm.json", record["holds"], told):
        assert kernel.read_text() == H100
    assert work.ranks == one_of_each * 2
    assert told["cache"]["recompiled_seconds"] == 1.5 * len(one_of_each)
    assert json.loads((tmp_path / record["folder"] / "manifest.json").read_text())["files"]


def test_devices_of_the_target_are_walked_after_those_that_train_and_each_role_is_proved(tmp_path, monkeypatch, capsys):
    devices = {"kind": "cuda", "ids": [4, 5], "target_ids": [5, 6], "slug": "h100"}
    plan = make_plan(SHAPE, SETTINGS, "cuda", 2)
    monkeypatch.setattr(warm, "plan_of_run", lambda *_: (None, plan))
    monkeypatch.setattr(warm, "dense_scores_bytes", lambda _: 0)
    write_json(tmp_path / "fingerprint.json", {"compile": {"digest": "one", "fields": {"GPUs": [H100]}}})
    work = Compiling({"devices": devices}, tmp_path / "fingerprint.json", tmp_path, (H100,) * 4)
    record = Record("warm_cache")
    warm.warm(work, tmp_path / "cache", False, record)
    assert work.ranks == [0, 1, 2, 3, 0, 2]
    walked = [(device["device"], device["role"]) for device in record["devices"]]
    assert walked == [("cuda:4", "drafter"), ("cuda:5", "drafter"), ("cuda:5", "target"), ("cuda:6", "target")]
    said = capsys.readouterr().out
    assert "cuda:4: compiling the step" in said
    assert "cuda:5: compiling the target's layers" in said
