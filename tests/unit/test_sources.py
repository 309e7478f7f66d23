from pathlib import Path

import pytest

from draftflow import sources


def names(*stages):
    return {Path(file).relative_to(sources.PACKAGE).as_posix() for file in sources.modules(*stages)}


def test_imports_are_followed_and_plumbing_is_left_out():
    found = names("draftflow.workflow")
    assert {"workflow.py", "config.py", "environment/lock.py", "training/devices.py"} <= found
    assert not {"stage.py", "errors.py", "__init__.py"} & found


def test_an_edit_of_the_loss_concerns_training_and_not_the_dataset():
    assert "drafter/loss.py" in names("draftflow.training.worker")
    assert "drafter/loss.py" not in names("draftflow.dataset.pack", "draftflow.environment.install")


def test_the_dataset_stages_do_not_run_the_training_code():
    assert not [
        name for name in names("draftflow.dataset.read", "draftflow.dataset.pack") if name.startswith("training")
    ]


def test_attention_of_one_kind_concerns_what_is_made_with_it():
    writing, training = names("draftflow.dataset.regenerate"), names("draftflow.training.worker")
    assert "target/decoding.py" in writing - training
    assert "target/attention.py" in training - writing


def test_digest_follows_content(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("from draftflow import b\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    sources._imports.cache_clear()
    before = sources.digest("draftflow.a")
    (tmp_path / "b.py").write_text("x = 2\n")
    assert sources.digest("draftflow.a") != before
    (tmp_path / "b.py").write_text("x = 1\n")
    assert sources.digest("draftflow.a") == before
    sources._imports.cache_clear()


def test_an_unknown_module_is_an_error():
    with pytest.raises(ModuleNotFoundError, match=r"draftflow\.nothing"):
        sources.modules("draftflow.nothing")
