"""Which tests run where and in which order: those of `torch_env` and `gpu` need what the workflow installs, not what
runs the workflow. Two processes share the tests file by file; the files that take longest come first.
"""

import importlib.util
from pathlib import Path

import pytest

collect_ignore = [] if importlib.util.find_spec("torch") else ["torch_env", "gpu"]

TESTS = Path(__file__).parent

# Files that are run in one process, one after the other: they share a folder with torch environments, or the GPU.
TOGETHER = {"workflow/test_whole_run.py": "project", "slurm": "project", "gpu": "gpu"}

FIRST = [
    "workflow/test_whole_run.py",
    "slurm",
    "workflow/test_in_environment.py",
    "torch_env/test_training_cache.py",
    "torch_env/test_training_run.py",
    "torch_env/test_training_stream.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item, names: list[str]) -> str | None:
        path = item.path.relative_to(TESTS)
        return next((name for name in names if path == Path(name) or Path(name) in path.parents), None)

    for item in items:
        together = place(item, list(TOGETHER))
        group = item.path.name if together is None else TOGETHER[together]
        item.add_marker(pytest.mark.xdist_group(group))
    order = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(place(item, FIRST) or "", len(FIRST)))


def pytest_report_header() -> list[str]:
    if not collect_ignore:
        return []
    return [
        "tests/torch_env: run by tests/workflow/test_in_environment.py, inside the environment that it installs",
        "tests/gpu: by hand on a machine with a GPU, inside a training environment",
    ]
