"""The benchmark of the step: its arithmetic against what torch counts, a tiny run, and what becomes of failures."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import fetched_peers
import pytest
import step_time
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftflow.drafter import float8
from draftflow.drafter.mask import allowed
from draftflow.errors import DraftflowError
from draftflow.training.plan import make_plan

TINY = ["--shape", "tiny", "--block", "8", "--eager", "--rounds", "2", "--burst", "1", "--warm-up", "1"]
CPU = torch.device("cpu")
ALL = {
    "draftflow",
    "draftflow, KL",
    "SpecForge, loss in chunks of 128 blocks",
    "SpecForge, unchunked",
    "speculators, CE",
    "speculators, KL",
}


def run(folder: Path, *arguments: str) -> dict:
    """The results of a run on the tiny shape, and what it wrote."""
    import step_time_trials

    parsed = step_time.parse([*TINY, "--output", str(folder / "step_time.json"), *arguments])
    results = step_time_trials.run(parsed, "the command")
    assert results == json.loads((folder / "step_time.json").read_text())
    return results


def measurement(block_size: int = 8, trainers: tuple[str, ...] = ("draftflow",)):
    """The tiny case, before anything of it is measured."""
    import step_time_trials as trials

    options = trials.Options(rounds=1, burst=1, warm_up=1, trainers=trainers, compiled=False)
    both = None if trainers == ("draftflow",) else fetched_peers.both()
    shape = trials.Shape("tiny", options, CPU, both)
    return trials.Measurement(shape, block_size, shape.row(), trials.Budget(600.0))


@pytest.mark.parametrize("block_size", [8, 16])
def test_flops_of_products_are_what_torch_counts(block_size):
    """All but attention, which a CPU computes dense; computed as on a GPU, and but for the last layer's queries of the
    anchors, which attention is given and nothing needs. The sample is one in which every position is counted exactly.
    """
    from step_time_trials import useful_flops, visible_keys
    from trainers import Draftflow

    found = measurement(block_size)
    trainer, sample, plan = Draftflow(found.case), found.samples[0], found.case.plan
    trainer.restore()
    trainer.step.drafter.apart = True
    with FlopCounterMode(display=False) as counter:
        trainer.forward_backward(sample, "")
    counts = counter.get_flop_counts()["Global"]
    parts = useful_flops(found.case.shape, plan, visible_keys(sample, block_size), len(sample.batch.supervised))
    shape = found.case.shape
    unneeded = 3 * 2 * plan.rows * plan.anchors * shape.hidden_size * shape.heads * shape.head_dim
    assert sum(parts.values()) - parts["attention"] + unneeded == counts[torch.ops.aten.mm]


def test_keys_are_counted_where_the_mask_shows_them():
    from step_time_trials import useful_flops, visible_keys

    found = measurement(16)
    sample = found.samples[0]
    assert sample.anchors.valid.all()
    seen = int(allowed(sample.anchors, sample.document_ids, 16).sum())
    assert visible_keys(sample, 16) == seen
    shape = found.case.shape
    # two products forward and four backward, each of a multiplication and an addition, in every layer and head; but for
    # one of the 16 queries of a block in the last
    pairs = seen * 4 + seen // 16 * 15
    assert useful_flops(shape, found.case.plan, seen, 1)["attention"] == 12 * pairs * shape.heads * shape.head_dim


def test_an_invalid_slot_sees_no_key_of_use():
    from step_time_trials import visible_keys

    sample = measurement(8).samples[0]
    anchors = sample.anchors
    fewer = anchors._replace(valid=anchors.valid & (anchors.positions != anchors.positions[0, 3]))
    lost = 8 * (int(anchors.positions[0, 3]) + 8)
    assert visible_keys(sample, 8) - visible_keys(replace(sample, anchors=fewer), 8) == lost


@pytest.mark.slow
def test_a_tiny_run_measures_every_trainer(tmp_path, monkeypatch):
    import step_time_trials

    monkeypatch.setattr(step_time_trials, "SWEEP_ANCHORS", (4, 8, 200))  # the last are more than the row has tokens
    monkeypatch.setattr(step_time_trials, "SWEEP_ROWS", (256,))
    results = run(tmp_path, "--peers", str(fetched_peers.folder()), "--sweep", "--profile")
    (case,) = results["cases"]
    assert set(case["trainers"]) == ALL
    for found in case["trainers"].values():
        assert "error" not in found
        for name in ("ms", "train_ms", "target_ms"):
            assert len(found[name]) == 2
            assert min(found[name]) > 0
    losses = {name: found["loss"] for name, found in case["trainers"].items()}
    # of a random drafter: ln 384 but for the little that it knows of the drawn anchors
    assert losses["draftflow"] == pytest.approx(5.95, abs=0.1)
    assert losses["SpecForge, unchunked"] == pytest.approx(losses["draftflow"], abs=0.1)
    # theirs is divided by more
    assert 0 < losses["speculators, KL"] < losses["draftflow, KL"]
    assert not results["skipped"]
    assert not results["errors"]

    swept = {(point["row_length"], point["anchors"]) for point in results["sweeps"]}
    assert swept == {(128, 4), (256, 8)}
    assert all(len(point["trainers"]) == 2 for point in results["sweeps"])
    profiles = results["profiles"]
    assert len(profiles) == 8  # two settings of ours and of SpecForge, with and without the optimizer
    assert all(profile["kernels"][0]["ms"] > 0 for profile in profiles.values())
    # it asks the device how many anchors there are
    assert [found["syncs"]["aten::item"] for name, found in profiles.items() if "unchunked, forward" in name] == [1]
    ours = [found for name, found in profiles.items() if "draftflow" in name]
    assert [found["syncs"]["aten::item"] for found in ours] == [0] * 4

    document = tmp_path / "step.md"
    document.write_text(f"Before.\n\n{step_time.BEGIN}\nold\n{step_time.END}\nAfter.\n")
    step_time.replace_between(document, step_time.BEGIN, step_time.END, step_time.render([results]))
    text = document.read_text()
    assert "old" not in text
    assert text.startswith("Before.")
    assert text.endswith("After.\n")
    assert all(f"| {name} |" in text for name in ALL)


def test_the_step_in_float8_is_measured_where_the_device_has_it(monkeypatch):
    from trainers import Draftflow

    assert Draftflow.settings_on(CPU) == ("", "KL")
    monkeypatch.setattr(Draftflow, "settings_on", classmethod(lambda kind, device: kind.settings))
    products, linear = [], float8.linear
    monkeypatch.setattr(float8, "linear", lambda x, weight: products.append(x.shape) or linear(x, weight))
    found = measurement()
    found.run(only=["draftflow", "draftflow, KL"])
    assert not products
    found.run()
    trainers = found.facts["trainers"]
    assert set(trainers) == {"draftflow", "draftflow, fp8", "draftflow, KL"}
    assert all(facts["ms"] and facts["train_ms"] for facts in trainers.values())
    usual, in_float8 = (trainers[name]["loss"] for name in ("draftflow", "draftflow, fp8"))
    assert in_float8 == pytest.approx(usual, rel=0.05)
    assert len(products) > 0


def test_what_was_recorded_without_float8_is_not_replayed_with_it():
    from trainers import Draftflow

    found = measurement()
    trainer, sample = Draftflow(found.case), found.samples[0]
    trainer.restore()
    trainer.forward_backward(sample, "")
    recorded = trainer.step._captured = object()
    assert trainer._set("KL")._captured is recorded
    assert (trainer._set("fp8")._captured, trainer.step._trained) == (None, False)
    trainer.forward_backward(sample, "fp8")
    assert trainer._set("")._captured is recorded
    assert (trainer._set("fp8")._captured, trainer.step._trained) == (None, True)
    trainer._set("")
    trainer.step._captured = None
    trainer.train(sample, "")  # the weights move
    assert (trainer._set("fp8")._captured, trainer.step._trained) == (None, False)


def test_anchors_that_are_given_make_the_losses_equal(tmp_path):
    trainers = ["--trainer", "draftflow", "--trainer", "SpecForge", "--given-anchors"]
    (case,) = run(tmp_path, "--peers", str(fetched_peers.folder()), *trainers)["cases"]
    assert len({found["loss"] for name, found in case["trainers"].items() if "KL" not in name}) == 1


@pytest.mark.parametrize(("method", "where"), [("forward_backward", "error"), ("train", "optimizer_error")])
def test_a_trainer_that_fails_is_recorded_and_the_rest_goes_on(method, where, monkeypatch):
    from trainers import SpecForge

    def fail(self, sample, setting, source=None):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(SpecForge, method, fail)
    found = measurement(trainers=("draftflow", "SpecForge", "speculators"))
    found.run()
    trainers = found.facts["trainers"]
    assert set(trainers) == ALL
    failed = {name for name, facts in trainers.items() if facts.get(where) == "OutOfMemoryError: no room"}
    assert failed == {"SpecForge, loss in chunks of 128 blocks", "SpecForge, unchunked"}
    timed = {name for name, facts in trainers.items() if facts.get("ms")}
    assert timed == (ALL - failed if where == "error" else ALL)
    assert {name for name, facts in trainers.items() if facts.get("train_ms")} == ALL - failed


def test_trainers_that_do_not_fit_together_are_timed_one_after_the_other(monkeypatch):
    from trainers import Draftflow, SpecForge

    there = set()
    for kind in (Draftflow, SpecForge):

        def restore(self, restore=kind.restore):
            there.add(type(self))
            if len(there) > 1:
                raise torch.OutOfMemoryError("no room for two")
            restore(self)

        def release(self, release=kind.release):
            there.discard(type(self))
            release(self)

        monkeypatch.setattr(kind, "restore", restore)
        monkeypatch.setattr(kind, "release", release)
    found = measurement(trainers=("draftflow", "SpecForge"))
    found.run(optimizer=False)
    assert "no room for two" in found.facts["in_turn_error"]
    assert all(len(facts["ms"]) == 1 for facts in found.facts["trainers"].values())


def test_what_does_not_fit_into_the_time_is_skipped_and_said(tmp_path):
    results = run(tmp_path, "--trainer", "draftflow", "--seconds", "0")
    assert results["skipped"] == ["tiny"]
    assert "Not measured for want of time: tiny." in step_time.render([results])


def test_work_is_stopped_at_the_end_of_the_time():
    from step_time_trials import Budget

    budget, start = Budget(0.3), time.monotonic()
    assert budget.attempt("a compile", lambda: time.sleep(60)) == "out of time"
    assert time.monotonic() - start < 30
    assert budget.skipped == ["a compile"]
    assert Budget(60.0).attempt("quick", lambda: None) is None
    # little time is shared as well
    assert (Budget(20.0).for_the_rest, Budget(600.0).for_the_rest) == (6.0, 60.0)
    assert Budget(60.0).attempt("wrong", lambda: 1 / 0) == "ZeroDivisionError: division by zero"


def test_the_tables_say_what_was_measured():
    """Ratios, tokens per second and utilisation from figures that are made up."""
    case = {
        **{"shape": "some", "block_size": 16, "row_length": 2000, "rows": 1, "anchors": 512, "supervised": 7680},
        **{"target_layers": 8, "flops": {"body": 30e12, "head": 10e12}, "kl_flops": 5e12},
        "trainers": {
            "draftflow": {
                **{"ms": [110.0, 100.0, 90.0], "train_ms": [125.0], "target_ms": [150.0]},
                **{"peak_bytes": 12 * 2**30, "train_peak_bytes": 20 * 2**30},
                **{"first_call_s": 20.0, "first_call_hits": 2},
            },
            "peer": {"ms": [150.0], "optimizer_error": "OutOfMemoryError: no room"},
            "other": {"error": "out of time"},
            "draftflow, KL": {"ms": [125.0]},
            "peer, KL": {"ms": [250.0]},
        },
        "target": {"draftflow": [25.0], "transformers": "out of time"},
    }
    swept = {**case, "anchors": 64, "trainers": {"draftflow": {"ms": [40.0]}, "peer": {"ms": [50.0]}}}
    profile = {
        **{"wall_ms": 101.0, "kernel_ms": 99.0, "syncs": {"aten::item": 2.0, "cudaStreamSynchronize": 0.0}},
        "kernels": [{"name": "gemm", "ms": 49.5, "count": 12.0, "share": 0.5}],
    }
    results = {
        **{"device": "GPU", "torch": "2", "transformers": "5", "python": "3", "date": "today", "seconds": 90},
        **{"ceiling_flops": [800e12, 800e12], "cases": [case], "sweeps": [swept], "profiles": {"ours": profile}},
        **{"skipped": [], "errors": ["big: no room"], "command": "the command"},
    }
    lines = step_time.render([results]).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[2] == [
        *("draftflow", "100.0 (90.0-110.0)", "1.00", "50", "12.0", "125.0 (125.0-125.0)", "16,000", "20.0"),
        *("150.0 (150.0-150.0)", "20.0 (cached)"),
    ]
    assert rows[3] == ["peer", "150.0 (150.0-150.0)", "1.50", "33", "", "OutOfMemoryError: no room", "", "", "", ""]
    assert rows[4][:3] == ["other", "out of time", ""]
    assert rows[5][:4] == ["draftflow, KL", "125.0 (125.0-125.0)", "1.00", "45"]
    assert rows[6][:4] == ["peer, KL", "250.0 (250.0-250.0)", "2.00", "22"]
    assert ["64", "40.0 (40.0-40.0)", "50.0 (50.0-50.0)", "1.25", ""] in rows
    assert ["512", "100.0 (90.0-110.0)", "150.0 (150.0-150.0)", "1.50", "12.0"] in rows
    assert ["`gemm`", "49.500", "50.0", "12"] in rows
    text = "\n".join(lines)
    assert "40 TFLOP of use (body 30, head 10), 5 more for KL." in text
    assert "Target forward, 8 layers, transformers: out of time." in text
    assert "Waits of the host in a step: aten::item 2." in text
    assert "big: no room" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "huge"], "huge is not what can be measured"),
        (["--trainer", "nobody"], "nobody is not what can be measured"),
        ([], "not said where the peers are"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, words, tmp_path):
    with pytest.raises(DraftflowError, match=words):
        run(tmp_path, *arguments)


def test_results_that_are_not_there_or_of_something_else_are_refused(tmp_path):
    (tmp_path / "warm.json").write_text("{}")
    for name in ("warm.json", "missing.json"):
        with pytest.raises(DraftflowError, match="not what the benchmark writes"):
            step_time.read(tmp_path / name)


def test_of_a_run_the_profiles_alone_can_be_shown(monkeypatch, capsys):
    measured = Path(__file__).parents[2] / "docs" / "measured" / "profile-smollm2-h200.json"
    for option, shows_times in (("--read", True), ("--read-profiles", False)):
        monkeypatch.setattr(sys, "argv", ["step_time.py", option, str(measured)])
        step_time.main()
        said = capsys.readouterr().out
        assert ("| forward + backward, ms |" in said) == shows_times
        assert "### Profile: smollm2" in said


def test_a_document_without_a_place_for_the_tables_is_refused(tmp_path):
    document = tmp_path / "step.md"
    document.write_text("No markers.")
    with pytest.raises(DraftflowError, match="no place for the tables"):
        step_time.replace_between(document, step_time.BEGIN, step_time.END, "tables")


def test_the_model_of_scaling_counts_the_operations_that_the_benchmark_does():
    from scaling import drafter_shape, row_flops
    from step_time_trials import useful_flops

    step = {"row_length": 3072, "rows_per_step": 1, "anchors_per_row": 512, "block_size": 16}
    shape = drafter_shape("qwen3-8b", 16, 36)
    plan = make_plan(vars(shape), {**step, "precision": "bf16"}, "cuda", 1)
    visible, supervised = 512 * 16 * (3072 // 2 + 16), 512 * 15
    found = row_flops(shape, step)
    assert found["forward"] + found["backward"] == sum(useful_flops(shape, plan, visible, supervised).values())
