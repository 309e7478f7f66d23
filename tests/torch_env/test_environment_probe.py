"""The probe against the torch that runs these tests."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftflow.environment import probe

pytestmark = pytest.mark.slow

PROGRAM = Path(probe.__file__)


def run(trial_seconds, **variables):
    done = subprocess.run(
        [sys.executable, "-", "240", str(trial_seconds)],
        input=PROGRAM.read_text(),
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition(probe.BEGIN)[2].partition(probe.END)[0])


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


@pytest.fixture(scope="module")
def report(caches):
    # the trial must see through a switch that would make every build look safe
    return run(180, TORCH_COMPILE_DISABLE="1", **caches)


def test_the_fields_are_what_torch_says_of_itself(report):
    import torch

    fields = report["fields"]
    assert fields["torch"] == torch.__version__
    assert fields["torch git"] == torch.version.git_version
    assert fields["torch CUDA"] == torch.version.cuda
    assert fields["torch C++11 ABI"] == torch.compiled_with_cxx11_abi()
    assert fields["cuDNN"] == torch.backends.cudnn.version()
    assert sum(int(words.split(" x ")[0]) for words in fields["GPUs of torch"]) == torch.cuda.device_count()
    # as torch has them at its start: trainers that other tests import here change them
    names = ("recompile_limit", "accumulated_recompile_limit")
    text = f"import json; from torch._dynamo import config; print(json.dumps([getattr(config, n) for n in {names}]))"
    limits = json.loads(subprocess.run([sys.executable, "-c", text], capture_output=True, check=True).stdout)
    assert [fields[f"dynamo {name}"] for name in names] == limits
    assert fields["dynamo disable"] is True
    operator = importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention
    assert fields["flex_attention operator"] == operator.name()
    assert {"Autograd", "CompositeExplicitAutograd"} <= set(fields["flex_attention dispatch"])
    assert len(fields["flex_attention dispatch"]) == (
        len(operator.py_kernels) + len(operator.python_key_table) + len(operator.functorch_table)
    )
    assert report["problems"] == []


def test_flex_attention_that_nobody_compiled_is_dense(report):
    assert report["fields"]["flex_attention uncompiled"].endswith(", dense")


def test_the_verdict_is_what_the_trials_saw(report):
    """This build loses a compile when threads trace; the trial says so by what it saw."""
    race = report["race"]
    assert race["affected"] is True, race
    assert report["fields"]["compile race"] == "affected"
    assert 0 < race["failed"] <= race["trials"]
    assert sum(race["errors"].values()) >= race["failed"]
    assert any("FX tracing met a compiled function" in error for error in race["errors"])
    assert report["fields"]["FX tracing flag"] == "global"


def test_nothing_is_written_into_the_caches_of_the_user(report, caches):
    assert [folder for folder in caches.values() if Path(folder).exists()] == []
    assert report["caches"]["inductor"]["path"] == caches["TORCHINDUCTOR_CACHE_DIR"]


def test_without_a_trial_there_is_no_verdict(caches):
    report = run(0, **caches)
    assert report["race"]["affected"] is None
    assert report["fields"]["torch"] is not None


def test_a_trial_that_cannot_compile_even_one_thread_has_no_verdict(tmp_path, monkeypatch):
    """A backend that fails by itself must not pass for the race."""
    broken = PROGRAM.read_text().replace('backend="aot_eager"', 'backend="no_such_backend"')
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", tmp_path / "probe.py")
    (tmp_path / "probe.py").write_text(broken)
    race = run(120)["race"]
    assert race["affected"] is None
    assert "one after the other fail as well" in race["why"]
