"""The fingerprint: what counts in which part, and how a difference is told."""

import copy
import json
from pathlib import Path

import pytest

from draftflow.environment import fingerprint
from draftflow.environment import record as records
from draftflow.environment.builds import Gpu
from draftflow.errors import DraftflowError

H200 = "NVIDIA H200, capability 9.0, 132 SMs, 140 GiB"
COMMIT = "70d99e998b4955e0049d13a98d77ae1b14db1f45"
RECORDED = {
    "compile": {"fields": {"torch": "2.11.0+cu130", "torch git": COMMIT, "GPUs": [H200], "driver": "580.95.05"}},
    "numbers": {"fields": {"devices": 8, "numpy": "2.4.6 (aa)"}},
}


@pytest.mark.parametrize(
    ("part", "fields", "words"),
    [
        ("compile", {"torch git": "449b176" + "0" * 33}, ["torch git 70d99e9 -> 449b176"]),
        ("compile", {"driver": None}, ["driver 580.95.05 -> none"]),
        ("compile", {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}, ["TORCHINDUCTOR_MAX_AUTOTUNE none -> 1"]),
        ("compile", {"GPUs": ["NVIDIA A100"]}, [f"GPUs {H200} -> NVIDIA A100"]),
        ("compile", {"GPUs": []}, []),
        ("numbers", {"numpy": "2.5.0 (bb)", "devices": 4}, ["devices 8 -> 4", "numpy 2.4.6 (aa) -> 2.5.0 (bb)"]),
    ],
)
def test_differences_are_told_in_words(part: str, fields: dict, words: list[str]):
    current = copy.deepcopy(RECORDED)
    current[part]["fields"] |= fields
    assert fingerprint.differences(RECORDED, current, part) == words


def test_a_missing_compiler_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DraftflowError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        fingerprint.require_compiler()


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """install.json and fingerprint.json of the environment that runs the test."""
    pytest.importorskip("torch")
    monkeypatch.setattr(
        "sys.argv", ["f", "--install", f"{tmp_path}/install.json", "--output", f"{tmp_path}/fingerprint.json"]
    )
    packages = records.packages(["torch", "numpy", "transformers"])
    (tmp_path / "install.json").write_text(json.dumps({"packages": packages}))
    fingerprint.main()
    return tmp_path / "fingerprint.json"


def test_the_same_process_has_the_same_fingerprint(recorded: Path):
    facts = json.loads(recorded.read_text())
    again = fingerprint.take(json.loads((recorded.parent / "install.json").read_text()))
    assert {part: facts[part]["digest"] for part in ("compile", "numbers")} == {
        part: again[part]["digest"] for part in ("compile", "numbers")
    }
    assert facts["compile"]["fields"]["torch git"]
    assert facts["numbers"]["fields"]["numpy"].startswith(records.packages(["numpy"])["numpy"]["version"])
    assert "g++" in facts["compile"]["fields"]["C++ compiler"]
    fingerprint.require_same(recorded, ("compile", "numbers"))


def test_an_inductor_setting_changes_the_compile_part_and_a_path_does_not(recorded: Path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "relative")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    fingerprint.require_same(recorded)
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    with pytest.raises(DraftflowError, match="TORCHINDUCTOR_FREEZING none -> 1") as refusal:
        fingerprint.require_same(recorded)
    assert "--forcerun fingerprint" in refusal.value.remedy


def test_a_precision_switch_changes_the_numbers_part_alone(recorded: Path):
    import torch

    torch.backends.cudnn.benchmark = True
    try:
        fingerprint.require_same(recorded)
        with pytest.raises(DraftflowError, match="cuDNN benchmark False -> True"):
            fingerprint.require_same(recorded, ("numbers",))
    finally:
        torch.backends.cudnn.benchmark = False


def test_a_package_that_was_changed_after_installation_is_refused(recorded: Path):
    install = json.loads((recorded.parent / "install.json").read_text())
    install["packages"]["numpy"]["record"] = "0" * 16
    (recorded.parent / "install.json").write_text(json.dumps(install))
    with pytest.raises(DraftflowError, match=r"Packages were changed after installation: numpy"):
        fingerprint.main()


def test_a_driver_that_cannot_run_this_torch_is_refused(recorded: Path, monkeypatch: pytest.MonkeyPatch):
    import torch

    if torch.version.cuda is None:
        pytest.skip("a CPU build needs no driver")
    monkeypatch.setattr(fingerprint, "detect_gpus", lambda: [Gpu(0, "NVIDIA A100", "GPU-a", 40960, "450.80.02", "8.0")])
    with pytest.raises(DraftflowError, match=r"needs an NVIDIA driver .* this machine's is 450\.80\.02"):
        fingerprint.main()
