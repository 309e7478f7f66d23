import subprocess
import sys

import pytest

pytest.importorskip("torch")

from torch._inductor import cpu_vec_isa

from draftflow.compile_cache.vector_isa import load_probes_in_process


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.setattr(cpu_vec_isa, "subprocess", subprocess)
    load_probes_in_process()
    return cpu_vec_isa.subprocess


def test_a_library_is_loaded_in_this_process(probe, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    code = "import torch\nfrom ctypes import cdll\ncdll.LoadLibrary('{}')"
    assert probe.check_call([sys.executable, "-c", code.format("libc.so.6")], cwd="/") == 0
    with pytest.raises(OSError, match="no-such-library"):
        probe.check_call([sys.executable, "-c", code.format("/no-such-library.so")])


def test_other_uses_are_left_alone(probe):
    assert probe.check_call(["true"]) == 0
    with pytest.raises(subprocess.CalledProcessError):
        probe.check_call(["false"])
    assert probe.Popen is subprocess.Popen
