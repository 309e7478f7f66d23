"""The checks that load a drafter, each against a sound one and against a planted failure. Tiny random target."""

import json
from copy import deepcopy

import pytest

torch = pytest.importorskip("torch")

from tiny import make_target  # noqa: E402

from draftflow.checks import generation, weights  # noqa: E402
from draftflow.checks.mask import mask_checks  # noqa: E402
from draftflow.checks.result import add_checks, read_checks  # noqa: E402
from draftflow.checks.taps import features_check, layers_check, tap_error  # noqa: E402
from draftflow.drafter import checkpoint  # noqa: E402
from draftflow.drafter.generate import Generation  # noqa: E402
from draftflow.drafter.mask import FULL, Kind, allowed  # noqa: E402
from draftflow.drafter.model import Drafter  # noqa: E402
from draftflow.drafter.shape import DrafterShape  # noqa: E402
from draftflow.errors import DraftflowError  # noqa: E402
from draftflow.stage import Record  # noqa: E402
from draftflow.target.features import FeatureExtractor  # noqa: E402
from draftflow.target.load import load_target  # noqa: E402
from draftflow.target.prepare import prepare  # noqa: E402

SETTINGS = {"layers": 2, "block_size": 4, "taps": 5, "target_layers": None, "mask_token": "auto"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    source = make_target(folder / "source")
    settings = {"source": str(source), "revision": None, "file": None, "chat_template": None}
    prepare(settings, None, folder / "prepared", Record("prepare"))
    return load_target(folder / "prepared", "cpu", torch.float32)


@pytest.fixture(scope="module")
def shape(target):
    return DrafterShape.from_target(target.description, SETTINGS)


@pytest.fixture(scope="module")
def start(shape):
    return Drafter(shape, torch.Generator().manual_seed(0)).state_dict()


@pytest.fixture
def drafter(shape, start):
    """A drafter that went somewhere from its start."""
    model = Drafter(shape, torch.Generator().manual_seed(0)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def exported(drafter, tmp_path):
    checkpoint.export(drafter, tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture(scope="module")
def row():
    """Two documents of 30 and 14 tokens and 4 of padding; the last two thirds of each are response."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 384, (48,), generator=generator)
    documents = torch.tensor([0] * 30 + [1] * 14 + [-1] * 4)
    positions = torch.tensor([*range(30), *range(14), *range(4)])
    loss_mask = torch.tensor([0] * 10 + [1] * 20 + [0] * 5 + [1] * 9 + [0] * 4)
    return {"input_ids": ids, "document_ids": documents, "position_ids": positions, "loss_mask": loss_mask}


@pytest.fixture(scope="module")
def extractor(target, shape):
    return FeatureExtractor(target, shape.target_layer_ids)


@pytest.fixture(scope="module")
def features(extractor, row):
    return extractor(row["input_ids"][None], row["document_ids"][None], row["position_ids"][None])[0]


def bf16(state):
    return {name: value.bfloat16() for name, value in state.items()}


def test_a_whole_export_passes_every_check_of_weights(drafter, start, shape, exported):
    tensors = weights.load_file(exported / "model.safetensors")
    state = drafter.state_dict()
    config = json.loads((exported / "config.json").read_text())
    found = [
        weights.names_check(tensors, shape),
        weights.finite_check(tensors),
        weights.moved_check(start, state),
        weights.reload_check(tensors, state),
        weights.config_check(config, shape),
    ]
    assert [check.passed for check in found] == [True] * 5


def test_a_missing_a_foreign_and_a_misshapen_tensor_are_each_counted(drafter, shape):
    tensors = bf16(drafter.state_dict())
    del tensors["layers.1.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = torch.zeros(2, 2)
    tensors["norm.weight"] = tensors["norm.weight"][:-1]
    check = weights.names_check(tensors, shape)
    assert (check.passed, check.figure) == (False, 3)
    assert "layers.1.mlp.up_proj.weight" in check.explanation


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_fails(drafter, value):
    tensors = bf16(drafter.state_dict())
    tensors["fc.weight"][3, 5] = value
    check = weights.finite_check(tensors)
    assert check.passed is False
    assert "fc.weight" in check.explanation


def test_a_tensor_that_did_not_move_fails(drafter, start):
    state = drafter.state_dict() | {"layers.0.self_attn.k_norm.weight": start["layers.0.self_attn.k_norm.weight"]}
    check = weights.moved_check(start, state)
    assert check.passed is False
    assert "1 of 25 did not move: layers.0.self_attn.k_norm.weight" in check.explanation


def test_weight_decay_alone_is_no_movement(drafter, start):
    decayed = start["fc.weight"].clone()
    for _ in range(3000):
        decayed *= 1 - 6e-4 * 0.01
    assert weights.moved_check(start, drafter.state_dict() | {"fc.weight": decayed}).passed is False


def test_one_step_of_adam_is_movement(start):
    generator = torch.Generator().manual_seed(3)
    stepped = {
        name: value + 6e-4 * torch.randn(value.shape, generator=generator).sign() for name, value in start.items()
    }
    assert weights.moved_check(start, stepped).passed is True


def test_an_export_of_other_weights_fails(drafter, exported):
    state = {name: value.clone() for name, value in drafter.state_dict().items()}
    state["norm.weight"][0] += 0.1
    check = weights.reload_check(weights.load_file(exported / "model.safetensors"), state)
    assert (check.passed, check.figure) == (False, 1)


def test_a_config_of_another_shape_fails(shape, exported):
    config = json.loads((exported / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] += 1
    check = weights.config_check(config, shape)
    assert (check.passed, check.figure) == (False, "dflash_config")


def test_pypi_dflash_makes_the_same_proposals(exported, target, features, row):
    pytest.importorskip("dflash.model")
    check = weights.reference_check(exported, checkpoint.load(exported, "cpu", torch.float32), target, features, row)
    assert check.passed is True
    assert "0 of 21 proposals" in check.explanation


def test_pypi_dflash_that_reads_other_weights_fails(exported, drafter, target, features, row):
    pytest.importorskip("dflash.model")
    with torch.no_grad():
        drafter.layers[0].self_attn.v_proj.weight.neg_()
    check = weights.reference_check(exported, drafter, target, features, row)
    assert check.passed is False


def test_without_dflash_the_reference_is_not_run(exported, drafter, target, features, row, monkeypatch):
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    check = weights.reference_check(exported, drafter, target, features, row)
    assert check.passed is None
    assert check.explanation.startswith("not run:")


@pytest.mark.parametrize("causal", [True, False])
def test_pypi_dflash_makes_the_same_proposals_with_sliding_layers(target, features, row, causal, tmp_path):
    pytest.importorskip("dflash.model")
    settings = {**SETTINGS, "sliding_window": 6, "sliding_causal": causal}
    shape = DrafterShape.from_target(target.description, settings)
    checkpoint.export(Drafter(shape, torch.Generator().manual_seed(0)), tmp_path)
    ours = checkpoint.load(tmp_path, "cpu", torch.float32)
    assert weights.reference_check(tmp_path, ours, target, features, row).passed is True
    config = json.loads((tmp_path / "config.json").read_text())
    assert weights.config_check(config, shape).passed is True
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 7}))
    assert weights.reference_check(tmp_path, ours, target, features, row).passed is False


def mask_outcomes(drafter, target, features, row, visibility):
    found = mask_checks(drafter, target.embed_weight, features, row, visibility)
    return {check.check: check.passed for check in found}


def dense(change, kinds=("full", "sliding")):
    """`allowed` with a fault planted in the masks of these kinds of layers."""

    def visibility(anchors, document_ids, block_size, kind=FULL):
        mask = allowed(anchors, document_ids, block_size, kind)
        if ("full" if kind == FULL else "sliding") in kinds:
            change(mask, anchors, document_ids, block_size)
        return mask

    return visibility


def sees_anchor(mask, anchors, document_ids, size):
    for copy in range(mask.shape[0]):
        for block in range(anchors.positions.shape[1]):
            mask[copy, 0, block * size : (block + 1) * size, anchors.positions[copy, block]] = True


def sees_other_blocks(mask, anchors, document_ids, size):
    mask[:, :, :, document_ids.shape[1] :] = True


def sees_other_documents(mask, anchors, document_ids, size):
    for copy in range(mask.shape[0]):
        for block in range(anchors.positions.shape[1]):
            mask[copy, 0, block * size : (block + 1) * size, : anchors.positions[copy, block]] = True


def sees_no_context(mask, anchors, document_ids, size):
    mask[:, :, :, : document_ids.shape[1]] = False


def test_the_mask_of_training_leaks_nothing(drafter, target, features, row):
    assert mask_outcomes(drafter, target, features, row, None) == {"mask_leak": True, "mask_reach": True}


def test_in_float8_nothing_leaks_either(drafter, target, features, row):
    """One scale for all rows would make the rounding of what a block sees depend on what it must not see."""
    in_float8 = deepcopy(drafter)
    in_float8.use_float8()
    assert in_float8.fc.float8
    assert mask_outcomes(in_float8, target, features, row, None) == {"mask_leak": True, "mask_reach": True}


@pytest.mark.parametrize("fault", [sees_anchor, sees_other_blocks, sees_other_documents])
def test_a_mask_that_shows_too_much_fails(drafter, target, features, row, fault):
    assert mask_outcomes(drafter, target, features, row, dense(fault))["mask_leak"] is False


def test_a_mask_that_shows_no_context_fails(drafter, target, features, row):
    outcomes = mask_outcomes(drafter, target, features, row, dense(sees_no_context))
    assert outcomes == {"mask_leak": True, "mask_reach": False}


BOTH = {"mask_leak": True, "mask_reach": True, "mask_leak_sliding": True, "mask_reach_sliding": True}


def sliding_drafter(target, **changes):
    settings = {**SETTINGS, "layers": 3, "sliding_window": 6, **changes}
    return Drafter(DrafterShape.from_target(target.description, settings), torch.Generator().manual_seed(0)).eval()


@pytest.mark.parametrize("causal", [True, False])
def test_the_masks_of_full_and_sliding_layers_leak_nothing(target, features, row, causal):
    drafter = sliding_drafter(target, sliding_causal=causal)
    assert mask_outcomes(drafter, target, features, row, None) == BOTH
    alone = sliding_drafter(target, sliding_causal=causal, sliding_layers=[0, 1, 2])
    assert mask_outcomes(alone, target, features, row, None) == {"mask_leak": True, "mask_reach": True}


def window_of(window, causal=True):
    """The mask of training, but for another window or causality in the sliding layers."""
    return lambda anchors, documents, size, kind=FULL: allowed(
        anchors, documents, size, kind if kind == FULL else Kind(window, causal)
    )


@pytest.mark.parametrize(
    "fault",
    [window_of(7), window_of(None), window_of(6, causal=False), dense(sees_anchor, ["sliding"])],
    ids=["a token wider", "no window", "both directions", "the anchor"],
)
def test_a_sliding_mask_that_shows_too_much_fails(target, features, row, fault):
    outcomes = mask_outcomes(sliding_drafter(target), target, features, row, fault)
    assert outcomes["mask_leak_sliding"] is False
    alone = sliding_drafter(target, sliding_layers=[0, 1, 2])
    assert mask_outcomes(alone, target, features, row, fault)["mask_leak"] is False


def test_the_window_of_a_single_layer_is_that_of_the_first_proposal(target, features, row):
    drafter = sliding_drafter(target, layers=1, sliding_layers=[0])
    assert mask_outcomes(drafter, target, features, row, None) == {"mask_leak": True, "mask_reach": True}
    assert mask_outcomes(drafter, target, features, row, window_of(7))["mask_leak"] is False
    beside = sliding_drafter(target, layers=2)
    assert mask_outcomes(beside, target, features, row, None) == BOTH
    assert mask_outcomes(beside, target, features, row, window_of(7))["mask_leak_sliding"] is False


def test_looking_at_a_mask_leaves_weights_and_masks_as_they_are(target, features, row):
    drafter = sliding_drafter(target)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    given, forward = set(), drafter.forward
    drafter.forward = lambda *inputs: given.add(tuple(map(id, inputs[-2:]))) or forward(*inputs)
    mask_outcomes(drafter, target, features, row, None)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    assert all(full != sliding for full, sliding in given)  # under one mask for all, layers would compile anew


def test_blocks_of_one_proposal_are_checked(target, features, row):
    drafter = sliding_drafter(target, block_size=2)
    assert mask_outcomes(drafter, target, features, row, None) == BOTH
    assert mask_outcomes(drafter, target, features, row, window_of(7))["mask_leak_sliding"] is False


def test_faults_of_one_kind_of_mask_are_told_from_those_of_the_other(target, features, row):
    drafter = sliding_drafter(target)
    outcomes = mask_outcomes(drafter, target, features, row, dense(sees_anchor, ["full"]))
    assert outcomes == BOTH | {"mask_leak": False}
    outcomes = mask_outcomes(drafter, target, features, row, dense(sees_no_context, ["sliding"]))
    assert outcomes == BOTH | {"mask_reach_sliding": False}


def test_a_drafter_that_gives_no_numbers_fails(drafter, target, features, row):
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    assert mask_outcomes(drafter, target, features, row, None)["mask_leak"] is False


def test_features_are_the_targets_hidden_states(target, extractor, shape, row):
    assert tap_error(target, extractor, list(shape.target_layer_ids), row) < 1e-4


def test_features_of_the_next_layer_fail(target, shape, row):
    shifted = FeatureExtractor(target, [layer + 1 for layer in shape.target_layer_ids])
    error = tap_error(target, shifted, list(shape.target_layer_ids), row)
    assert features_check(error).passed is False


def test_features_that_see_other_documents_fail(target, extractor, shape, row):
    one_document = lambda ids, documents, positions: extractor(ids, documents * 0, positions)  # noqa: E731
    error = tap_error(target, one_document, list(shape.target_layer_ids), row)
    assert features_check(error).passed is False


def test_an_export_that_names_other_layers_fails():
    assert layers_check([1, 2], [1, 3]).passed is False


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(4)
    return [
        {"id": f"{number:016x}", "prompt_ids": torch.randint(3, 384, (5 + number,), generator=generator).tolist()}
        for number in range(3)
    ]


def outcomes_of(drafter, target, prompts):
    return [generation.decode(drafter, target, prompt, 16) for prompt in prompts]


def passed(outcomes, floor=1.0):
    found = generation.generation_checks(outcomes, generation.summary(outcomes), floor)
    return {check.check: check.passed for check in found}


def test_decoding_with_any_drafter_is_lossless(drafter, target, prompts):
    outcomes = outcomes_of(drafter, target, prompts)
    assert passed(outcomes)["lossless"] is True
    assert all(outcome.difference is None for outcome in outcomes)
    assert {len(outcome.tokens) for outcome in outcomes} == {16}


def test_a_random_drafter_is_below_the_floor(drafter, target, prompts):
    found = passed(outcomes_of(drafter, target, prompts), floor=2.0)
    assert found["acceptance_length"] is False


def test_a_changed_token_fails(drafter, target, prompts, monkeypatch):
    sound = generation.generate

    def changed(*arguments):
        result = sound(*arguments)
        tokens = [*result.tokens[:5], (result.tokens[5] + 1) % 384, *result.tokens[6:]]
        return Generation(tokens, result.acceptance_lengths, result.proposed_by_position, result.accepted_by_position)

    monkeypatch.setattr(generation, "generate", changed)
    outcomes = outcomes_of(drafter, target, prompts)
    assert [outcome.difference for outcome in outcomes] == [5, 5, 5]
    assert all(outcome.margin > 0 for outcome in outcomes)
    assert passed(outcomes)["lossless"] is False


def test_a_generation_that_ends_early_fails_whatever_the_margin(drafter, target, prompts, monkeypatch):
    sound = generation.generate

    def shortened(*arguments):
        result = sound(*arguments)
        return Generation(
            result.tokens[:-1], result.acceptance_lengths, result.proposed_by_position, result.accepted_by_position
        )

    monkeypatch.setattr(generation, "generate", shortened)
    assert passed(outcomes_of(drafter, target, prompts))["lossless"] is False


def outcome(difference=None, margin=None, lengths=(2, 1)):
    return generation.Outcome("id", [1, 2, 3, 4], list(lengths), [2, 2, 2], [1, 0, 0], difference, margin, (1.0, 1.0))


def test_near_ties_are_counted_apart_and_only_few_are_excused():
    few = passed([outcome(), outcome(2, 1e-4)])
    assert (few["lossless"], few["near_ties"]) == (True, True)
    many = passed([outcome(2, 1e-4), outcome(2, 1e-4)])
    assert (many["lossless"], many["near_ties"]) == (True, False)


def test_an_interval_that_reaches_one_fails():
    found = passed([outcome(lengths=(1, 1, 1)), outcome(lengths=(3, 1, 1))])
    assert (found["acceptance_length"], found["acceptance_interval"]) == (True, False)


def test_acceptance_by_position_is_summed_over_prompts_and_written_as_a_table():
    rows = generation.by_position([outcome(), outcome()])
    assert rows[0] == {"position": 1, "proposed": 4, "accepted": 2, "rate": 0.5}
    assert generation.table(rows).splitlines()[:2] == ["position\tproposed\taccepted\trate", "1\t4\t2\t0.5"]


def test_positions_agree_with_acceptance_lengths(drafter, target, prompts):
    """Without a stop token and away from the end, a block of length n accepted the first n - 1 proposals."""
    outcomes = outcomes_of(drafter, target, prompts)
    accepted = sum(row["accepted"] for row in generation.by_position(outcomes))
    lengths = [length for outcome in outcomes for length in outcome.lengths]
    assert sum(lengths) - len(lengths) <= accepted <= sum(lengths)


def test_fewer_held_out_prompts_than_asked_are_all_used_and_one_is_refused(tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "prompt_ids": [1]}) + "\n" for n in range(3)))
    assert [prompt["id"] for prompt in generation.read_prompts(path, 2)] == ["0", "1"]
    assert len(generation.read_prompts(path, 24)) == 3
    path.write_text('{"id": "0", "prompt_ids": [1]}\n')
    with pytest.raises(DraftflowError, match="too few"):
        generation.read_prompts(path, 24)


def test_figures_that_are_no_numbers_survive_the_record(tmp_path):
    record = Record("check")
    add_checks(record, [features_check(float("inf"))])
    record.write(tmp_path / "record.json")
    assert "Infinity" not in (tmp_path / "record.json").read_text()
    assert read_checks(tmp_path / "record.json")[0].figure == "inf"
