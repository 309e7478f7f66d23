"""Export of the last checkpoint, and the check stages on what it wrote, as the rules run them. Tiny random target."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from tiny import make_target  # noqa: E402

from draftflow.checks import generation, weights  # noqa: E402
from draftflow.checks.result import read_checks  # noqa: E402
from draftflow.drafter import checkpoint as native  # noqa: E402
from draftflow.drafter.loss import Objective  # noqa: E402
from draftflow.drafter.model import Drafter  # noqa: E402
from draftflow.drafter.shape import DrafterShape  # noqa: E402
from draftflow.errors import DraftflowError  # noqa: E402
from draftflow.stage import Record  # noqa: E402
from draftflow.target.load import load_target  # noqa: E402
from draftflow.target.prepare import prepare  # noqa: E402
from draftflow.training import checkpoint, export  # noqa: E402
from draftflow.training.optimizer import Hyperparameters  # noqa: E402
from draftflow.training.plan import make_plan  # noqa: E402
from draftflow.training.step import Step  # noqa: E402

DRAFTER = {"layers": 1, "block_size": 4, "taps": 5, "target_layers": None, "mask_token": "auto"}
SETTINGS = {
    "drafter": DRAFTER,
    "row_length": 48,
    "rows_per_step": 2,
    "anchors_per_row": 6,
    "precision": "auto",
    "devices": {"kind": "cpu", "ids": [0], "slug": "cpu"},
    "training": {"seed": 5},
    "checks": {"compile": "error"},
}
TRAINED = {
    "settings": SETTINGS,
    "run_digest": "0123456789ab",
    "checkpoint": "0123456789ab/step-000007",
    "steps": 7,
    "environment": {"compile": "c", "numbers": "n"},
}
IDENTITIES = {"env_id": "torch-x", "dataset_id": "d", "target_id": "t"}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    source = make_target(folder / "source")
    settings = {"source": str(source), "revision": None, "file": None, "chat_template": None}
    prepare(settings, None, folder / "prepared", Record("prepare"))
    return folder / "prepared"


@pytest.fixture(scope="module")
def shape(target_folder):
    return DrafterShape.from_target(json.loads((target_folder / "target.json").read_text()), DRAFTER)


@pytest.fixture
def run(tmp_path, shape):
    """A finished run: two checkpoints, train.json, rows and held-out prompts."""
    generator = torch.Generator().manual_seed(1)
    tensors = weights.initial_weights(shape, 5)
    for step in (5, 7):
        tensors = {
            name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in tensors.items()
        }
        checkpoint.write(tmp_path / "checkpoints/0123456789ab", step, tensors, {"x": torch.zeros(1)}, "", {})
    (tmp_path / "train.json").write_text(json.dumps(TRAINED))
    documents = torch.tensor([[0] * 30 + [1] * 14 + [-1] * 4], dtype=torch.int32)
    row = {
        "input_ids": torch.randint(3, 384, (1, 48), generator=generator, dtype=torch.int32),
        "document_ids": documents,
        "position_ids": torch.tensor([[*range(30), *range(14), *range(4)]], dtype=torch.int32),
        "loss_mask": torch.tensor([[0] * 10 + [1] * 20 + [0] * 5 + [1] * 9 + [0] * 4], dtype=torch.uint8),
    }
    splits = {f"{split}.{name}": value.clone() for split in ("train", "held_out") for name, value in row.items()}
    save_file(splits, tmp_path / "rows.safetensors")
    prompts = [{"id": str(number), "prompt_ids": [5, 6, 7 + number], "messages": []} for number in range(3)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return tmp_path


def stage(monkeypatch, module, *arguments):
    """Run a stage's `main` with command-line arguments."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def export_run(monkeypatch, run: Path, target_folder: Path) -> Path:
    arguments = [
        "--settings",
        json.dumps(IDENTITIES),
        "--checkpoints",
        run / "checkpoints",
        "--train",
        run / "train.json",
    ]
    arguments += ["--target", target_folder, "--output", run / "drafter", "--record", run / "export.json"]
    stage(monkeypatch, export, *arguments)
    return run / "drafter"


def check_weights(monkeypatch, run: Path, target_folder: Path) -> dict[str, bool | None]:
    arguments = ["--drafter", run / "drafter", "--checkpoints", run / "checkpoints", "--train", run / "train.json"]
    arguments += ["--rows", run / "rows.safetensors", "--target", target_folder]
    # eager here; whole runs of the workflow look at compiled layers
    monkeypatch.setattr(weights.Drafter, "compile_layers", lambda drafter: None)
    stage(monkeypatch, weights, *arguments, "--record", run / "weights.json")
    return {check.check: check.passed for check in read_checks(run / "weights.json")}


def test_the_drafter_is_the_last_checkpoint_rounded_with_its_provenance(monkeypatch, run, target_folder, shape):
    folder = export_run(monkeypatch, run, target_folder)
    last = load_file(run / "checkpoints/0123456789ab/step-000007/drafter.safetensors")
    exported = load_file(folder / "model.safetensors")
    assert exported.keys() == native.expected_tensors(shape).keys()
    assert all(torch.equal(exported[name], last[name].bfloat16()) for name in exported)
    facts = json.loads((folder / "draftflow.json").read_text())
    assert facts | IDENTITIES == facts
    assert (facts["steps"], facts["fingerprint"], facts["settings"]) == (7, TRAINED["environment"], SETTINGS)
    assert len(facts["sources"]["training.worker"]) == 64
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "draftflow.json"}


def test_without_the_last_checkpoint_nothing_is_exported(monkeypatch, run, target_folder):
    (run / "checkpoints/0123456789ab/step-000007/drafter.safetensors").write_bytes(b"damaged")
    with pytest.raises(DraftflowError, match="last step is gone or damaged"):
        export_run(monkeypatch, run, target_folder)
    assert not (run / "drafter").exists()


def test_an_interrupted_export_leaves_nothing_and_keeps_what_was_there(monkeypatch, run, target_folder):
    (run / "drafter").mkdir()
    (run / "drafter/config.json").write_text("{}")

    def full(path, value):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(export, "write_json", full)
    with pytest.raises(OSError, match="No space"):
        export_run(monkeypatch, run, target_folder)
    assert (run / "drafter/config.json").read_text() == "{}"
    assert {path.name for path in run.iterdir() if "drafter" in path.name} == {"drafter"}


def test_every_check_of_an_exported_drafter_passes(monkeypatch, run, target_folder):
    export_run(monkeypatch, run, target_folder)
    found = check_weights(monkeypatch, run, target_folder)
    reference = found.pop("reload_reference")
    assert reference in (True, None)
    assert set(found.values()) == {True}
    assert {
        "weights_compile",
        "weights_moved",
        "reload_weights",
        "mask_leak",
        "taps_features",
        "taps_layers",
    } <= found.keys()


def test_an_unsound_export_is_found_and_not_loaded(monkeypatch, run, target_folder):
    folder = export_run(monkeypatch, run, target_folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"][0] += 1
    (folder / "config.json").write_text(json.dumps(config))
    found = check_weights(monkeypatch, run, target_folder)
    failed = {name for name, passed in found.items() if not passed}
    assert failed == {"weights_names", "weights_finite", "reload_weights", "reload_config", "taps_layers"}
    assert "mask_leak" not in found


def test_the_export_of_an_untrained_drafter_is_found(monkeypatch, run, target_folder, shape):
    folder = run / "checkpoints/0123456789ab"
    checkpoint.write(folder, 7, weights.initial_weights(shape, 5), {"x": torch.zeros(1)}, "", {})
    export_run(monkeypatch, run, target_folder)
    found = check_weights(monkeypatch, run, target_folder)
    assert {name for name, passed in found.items() if not passed} == {"weights_moved"}


def test_training_starts_from_the_weights_that_the_check_compares_with(target_folder, shape):
    target = load_target(target_folder, "cpu", torch.float32)
    settings = {"row_length": 48, "rows_per_step": 2, "anchors_per_row": 4, "precision": "fp32"}
    plan = make_plan(asdict(shape), settings, "cpu", 1)
    hyper = Hyperparameters(steps=1, objective=Objective("decay", 2.0), seed=5)
    step = Step(plan, shape, target, lambda batch: torch.zeros(0), hyper, torch.device("cpu"))
    start = weights.initial_weights(shape, 5)
    assert all(torch.equal(value, start[name]) for name, value in step.drafter.state_dict().items())


def test_generation_writes_findings_acceptance_and_the_table(monkeypatch, run, target_folder):
    folder = export_run(monkeypatch, run, target_folder)
    settings = {"prompts": 24, "max_new_tokens": 12, "acceptance_floor": 1.0, "compile": "error"}
    arguments = ["--settings", json.dumps(settings), "--drafter", folder, "--target", target_folder]
    arguments += ["--held-out", run / "held_out.jsonl", "--device", "cpu"]
    stage(monkeypatch, generation, *arguments, "--record", run / "generation.json", "--table", run / "acceptance.tsv")
    found = {check.check: check.passed for check in read_checks(run / "generation.json")}
    assert found["lossless"] is True
    acceptance = json.loads((run / "generation.json").read_text())["acceptance"]
    assert acceptance["prompts"] == 3
    assert acceptance["interval"][0] <= acceptance["length"] <= acceptance["interval"][1]
    assert len((run / "acceptance.tsv").read_text().splitlines()) == 1 + 3


def test_initial_weights_depend_on_the_seed_alone(shape):
    torch.manual_seed(1)
    one = weights.initial_weights(shape, 5)
    torch.manual_seed(2)
    assert all(torch.equal(value, one[name]) for name, value in weights.initial_weights(shape, 5).items())
    assert not torch.equal(one["fc.weight"], Drafter(shape).state_dict()["fc.weight"])
