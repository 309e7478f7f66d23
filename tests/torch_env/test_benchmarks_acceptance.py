"""The benchmark of acceptance: a tiny run, what is replayed against what is generated, and the choice of prompts."""

import json
from pathlib import Path

import fetched_peers  # makes the benchmarks importable

# isort: split
import acceptance
import prompts as prompt_sources
import pytest
import torch
from test_drafter_generate import prompts, target, trained  # noqa: F401

from draftflow.dataset.formats import Conversation
from draftflow.drafter.generate import generate
from draftflow.errors import DraftflowError
from draftflow.target.features import FeatureExtractor

LIMIT = 40


def call(output: Path, *arguments: str) -> dict:
    """The results of one call of the tiny benchmark."""
    line = ["--tiny", "--output", str(output), "--at", "0.5", "--at", "3", "--samples", "2", *arguments]
    return acceptance.run_all(acceptance.parse(line), "the command")


def test_tiny_run_trains_measures_and_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("dflash.model")
    import acceptance_trials

    monkeypatch.setattr(acceptance_trials, "TIMED", 2)
    monkeypatch.setattr(acceptance_trials, "WARM_UP", 1)
    monkeypatch.setattr(acceptance_trials, "SPEED_PROMPTS", 3)
    peers = ("--peers", str(fetched_peers.folder()))
    # as if the time were over after the first mark of the first variant
    with monkeypatch.context() as patched:
        patched.setattr(acceptance_trials.Job, "late", lambda job: (job.output / "runs/draftflow/at-0.5").is_dir())
        patched.setattr(acceptance, "measure_all", lambda run: None)
        patched.setattr(acceptance, "replay_all", lambda run: None)
        found = call(tmp_path, *peers, "--variant", "draftflow")
    assert [entry["mark"] for entry in found["variants"]["draftflow"]["marks"]] == [0.5]
    assert found["left_out"] == ["draftflow: training"]
    assert (tmp_path / "runs/draftflow/state.pt").is_file()

    found = call(tmp_path, *peers, "--variant", "draftflow", "--variant", "specforge")
    assert not found["left_out"]
    assert not found["errors"]
    assert list(found["variants"]) == ["draftflow", "specforge"]
    ours = found["variants"]["draftflow"]
    assert ours["sittings"] == 2
    assert ours["guard"]["compiles_after_warmup"] == 0
    assert not (tmp_path / "runs/draftflow/state.pt").exists()
    for run in found["variants"].values():
        first, last = run["marks"]
        assert 0.5 <= first["seconds"] < last["seconds"]
        assert last["seconds"] >= 3.0
        assert 0 < first["steps"] < last["steps"] == run["done"]
        assert run["speed"]["equal"] == run["speed"]["prompts"] == 3
        for entry in run["marks"]:
            for name in ("held_out", "humaneval"):
                assert entry["replay"][name]["prompts"] == entry["generated"][name]["prompts"] == 4
                assert 1.0 <= entry["replay"][name]["length"] <= 4.0
                assert len(entry["replay"][name]["by_position"]) == 3
    losses = {name: [entry["held_out_loss"] for entry in run["marks"]] for name, run in found["variants"].items()}
    assert losses["specforge"] == [None, None]
    assert all(0 < loss < 10 for loss in losses["draftflow"])
    text = acceptance.render(found)
    assert "| draftflow | 3 |" in text

    # a prompt has three responses, unless the target said nothing, and is evaluated once
    lines = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("responses", "sampled")}
    different = {json.dumps(json.loads(line)["messages"]) for part in lines.values() for line in part}
    assert 3 * acceptance.TINY_PROMPTS >= len(different) > 2.5 * acceptance.TINY_PROMPTS
    evaluated = [prompt["id"] for prompt in json.loads((tmp_path / "prompts.json").read_text())]
    assert len(set(evaluated)) == len(evaluated) == 8
    assert f"{len(lines['sampled'])} are sampled, up to 2 of each prompt at a temperature of 0.7" in text
    assert "z-lab's generator" in text

    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json") if path.name != "results.json"}
    assert call(tmp_path, *peers)["variants"] == found["variants"]
    changed = [path.name for path, time in written.items() if path.stat().st_mtime_ns != time]
    assert changed == ["settings.json"]
    with pytest.raises(DraftflowError, match="another seed"):
        call(tmp_path, *peers, "--seed", "1")

    acceptance.draw(tmp_path / "acceptance.svg", found)
    document = tmp_path / "docs" / "acceptance.md"
    document.parent.mkdir()
    document.write_text(f"Before.\n{acceptance.BEGIN}\nwhat was here\n{acceptance.END}\nAfter.\n")
    acceptance.write_document(document, text, tmp_path / "acceptance.svg")
    assert "what was here" not in document.read_text()
    assert document.read_text().endswith("After.\n")
    assert "specforge, HumanEval" in (tmp_path / "docs" / "acceptance.svg").read_text()


@pytest.mark.parametrize("with_stop", [False, True])
def test_what_is_replayed_is_what_is_generated(target, trained, with_stop):  # noqa: F811
    """Blocks near the limit are shorter when they are generated, and so drafted differently; before that all is equal.

    A text that ends by itself, far from the limit, is equal in all that is counted.
    """
    from acceptance_trials import draft_everywhere, walk

    block = trained.shape.block_size
    texts, generated = [], []
    for prompt in prompts(5, seed=3):
        stop = [generate(trained, target, prompt, LIMIT, []).tokens[LIMIT // 2]] if with_stop else []
        generated.append(generate(trained, target, prompt, LIMIT, stop))
        texts.append({"prompt_ids": prompt, "new": generated[-1].tokens})
    extractor = FeatureExtractor(target, trained.shape.target_layer_ids)
    drafts = draft_everywhere(trained, target, extractor, texts, LIMIT)
    assert max(length for one in generated for length in one.acceptance_lengths) > 1
    for text, of, expected in zip(texts, drafts, generated, strict=True):
        found = walk(text["new"], of, block - 1, LIMIT)
        if with_stop:
            assert len(text["new"]) < LIMIT - block
            assert found.lengths == expected.acceptance_lengths
            assert found.proposed == expected.proposed_by_position
            assert found.accepted == expected.accepted_by_position
        else:
            assert sum(found.lengths) == sum(expected.acceptance_lengths) == LIMIT - 1
            starts = torch.tensor([0, *expected.acceptance_lengths]).cumsum(0)
            full = int((starts <= LIMIT - block).sum()) - 1
            assert full >= 3
            assert found.lengths[:full] == expected.acceptance_lengths[:full]


def test_walk_counts_by_hand():
    """Three proposals a block. From 10: 11 is accepted, 12 is not. From 12: all of 13, 14 and 15, then 16. From 16: cut
    at the limit after 17, of which alone there is a proposal.
    """
    from acceptance_trials import walk

    new = [10, 11, 12, 13, 14, 15, 16, 17]
    drafts = [[11, 0, 13], [0] * 3, [13, 14, 15], [0] * 3, [0] * 3, [0] * 3, [17, 0, 0]]
    found = walk(new, drafts, 3, limit=8)
    assert found.lengths == [2, 4, 1]
    assert (found.proposed, found.accepted) == ([3, 2, 2], [3, 1, 1])
    # the same text ended by its last token: what is proposed after that token is not judged either
    found = walk(new, drafts, 3, limit=20)
    assert found.lengths == [2, 4, 1]
    assert (found.proposed, found.accepted) == ([3, 2, 2], [3, 1, 1])
    assert walk([10], [], 3, limit=8).proposed == [0, 0, 0]


def test_variants():
    from acceptance_trials import Variant

    found = Variant.parse("draftflow,loss=kl,optimizer=muon,lr=1e-3,warmup=20,steps=500")
    assert (found.loss, found.optimizer, found.learning_rate) == ("kl", "muon", 1e-3)
    assert found.schedule(9999) == (500, 20)
    assert (found.precision, Variant.parse("draftflow,precision=fp8").precision) == ("auto", "fp8")
    assert Variant.parse("specforge").schedule(1000) == (1000, 40)
    assert Variant.parse("specforge").schedule(100_000) == (100_000, 100)
    wrong = ["nobody", "draftflow,loss=mse", "specforge,loss=kl", "draftflow,lr=much", "draftflow,size=3", "a=b"]
    for text in [*wrong, "draftflow,precision=fp4", "specforge,precision=fp8", "specforge,until=soon"]:
        with pytest.raises(DraftflowError, match="not a trainer and its settings"):
            Variant.parse(text)


def test_a_variant_trains_until_its_own_end():
    from acceptance_trials import Variant

    at = [25.0, 50.0, 600.0]
    assert Variant.parse("draftflow").marks(at) == at
    assert Variant.parse("specforge,until=50").marks(at) == [25.0, 50.0]
    with pytest.raises(DraftflowError, match="ends before weights are kept"):
        Variant.parse("draftflow,until=20").marks(at)


def test_a_run_has_the_steps_of_its_first_epoch_and_then_shorter_ones():
    from acceptance_trials import expected_steps

    assert expected_steps(10, 100, first=0.2, again=0.1, kept=1.0) == 50
    assert expected_steps(40, 100, first=0.2, again=0.1, kept=1.0) == 300
    assert expected_steps(40, 100, first=0.2, again=0.1, kept=0.0) == 200
    assert expected_steps(35, 100, first=0.2, again=0.1, kept=0.5) == 200


def test_missing_inputs_are_refused(tmp_path):
    for line, words in (
        (["--output", str(tmp_path / "one")], "no folder of the target"),
        (["--tiny", "--output", str(tmp_path / "two")], "not said where the peers are"),
    ):
        with pytest.raises(DraftflowError, match=words):
            acceptance.run_all(acceptance.parse(line), "")


def conversation(text: str) -> Conversation:
    return Conversation([{"role": "user", "content": text}], f"file:{text[:3]}")


def test_lines_of_evals_become_prompts():
    """Only what a single user message asks is taken, with what the system says before it."""
    turn = lambda role, content: {"role": role, "content": content}  # noqa: E731
    cases = [
        ({"input": "What is it?"}, [turn("user", "What is it?")]),
        ({"input": [turn("user", " What? ")]}, [turn("user", "What?")]),
        (
            {"input": [turn("system", "a"), turn("system", "b"), turn("user", "c")]},
            [turn("system", "a\nb"), turn("user", "c")],
        ),
        ({"input": [turn("system", "Say it.")]}, [turn("user", "Say it.")]),
        ({"input": [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]}, None),
        ({"input": [turn("user", [1])]}, None),
        ({"input": []}, None),
        ({"question": "What?"}, None),
        ([1], None),
    ]
    for line, expected in cases:
        assert prompt_sources.as_messages(json.dumps(line)) == expected
    assert prompt_sources.as_messages("{") is None


def test_prompts_are_english_text_few_of_a_kind_and_different():
    good = [conversation(f"Tell me about the number {word} please.") for word in ("one", "two", "three")]
    bad = [
        conversation(text)
        for text in ("Too short", "1 2 3 4 5 6 7 8 9 10 11 12", "Was heißt döfäüßö öüüää ääöö auf Englisch?")
    ]
    bad.append(conversation("word " * 200))
    kept, tasks = prompt_sources.choose([("a", each) for each in [*good, *bad, good[0]]] + [("b", good[0])], 2)
    assert tasks == 2
    assert len(kept) == 3
    assert {each.id for each in kept[:2]} == set(sorted(each.id for each in good)[:2])
    same = conversation("tell me  about the number ONE please.")
    assert prompt_sources.distinct([*good, same], {good[1].id}) == [good[0], good[2]]
