import json

import pytest

pytest.importorskip("torch")

import torch

from draftflow.training.metrics import Clock, Metrics, split_steps

FACTS = {
    "loss": 2.0,
    "accuracy": [0.5, 0.25],
    "learning_rate": 1e-3,
    "gradient_norm": 0.7,
    "step_ms": 10.0,
    "ms": {"optimizer": 10.0},
    "tokens_per_second": 100,
}


def test_parts_of_steps_are_means_and_what_lies_between_counts_for_none():
    parts = [
        ("data", 1.0),
        ("optimizer", 4.0),
        ("evaluation", 100.0),
        ("report", 9.0),
        ("data", 3.0),
        ("optimizer", 6.0),
    ]
    means, steps = split_steps(parts)
    assert means == {"data": 2.0, "optimizer": 5.0}
    assert steps == [5.0, 9.0]


def test_the_clock_gives_time_to_the_part_that_ended(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 3.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"))
    clock.mark("data")
    clock.mark("forward")
    assert clock.read() == [("data", 1e3), ("forward", 2e3)]
    clock.mark("data")
    assert clock.read() == [("data", 500.0)]


def test_lines_follow_those_of_the_process_before(tmp_path, capsys):
    before = '{"step": 10, "loss": 3.0}\n'
    metrics = Metrics(tmp_path / "metrics.jsonl", tmp_path / "board", before, first=10, steps=20)
    metrics.training(20, FACTS, [9.0, 11.0])
    metrics.evaluation(20, 2.5, [0.5, 0.5])
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").unlink()  # as Snakemake does with the outputs of a job that a scheduler ends
    assert metrics.text() == text
    metrics.close()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 20]
    assert lines[1]["loss"] == 2.0
    assert lines[2]["expected_acceptance_length"] == pytest.approx(1.75)
    assert metrics.median_step_ms() == 10.0
    assert "step 20/20: loss 2.000" in capsys.readouterr().out
    assert list((tmp_path / "board").iterdir())
