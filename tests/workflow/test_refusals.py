"""Bad input, given as a user gives it: refused at its stage in one line with place and remedy; earlier stages stay."""

import json

import pytest


def config(**blocks):
    """`--config` for blocks given as flow mappings."""
    return ["--config", *(f"{name}={value}" for name, value in blocks.items())]


def refused(project, *arguments):
    """The one line with which draftflow refuses; no traceback of it is shown."""
    result = project.snakemake(*arguments)
    assert result.code != 0
    assert "Traceback" not in result.output
    (line,) = result.errors
    return line


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"torch": "{verson: 2.11.0}"}, ["torch.verson", "unknown key", "torch.version?"]),
        ({"training": "{devices: 0}"}, ["training.devices", "zero devices"]),
        ({"training": "{devices: 'cpu:0'}"}, ["training.devices", "zero devices"]),
        ({"training": "{devices: [7]}"}, ["training.devices", "GPU 7 does not exist", "cpu"]),
        ({"training": "{devices: tpu}"}, ["training.devices", "'tpu' names no devices"]),
        ({"training": "{devices: cpu, precision: fp8}"}, ["training.precision", "float8 products on the CPU", "bf16"]),
        ({"training": "{devices: 'cpu:3'}"}, ["training.rows_per_step", "3 devices", "multiple of 3"]),
        ({"training": "{devices: {target: cpu, drafter: [7]}}"}, ["training.devices", "One role is on GPUs"]),
        ({"torch": "{version: 2.13.0, build: cu128, index: pypi}"}, ["2.13.0 as cu128", "cu130", "2.10"]),
        ({"torch": "{build: cpu, index: pypi}"}, ["PyPI has no torch 2.11.0 as cpu"]),
        ({"torch": "{version: 2.12.0}"}, ["train-2.12.0-cu130-pypi.txt", "snakemake lock"]),
        ({"torch": "{index: no-such-folder}"}, ["torch.index", "no-such-folder"]),
        ({"torch": "{build: external, interpreter: no-such-python}"}, ["torch.interpreter", "no-such-python"]),
        ({"dataset": "{sources: [none.jsonl]}"}, ["dataset.sources", "none.jsonl is not a file"]),
        ({"target": "{chat_template: none.jinja}"}, ["target.chat_template", "none.jinja"]),
        ({"compile_cache": "{bundle: none.tar.xz}"}, ["compile_cache.bundle", "no bundle none.tar.xz", "bundle_cache"]),
        ({"run": "a/b"}, ["run", "'a/b' is not allowed"]),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_before_anything_runs(project, blocks, words):
    line = refused(project, *config(**blocks))
    assert [word for word in words if word not in line] == [], line
    assert not (project.folder / "results").exists()


def message(role, content):
    return {"role": role, "content": content}


GOOD = {"messages": [message("user", "What is two and two?"), message("assistant", "Four, as ever.")]}

BAD_LINES = {
    "a broken line": ('{"messages": [', ["data.jsonl:2", "JSON"]),
    "an unknown role": (
        json.dumps({"messages": [message("user", "a"), message("robot", "b")]}),
        ["data.jsonl:2", "robot"],
    ),
    "an empty response": (
        json.dumps({"messages": [message("user", "a"), message("assistant", " ")]}),
        ["data.jsonl:2", "empty"],
    ),
    "no response": (json.dumps({"messages": [message("user", "a")]}), ["data.jsonl:2", "regenerate"]),
}


@pytest.fixture(scope="module")
def dataset_project(shared_project):
    """The shared folder with the dataset environment and the default target."""
    shared_project.run("dataset")
    return shared_project


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_of_data_is_refused_with_file_and_line(dataset_project, name):
    text, words = BAD_LINES[name]
    (dataset_project.folder / "data.jsonl").write_text(json.dumps(GOOD) + "\n" + text + "\n")
    line = refused(dataset_project, "dataset", *config(dataset="{sources: [data.jsonl]}"))
    assert [word for word in words if word not in line] == [], line


def test_a_prompt_longer_than_the_row_is_refused_with_file_and_line(dataset_project):
    long = {"messages": [message("user", "word " * 300), message("assistant", "Yes.")]}
    (dataset_project.folder / "long.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(long) + "\n")
    line = refused(dataset_project, "dataset", *config(dataset="{sources: [long.jsonl], held_out: 0.5}"))
    assert "long.jsonl:2" in line
    assert "dataset.row_length" in line


def test_a_dataset_without_a_held_out_prompt_is_refused(dataset_project):
    (dataset_project.folder / "one.jsonl").write_text(json.dumps(GOOD) + "\n")
    line = refused(dataset_project, "dataset", *config(dataset="{sources: [one.jsonl]}"))
    assert "held-out" in line
    assert "dataset.held_out" in line


def test_a_target_folder_without_tokenizer_is_refused_and_what_was_read_stays(dataset_project):
    folder = dataset_project.folder / "bare-target"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    line = refused(dataset_project, "dataset", *config(target="{source: bare-target}"))
    assert "bare-target" in line
    assert "tokenizer" in line


def test_an_index_that_does_not_answer_is_refused_with_its_address(project, monkeypatch):
    monkeypatch.setenv("UV_CACHE_DIR", str(project.folder / "empty-cache"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    line = refused(project, "environment")
    assert "127.0.0.1:9" in line
    assert not list(project.folder.glob("results/environments/*/install.json"))
