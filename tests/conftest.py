"""Which tests run where: those of `torch_env` and `gpu` need what the workflow installs, not what runs the workflow."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torch") else ["torch_env", "gpu"]


def pytest_report_header() -> list[str]:
    if not collect_ignore:
        return []
    return [
        "tests/torch_env: run by tests/workflow/test_whole_run.py, inside the environment that it installs",
        "tests/gpu: by hand on a machine with a GPU, inside a training environment",
    ]
