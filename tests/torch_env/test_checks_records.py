"""The checks that read records: loss curve, statistics, collecting, verdict, plots. No torch."""

import json
import math
from dataclasses import asdict

import pytest

from draftflow.checks.collect import collect
from draftflow.checks.compiled import SURPRISES, compile_checks, stage_check
from draftflow.checks.loss_curve import loss_checks, read_metrics, series
from draftflow.checks.result import Check, not_run
from draftflow.checks.verdict import judge, table
from draftflow.errors import DraftflowError

VOCAB = 1000


def falling(steps=40, start=7.0, end=4.0):
    metrics = [{"step": s, "loss": start + (end - start) * s / steps} for s in range(1, steps + 1)]
    return [{"step": 0, "held_out_loss": start}, *metrics]


def outcomes(metrics):
    return {check.check: check.passed for check in loss_checks(metrics, VOCAB)}


def test_a_falling_loss_passes():
    assert outcomes(falling()) == {"loss_finite": True, "loss_falls": True, "loss_start": True}


def test_a_rising_loss_fails():
    assert outcomes(falling(start=7.0, end=8.0))["loss_falls"] is False


def test_a_flat_loss_fails_and_its_figure_is_the_fall():
    check = next(c for c in loss_checks(falling(start=7.0, end=6.95), VOCAB) if c.check == "loss_falls")
    assert check.passed is False
    assert check.figure == pytest.approx(0.0064, abs=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_fails(value):
    metrics = falling()
    metrics[20]["loss"] = value
    assert outcomes(metrics)["loss_finite"] is False


def test_a_held_out_loss_that_is_no_number_fails():
    assert outcomes([*falling(), {"step": 40, "held_out_loss": math.nan}])["loss_finite"] is False


def test_a_run_whose_first_evaluation_is_gone_fails():
    metrics = [*falling()[1:], {"step": 20, "held_out_loss": 6.0}]
    assert outcomes(metrics)["loss_start"] is False


def test_a_run_that_knows_the_labels_from_the_start_fails():
    assert outcomes(falling(start=3.0, end=1.0))["loss_start"] is False


def test_held_out_losses_are_read_apart_from_training_losses(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 7.0}\n{"step": 2, "loss": 6.0}\n{"step": 2, "held_out_loss": 5.0}\n')
    metrics = read_metrics(path)
    assert series(metrics, "loss") == ([1, 2], [7.0, 6.0])
    assert series(metrics, "held_out_loss") == ([2], [5.0])


def test_a_broken_metrics_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 7.0}\n{"step": 2, "lo')
    with pytest.raises(DraftflowError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def counted(**counts):
    return dict.fromkeys(SURPRISES, 0) | {"fx_graph_hits": 3, "recompiles": [], "reasons": []} | counts


def guarded(*ranks):
    return {"guard": list(ranks or [counted()])}


FUSED = {"triton_tem_fused_flex_attention_3": 5, "triton_tem_fused_flex_attention_backward_mul_7": 5}


def warmed(kind, kernels=None, peak=10, bound=20):
    memory = {"peak_bytes": {"gpu": peak}, "bound_bytes": bound}
    return {"holds": {"plan": {"device_kind": kind}}, "proof": {"kernels": kernels}, "memory": memory}


def by_name(checks):
    return {check.check: check.passed for check in checks}


def test_training_that_only_loads_compiled_code_passes():
    found = compile_checks(guarded(), warmed("cpu"), "error")
    assert by_name(found) == {"compile_surprises": True, "compile_hits": True}


@pytest.mark.parametrize("name", SURPRISES)
def test_each_surprise_of_any_process_fails_and_is_named_with_its_reason(name):
    check = compile_checks(guarded(counted(), counted(**{name: 2}, reasons=["f: because"])), warmed("cpu"), "error")[0]
    assert (check.passed, check.figure) == (False, 2)
    assert name.replace("_", " ") in check.explanation
    assert "f: because" in check.explanation


def test_training_of_which_one_process_compiled_nothing_fails():
    check = compile_checks(guarded(counted(), counted(fx_graph_hits=0)), warmed("cpu"), "error")[1]
    assert check.passed is False


def test_what_a_target_rank_compiled_counts_as_well():
    trained = {**guarded(), "target_guard": [counted(fx_graph_hits=0, compiles_after_warmup=2)]}
    surprises, hits = compile_checks(trained, warmed("cpu"), "error")
    assert (surprises.passed, surprises.figure) == (False, 2)
    assert hits.passed  # on CPUs the target is not compiled
    assert compile_checks(trained, warmed("cuda", FUSED), "error")[1].passed is False


def test_a_surprise_is_only_a_warning_where_the_configuration_says_so():
    check = compile_checks(guarded(counted(fx_graph_misses=1)), warmed("cpu"), "warn")[0]
    assert check.passed is True
    assert "1 fx graph misses" in check.warning


@pytest.mark.parametrize(("mode", "passed"), [("error", False), ("warn", True)])
def test_a_compile_in_a_stage_after_training_is_found(mode, passed):
    check = stage_check("generation", counted(compiles_after_warmup=1, reasons=["greedy: new shape"]), mode)
    assert (check.check, check.passed, check.figure) == ("generation_compile", passed, 1)
    assert "greedy: new shape" in check.explanation
    assert stage_check("generation", counted(), mode).passed


def test_the_guard_counts_what_is_checked():
    pytest.importorskip("torch")
    from draftflow.compile_cache.guard import AFTER_WARM_UP, WITH_A_WARM_CACHE, Guard

    assert set(SURPRISES) == set(AFTER_WARM_UP) | set(WITH_A_WARM_CACHE)
    assert {*SURPRISES, "fx_graph_hits", "recompiles", "reasons"} <= Guard("warn").counts().keys()


@pytest.mark.parametrize(
    ("kernels", "passed"),
    [
        (FUSED, True),
        ({"triton_tem_fused_flex_attention_3": 5}, False),
        ({"triton_poi_fused_mul_0": 5}, False),
        ({}, None),
    ],
)
def test_on_a_gpu_the_step_must_launch_the_fused_kernels(kernels, passed):
    found = compile_checks(guarded(), warmed("cuda", kernels), "error")
    assert by_name(found)["compile_fused_attention"] is passed


@pytest.mark.parametrize(("peak", "passed"), [(20, True), (21, False)])
def test_on_a_gpu_a_step_takes_no_more_than_its_bound(peak, passed):
    assert by_name(compile_checks(guarded(), warmed("cuda", FUSED, peak), "error"))["compile_memory"] is passed


def finding(name="weights_finite", passed=True, figure=0, warning=None):
    return Check(name, passed, figure, "0 values", "Counted.", "the checkpoint", warning)


def write_record(path, *checks, **facts):
    path.write_text(json.dumps({"checks": [asdict(check) for check in checks], **facts}))
    return path


@pytest.fixture
def fingerprint(tmp_path):
    path = tmp_path / "fingerprint.json"
    path.write_text(
        json.dumps({part: {"digest": part[:3], "fields": {}} for part in ("compile", "numbers", "information")})
    )
    return path


def test_collect_merges_findings_and_says_what_they_are_about(tmp_path, fingerprint):
    one = write_record(tmp_path / "a.json", finding("a"), not_run("b", "dflash is not installed", "same", "it"))
    two = write_record(tmp_path / "g.json", finding("c", warning="a miss"), acceptance={"length": 1.5})
    facts = collect([one, two], "torch-x", fingerprint)
    assert facts["passed"] is True
    assert (facts["failed"], facts["not_run"], facts["warnings"]) == ([], ["b"], ["c"])
    assert [check["check"] for check in facts["checks"]] == ["a", "b", "c"]
    assert facts["acceptance"] == {"length": 1.5}
    assert facts["fingerprint"] == {"compile": "com", "numbers": "num", "information": "inf"}


def test_one_failed_finding_fails_the_whole(tmp_path, fingerprint):
    one = write_record(tmp_path / "a.json", finding("a"), finding("b", passed=False), acceptance={})
    facts = collect([one], "torch-x", fingerprint)
    assert facts["passed"] is False
    assert facts["failed"] == ["b"]


def test_two_findings_of_one_name_are_refused(tmp_path, fingerprint):
    one = write_record(tmp_path / "a.json", finding("a"), acceptance={})
    two = write_record(tmp_path / "b.json", finding("a", passed=False))
    with pytest.raises(DraftflowError, match="found twice"):
        collect([one, two], "torch-x", fingerprint)


def test_a_file_that_is_no_record_of_checks_is_refused(tmp_path, fingerprint):
    path = tmp_path / "a.json"
    path.write_text('{"checks": [{"name": "?"}]}')
    with pytest.raises(DraftflowError, match=r"a\.json"):
        collect([path], "torch-x", fingerprint)


def test_the_verdict_names_each_failed_check_its_figure_its_limit_and_where_to_look(tmp_path):
    checks = [finding("a"), finding("b", False, 3), finding("c", False, 0.123456)]
    with pytest.raises(DraftflowError) as error:
        judge(checks, tmp_path)
    message = str(error.value)
    assert "2 of 3 checks failed" in message
    assert "b is 3, must be 0 values" in message
    assert "c is 0.1235, must be 0 values" in message
    assert message.count("Look at the checkpoint") == 2
    assert str(tmp_path) in message


def test_the_verdict_counts_what_was_not_run(tmp_path):
    checks = [finding("a"), not_run("b", "dflash is not installed", "same tokens", "the export")]
    assert judge(checks, tmp_path) == "1 checks passed, 1 not run"
    lines = table(checks)
    assert any(line.startswith("b") and line.endswith("not run") for line in lines)
    assert "b: not run: dflash is not installed" in lines


def test_nothing_run_is_no_pass(tmp_path):
    with pytest.raises(DraftflowError, match="No check was run"):
        judge([not_run("b", "no reason", "x", "y")], tmp_path)


def test_a_warning_is_shown(tmp_path):
    lines = table([finding("a", warning="2 cache misses")])
    assert lines[2].endswith("warning")
    assert lines[-1] == "a: 2 cache misses"


def test_plots_are_written_and_equal_for_equal_data(tmp_path):
    pytest.importorskip("matplotlib")
    from draftflow.checks.plots import draw_acceptance, draw_loss, save

    metrics = [*falling(), {"step": 40, "held_out_loss": 5.0}]
    rows = [{"position": "1", "rate": "0.5"}, {"position": "2", "rate": "0.0"}]
    for name in ("one", "two"):
        save(tmp_path / name / "loss.svg", draw_loss, metrics)
        save(tmp_path / name / "acceptance.svg", draw_acceptance, rows)
    for plot in ("loss.svg", "acceptance.svg"):
        content = (tmp_path / "one" / plot).read_text()
        assert content == (tmp_path / "two" / plot).read_text()
    assert "held out" in (tmp_path / "one" / "loss.svg").read_text()
    assert "position in the draft block" in (tmp_path / "one" / "acceptance.svg").read_text()
