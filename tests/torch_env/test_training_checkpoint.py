import json
import re

import pytest

pytest.importorskip("torch")

import torch

from draftflow.training.checkpoint import latest, write


def save(folder, step, value=0.0, **facts):
    return write(folder, step, {"w": torch.full((3,), value)}, {"m": torch.arange(2.0)}, f"line {step}\n", facts)


def test_what_was_written_is_read(tmp_path):
    save(tmp_path, 5, 1.5, resumed_from=2)
    found = latest(tmp_path)
    assert found.step == 5
    assert found.state["resumed_from"] == 2
    assert torch.equal(found.weights()["w"], torch.full((3,), 1.5))
    assert torch.equal(found.trainer()["m"], torch.arange(2.0))
    assert found.metrics() == "line 5\n"


def test_the_newest_two_are_kept(tmp_path):
    for step in (5, 10, 15, 999999, 1000000):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    assert latest(tmp_path).step == 1000000


def test_there_may_be_none(tmp_path):
    assert latest(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "drafter.safetensors").write_bytes(b"short"), "drafter.safetensors is not what"),
        (lambda path: (path / "trainer.safetensors").unlink(), "trainer.safetensors: No such file"),
        (lambda path: (path / "state.json").write_text('{"step": 1'), "state.json cannot be read"),
        (lambda path: (path / "state.json").unlink(), "state.json: No such file"),
        (lambda path: (path / "metrics.jsonl").write_text(""), "metrics.jsonl is not what"),
    ],
)
def test_a_damaged_newest_one_is_named_and_the_one_before_is_used(tmp_path, capsys, damage, words):
    save(tmp_path, 5)
    damage(save(tmp_path, 10))
    assert latest(tmp_path).step == 5
    assert re.search(rf"step-000010 is damaged \({words}", capsys.readouterr().out)


def test_a_damaged_one_is_replaced_when_its_step_is_reached_again(tmp_path):
    (save(tmp_path, 10, 1.0) / "drafter.safetensors").write_bytes(b"")
    save(tmp_path, 10, 2.0)
    assert latest(tmp_path).weights()["w"][0] == 2.0


def test_an_interrupted_write_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    save(tmp_path, 5)
    monkeypatch.setattr(json, "dumps", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 10)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_remains_of_a_killed_write_are_no_checkpoint_and_go_away(tmp_path):
    (tmp_path / ".step-000010").mkdir()
    (tmp_path / ".step-000010/drafter.safetensors").write_bytes(b"half")
    assert latest(tmp_path) is None
    save(tmp_path, 15)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000015"]
