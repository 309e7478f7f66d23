import json

import pytest

from draftflow.errors import DraftflowError
from draftflow.training import plan as plans
from draftflow.training.plan import check_precision, make_plan, plan_differences, plan_id, plan_of_run
from draftflow.training.train import run_digest

SHAPE = {"block_size": 8, "vocab_size": 49152, "target_layer_ids": (1, 7)}
SETTINGS = {"row_length": 256, "rows_per_step": 8, "anchors_per_row": 32, "precision": "auto"}


def plan(kind="cpu", world_size=1, **settings):
    return make_plan(SHAPE, {**SETTINGS, **settings}, kind, world_size)


def test_rows_are_shared_among_the_devices():
    assert plan(world_size=4).rows == 2


@pytest.mark.parametrize(
    ("kind", "precision", "expected"),
    [
        ("cpu", "auto", "float32"),
        ("cuda", "auto", "bfloat16"),
        ("cpu", "bf16", "bfloat16"),
        ("cuda", "fp32", "float32"),
    ],
)
def test_precision_follows_the_device_unless_it_is_set(kind, precision, expected):
    assert plan(kind, precision=precision).precision == expected


def test_float8_is_bf16_with_other_products():
    found = plan("cuda", precision="fp8")
    assert (found.precision, found.float8) == ("bfloat16", True)
    assert plan_id(found) != plan_id(plan("cuda", precision="bf16"))
    assert found.loss_chunk == plan("cuda", precision="bf16").loss_chunk


def test_float8_is_refused_where_the_device_has_no_such_products():
    with pytest.raises(DraftflowError, match=r"training.precision: .*float8 products on the CPU.*bf16"):
        plan("cpu", precision="fp8")
    gpus = [("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0))]
    with pytest.raises(DraftflowError, match=r"training.precision: .*A100 \(compute capability 8.0\).*8.9 or more"):
        check_precision("fp8", "cuda", gpus)
    check_precision("fp8", "cuda", [("NVIDIA L40", (8, 9)), ("NVIDIA B200", (10, 0)), ("unknown", ())])
    check_precision("bf16", "cuda", gpus)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(
        DraftflowError, match=r"training.rows_per_step: 8 rows per step do not divide among 3.*such as 9"
    ):
        plan(world_size=3)


def test_rows_that_do_not_fit_the_tiles_of_a_gpu_are_refused():
    with pytest.raises(DraftflowError, match=r"dataset.row_length: Rows of 272 tokens.*such as 384"):
        plan("cuda", row_length=272)
    assert plan("cpu", row_length=272).row_length == 272


def test_every_static_shape_is_in_the_id():
    changes = [{"row_length": 512}, {"rows_per_step": 16}, {"anchors_per_row": 64}, {"precision": "bf16"}]
    ids = {plan_id(plan(**change)) for change in [{}, *changes]}
    assert len(ids) == len(changes) + 1
    assert plan_id(plan()) == plan_id(plan())


def test_the_number_of_devices_counts_only_through_the_rows_of_each():
    assert plan_id(plan(world_size=2, rows_per_step=16)) == plan_id(plan())


def test_differences_name_field_and_values():
    before, now = vars(plan()), vars(plan(row_length=512))
    assert plan_differences(before, now) == ["row_length 256 -> 512"]
    changed = {**now, "drafter": {**now["drafter"], "block_size": 16}}
    assert "drafter.block_size 8 -> 16" in plan_differences(before, changed)


TARGET = {
    "architecture": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "max_position_embeddings": 512,
    "vocab_size": 1000,
    "bos_token_id": 1,
    "eos_token_ids": [2],
    "mask_token_id_auto": 3,
}
DRAFTER = {"layers": 2, "block_size": 8, "taps": 2, "target_layers": None, "mask_token": "auto"}


def of_run(folder, monkeypatch, kind, version="5.17.0", **changes):
    """Plan and digest of a run on `kind`, with a target that is changed."""
    monkeypatch.setattr(plans.metadata, "version", lambda name: version)
    (folder / "target.json").write_text(json.dumps({**TARGET, **changes}))
    (folder / "rows").write_text("")
    settings = {**SETTINGS, "drafter": DRAFTER, "devices": {"kind": kind}, "training": {}}
    return plan_of_run(settings, folder, kind, 1)[1], run_digest(settings, folder / "rows", folder)


def test_what_is_compiled_of_a_target_is_in_the_plan_of_a_gpu(tmp_path, monkeypatch):
    found = of_run(tmp_path, monkeypatch, "cuda")[0]
    others = [
        of_run(tmp_path, monkeypatch, "cuda", **change)[0]
        for change in ({"version": "5.18.0"}, {"architecture": "qwen3"}, {"rms_norm_eps": 1e-6})
    ]
    assert len({plan_id(each) for each in [found, *others]}) == 4
    assert of_run(tmp_path, monkeypatch, "cuda", source="another", sha256="0")[0] == found
    assert of_run(tmp_path, monkeypatch, "cpu")[0].target == {}


def test_another_version_of_the_target_s_code_is_no_other_run(tmp_path, monkeypatch):
    digests = {of_run(tmp_path, monkeypatch, "cuda", version)[1] for version in ("5.17.0", "5.18.0")}
    assert len(digests) == 1
    assert of_run(tmp_path, monkeypatch, "cuda", architecture="qwen3")[1] not in digests
