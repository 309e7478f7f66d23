"""Split topology on GPUs, run by the stages as the workflow calls them, against a colocated run of the same drafters.

    python -m pytest -s tests/gpu/test_split.py

in a training environment. One GPU is enough for both roles; with more, features go from one to another through NCCL.
"""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "torch_env"))

from training_cases import FOR_GPU, Stage, make_case, make_settings, read_metrics  # noqa: E402

from draftflow.environment.builds import detect_gpus  # noqa: E402
from draftflow.training.devices import resolve_devices  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTH, STEPS = 1024, 120
# two rows per device, whatever their number; of evaluations, one in the middle
TRAINING = {"steps": STEPS, "evaluate_every": 60, "checkpoint_every": STEPS}
TRAINING |= {"learning_rate": 1e-3, "feature_cache_gb": 0.0}


def settings_of(devices):
    found = resolve_devices(devices, detect_gpus())
    settings = make_settings(found, **TRAINING)
    return {**settings, "row_length": LENGTH, "rows_per_step": 2 * found.count, "anchors_per_row": 64}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A target whose heads fit the GPU's attention, and rows of whole tiles."""
    rows = {"train": 60, "held_out": 6, "length": LENGTH}
    return make_case(tmp_path_factory.mktemp("case"), rows, **FOR_GPU)


def trained(stage, settings, folder):
    with stage.training(settings, folder) as process:
        output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    record = json.loads((folder / "train.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parts = [line["ms"] for line in lines if "ms" in line][-1]
    print(f"{settings['devices']}: {record['median_step_ms']} ms a step, {parts}; waited {record['waited_seconds']}")
    return record, read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("target", "drafter"),
    [([0], [0]), ([1], [0]), ([1, 2], [0]), ([2], [0, 1]), ([3, 4, 5, 6, 7], [0, 1, 2])],
    ids=lambda ids: "-".join(map(str, ids)),
)
def test_the_split_topology_trains_as_the_colocated_one(paths, tmp_path, target, drafter):
    if torch.cuda.device_count() <= max(*target, *drafter):
        pytest.skip("needs more GPUs")
    apart, together = settings_of({"target": target, "drafter": drafter}), settings_of(drafter)
    apart["training"]["stream_depth"] = max(2, len(target))
    stage = Stage(tmp_path, paths, apart)
    (_, expected), (record, found) = (
        trained(stage, settings, tmp_path / name) for name, settings in (("together", together), ("apart", apart))
    )
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    # before any update, only kernels that add up in another order differ; each update then adds rounding of bf16
    assert found[0]["held_out_loss"] == pytest.approx(expected[0]["held_out_loss"], rel=1e-3)
    for one, other in zip(found, expected, strict=True):
        for name in {"loss", "held_out_loss"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=0.05), (name, one["step"])
    assert found[-1]["held_out_loss"] < found[0]["held_out_loss"] * 0.8
    assert [rank["role"] for rank in record["topology"]["ranks"]] == ["drafter"] * len(drafter) + ["target"] * len(
        target
    )
    assert {guard["fx_graph_misses"] + guard["compiles_after_warmup"] for guard in record["guard"]} == {0}
