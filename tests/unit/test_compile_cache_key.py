import copy
import json

import pytest

from draftflow.compile_cache import key
from draftflow.errors import DraftflowError
from draftflow.training.plan import make_plan

SHAPE = {"block_size": 8, "vocab_size": 49152, "target_layer_ids": (1, 7)}
SETTINGS = {"row_length": 256, "rows_per_step": 8, "anchors_per_row": 32, "precision": "auto"}
COMPILE = {"digest": "aaa", "fields": {"torch": "2.11.0+cu130", "torch git": "70d99e9", "driver": "580.1"}}


def held(compile_part=COMPILE, **settings):
    return key.contents(compile_part, make_plan(SHAPE, {**SETTINGS, **settings}, "cpu", 1))


def edited(source):
    changed = copy.deepcopy(held())
    changed["sources"][source] = "0" * 12
    return changed


OTHER_TORCH = {"digest": "bbb", "fields": {**COMPILE["fields"], "torch git": "449b176"}}
OTHER_DRIVER = {"digest": "ccc", "fields": {**COMPILE["fields"], "driver": "570.2"}}
OTHER_GPU = {"digest": "ddd", "fields": {**COMPILE["fields"], "GPUs": ["NVIDIA H100"]}}


def another_cpu():
    changed = copy.deepcopy(held())
    changed["CPU"] = [*changed["CPU"], "avx1024"]
    return changed


def other_setting():
    changed = copy.deepcopy(held())
    changed["settings"]["TORCHINDUCTOR_CPP_DYNAMIC_THREADS"] = "0"
    return changed


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (held(OTHER_TORCH), "torch git 70d99e9 -> 449b176"),
        (another_cpu(), "another CPU, with avx1024"),
        (held(OTHER_DRIVER), "driver 580.1 -> 570.2"),
        (held(OTHER_GPU), r"GPUs None -> \['NVIDIA H100'\]"),
        (other_setting(), "TORCHINDUCTOR_CPP_DYNAMIC_THREADS 1 -> 0"),
        (held(row_length=512), "row_length 256 -> 512"),
        (edited("drafter/model.py"), "drafter/model.py was edited"),
    ],
)
def test_what_invalidates_the_cache_changes_the_key_and_is_named(tmp_path, now, words):
    assert key.cache_key(now) != key.cache_key(held())
    record = tmp_path / "warm.json"
    (tmp_path / "folder").mkdir()
    record.write_text(json.dumps({"key": key.cache_key(held()), "holds": held(), "folder": "folder", "devices": []}))
    with pytest.raises(DraftflowError, match=f"{words}.*snakemake --forcerun warm_cache") as error:
        key.require_warm(record, now)
    assert error.value.where == str(record)


def test_a_warm_cache_is_found_beside_its_record_wherever_that_lies(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name / "cache/abc").mkdir(parents=True)
        (tmp_path / name / "step").mkdir()
        record = tmp_path / name / "step/warm.json"
        record.write_text(
            json.dumps({"key": key.cache_key(held()), "holds": held(), "folder": "../cache/abc", "devices": []})
        )
        found = key.require_warm(record, held())
        assert found.resolve() == tmp_path / name / "cache/abc"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "was not warmed"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
    ],
)
def test_a_missing_or_broken_warm_up_is_refused_with_the_command_to_run(tmp_path, text, words):
    record = tmp_path / "warm.json"
    if text is not None:
        record.write_text(text)
    with pytest.raises(DraftflowError, match=f"{words}.*snakemake --forcerun warm_cache"):
        key.require_warm(record, held())


def test_only_instructions_that_a_compiler_uses_count_and_only_on_the_cpu(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu vme avx2 sse4_2 md_clear amx_tile ibrs fma\n")
    assert key.cpu_instructions(tmp_path / "cpuinfo") == ["amx_tile", "avx2", "fma", "sse4_2"]
    assert key.contents(COMPILE, make_plan(SHAPE, SETTINGS, "cuda", 1))["CPU"] == []


def test_a_folder_that_is_gone_is_refused_with_the_command_to_run(tmp_path):
    with pytest.raises(DraftflowError, match=r"is gone\. Run `snakemake --forcerun warm_cache`"):
        key.require_folder(tmp_path / "gone")
