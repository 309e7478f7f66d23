import json
from pathlib import Path

import pytest
import yaml

from draftflow import config
from draftflow.errors import DraftflowError

ROOT = Path(__file__).parents[2]


def test_committed_yaml_is_what_the_models_say():
    assert (ROOT / "config.yaml").read_text() == config.commented_yaml(), "run python -m draftflow.config"


def test_committed_schema_is_what_the_models_say():
    committed = json.loads((ROOT / "rules/config.schema.json").read_text())
    assert committed == json.loads(json.dumps(config.schema())), "run python -m draftflow.config"


def test_committed_yaml_loads_to_the_defaults():
    assert config.load(yaml.safe_load((ROOT / "config.yaml").read_text())) == config.Config()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_configurations(path):
    config.load(yaml.safe_load(path.read_text()), path.name)


def test_every_key_is_explained_in_one_line_of_at_most_120_characters():
    lines = config.commented_yaml().splitlines()
    assert max(map(len, lines)) <= 120
    for number, line in enumerate(lines):
        if line and not line.lstrip().startswith("#"):
            assert lines[number - 1].lstrip().startswith("#"), line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch: {verson: 2.11.0}", "c.yaml: torch.verson: unknown key (value '2.11.0'). Did you mean torch.version?"),
        ("learning_rate: 3", "c.yaml: learning_rate: unknown key (value 3). Did you mean training.learning_rate?"),
        (
            "torch: {build: cu999}",
            "c.yaml: torch.build: 'cu999' is not allowed. Allowed: auto | cpu | cu126 | cu128 | cu130 | external.",
        ),
        ("dataset: {held_out: 3}", "c.yaml: dataset.held_out: 3 is not allowed. Allowed: a number, above 0, below 1."),
        (
            "dataset: {row_length: 100}",
            "c.yaml: dataset.row_length: 100 is not allowed. Allowed: an integer, at least 16, a multiple of 16.",
        ),
        (
            "training: {steps: {cpu: 0}}",
            "c.yaml: training.steps.cpu: 0 is not allowed. Allowed: an integer, at least 1.",
        ),
        (
            "torch: 3",
            "c.yaml: torch: 3 is not allowed."
            " Allowed: a block with the keys version, build, index, python, interpreter.",
        ),
        (
            "training: {devices: {a: 1}}",
            "c.yaml: training.devices: {'a': 1} is not allowed."
            " Allowed: an integer | a list of integers | a text | a block with the keys target, drafter"
            " | a block with the keys nodes, per_node.",
        ),
        (
            "training: {devices: {target: [0], drafter: 1}}",
            "c.yaml: training.devices: {'target': [0], 'drafter': 1} is not allowed."
            " Allowed: an integer | a list of integers | a text | a block with the keys target, drafter"
            " | a block with the keys nodes, per_node.",
        ),
        (
            "training: {devices: {nodes: 0, per_node: 8}}",
            "c.yaml: training.devices: {'nodes': 0, 'per_node': 8} is not allowed."
            " Allowed: an integer | a list of integers | a text | a block with the keys target, drafter"
            " | a block with the keys nodes, per_node.",
        ),
        (
            "cluster: {launcher: srun}",
            "c.yaml: cluster.launcher: 'srun' is not allowed. Allowed: auto | a list of texts.",
        ),
        ("cluster: {launcher: []}", "c.yaml: cluster.launcher: [] is not allowed. Allowed: auto | a list of texts."),
        (
            "dataset: {sources: []}",
            "c.yaml: dataset.sources: [] is not allowed. Allowed: a list of paths, not empty.",
        ),
    ],
)
def test_a_wrong_key_is_one_line_with_key_value_and_what_is_allowed(text, message):
    with pytest.raises(DraftflowError) as caught:
        config.load(yaml.safe_load(text), "c.yaml")
    assert str(caught.value) == message


def test_all_wrong_keys_are_named_at_once():
    with pytest.raises(DraftflowError) as caught:
        config.load({"zzz": 1, "torch": {"build": "x"}}, "c.yaml")
    assert len(str(caught.value).splitlines()) == 2


def test_a_key_that_resembles_none_lists_the_known_ones():
    with pytest.raises(DraftflowError, match=f"Known keys here: {', '.join(sorted(config.Config.model_fields))}"):
        config.load({"qqqq": 1})


def test_a_version_that_yaml_reads_as_a_number_is_taken_as_text():
    assert config.load(yaml.safe_load("torch: {python: 3.12}")).torch.python == "3.12"


def test_devices_may_be_what_a_scheduler_hands_out():
    for written, expected in (
        ("{nodes: 2, per_node: 8}", {"nodes": 2, "per_node": 8}),
        ("{nodes: '2', per_node: '8'}", {"nodes": 2, "per_node": 8}),  # from the command line
        ("{nodes: 1, per_node: cpu:4}", {"nodes": 1, "per_node": "cpu:4"}),
    ):
        loaded = config.load(yaml.safe_load(f"training: {{devices: {written}}}"))
        assert loaded.model_dump()["training"]["devices"] == expected


def test_a_launcher_is_words():
    loaded = config.load(yaml.safe_load("cluster: {launcher: [mpirun, -np, 2, --map-by, ppr:1:node]}"))
    assert loaded.cluster.launcher == ["mpirun", "-np", "2", "--map-by", "ppr:1:node"]


def test_devices_may_be_given_for_each_role():
    for written, expected in (
        ("{target: [0, 1], drafter: [2]}", {"target": [0, 1], "drafter": [2]}),
        ("{target: ['0'], drafter: ['1']}", {"target": [0], "drafter": [1]}),  # from the command line
        ("{target: cpu:2, drafter: cpu}", {"target": "cpu:2", "drafter": "cpu"}),
    ):
        loaded = config.load(yaml.safe_load(f"training: {{devices: {written}}}"))
        assert loaded.model_dump()["training"]["devices"] == expected
