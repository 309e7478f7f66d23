import itertools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from drafter_cases import SLIDING, tiny_shape  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from draftflow.drafter.anchors import block_inputs, sample_anchors  # noqa: E402
from draftflow.drafter.checkpoint import export  # noqa: E402
from draftflow.drafter.generate import generate, greedy, margin_at  # noqa: E402
from draftflow.drafter.loss import block_targets, even_chunks, head_loss, loss_weights  # noqa: E402
from draftflow.drafter.mask import layer_masks  # noqa: E402
from draftflow.drafter.model import Drafter  # noqa: E402

NEW = 40


@pytest.fixture(scope="module")
def target():
    """A random target of eight layers, which soon repeats itself and so can be learned."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    weight = model.get_input_embeddings().weight
    return SimpleNamespace(model=model, embed_weight=weight, head_weight=model.get_output_embeddings().weight)


def prompts(count, seed=1, lengths=(3, 12)):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 90, (int(torch.randint(*lengths, (1,), generator=generator)),), generator=generator).tolist()
        for _ in range(count)
    ]


def train(target, shape):
    """A drafter after some steps on the target's own greedy continuations, with the training form and loss."""
    drafter = Drafter(shape, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    length = 48
    texts = [prompt + greedy(target, prompt, length - len(prompt), []) for prompt in prompts(24)]
    input_ids = torch.tensor(texts)
    documents, loss_mask = torch.zeros_like(input_ids), torch.ones_like(input_ids)
    positions = torch.arange(length).expand_as(input_ids)
    states = target.model(input_ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in shape.target_layer_ids], dim=-1)
    for _ in range(60):
        anchors = sample_anchors(loss_mask, documents, 6, generator)
        tokens, block_positions = block_inputs(input_ids, positions, anchors, shape.block_size)
        labels, supervised = block_targets(input_ids, loss_mask, documents, anchors, shape.block_size)
        masks = layer_masks(anchors, documents, shape, torch.float32)
        embeddings = F.embedding(tokens, target.embed_weight), target.embed_weight[shape.mask_token_id]
        hidden = drafter(features, *embeddings, positions, block_positions, *masks)
        labels, weights = labels[:, :, 1:], (loss_weights(shape.block_size, 4.0) * supervised)[:, :, 1:].flatten()
        chunks = even_chunks(labels.numel(), 512)
        loss, _, _ = head_loss(hidden.flatten(0, 1), target.head_weight, labels.flatten(), weights, chunks)
        (loss / weights.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


@pytest.fixture(scope="module")
def trained(target):
    return train(target, tiny_shape(layers=2))


@pytest.fixture(params=["random", "trained"])
def drafter(request):
    if request.param == "random":
        return Drafter(tiny_shape(), torch.Generator().manual_seed(0))
    return request.getfixturevalue("trained")


def test_greedy_is_the_targets_own_argmax(target):
    prompt = prompts(1)[0]
    tokens = greedy(target, prompt, NEW, [])
    assert len(tokens) == NEW
    logits = target.model(torch.tensor([prompt + tokens])).logits[0]
    assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_greedy_ends_with_the_first_stop_token(target):
    prompt = prompts(1)[0]
    tokens = greedy(target, prompt, NEW, [])
    stop = tokens[5]
    assert greedy(target, prompt, NEW, [stop]) == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize("new", [1, 2, 9, NEW])
def test_speculative_tokens_are_the_targets_greedy_ones(target, drafter, new):
    for prompt in prompts(4, seed=7):
        generation = generate(drafter, target, prompt, new, [])
        assert generation.tokens == greedy(target, prompt, new, [])
        assert len(generation.tokens) == 1 + sum(generation.acceptance_lengths)


def test_a_trained_drafter_has_proposals_accepted(target, trained):
    lengths = [generate(trained, target, prompt, NEW, []).acceptance_lengths for prompt in prompts(6, seed=7)]
    flat = [length for one in lengths for length in one]
    assert sum(flat) / len(flat) > 1.5
    assert len(set(flat)) > 3


def test_generation_stops_inside_a_block_of_accepted_proposals(target, trained):
    for prompt in prompts(8, seed=7):
        whole = generate(trained, target, prompt, NEW, [])
        stop = whole.tokens[NEW // 2]
        stopped = generate(trained, target, prompt, NEW, [stop])
        assert stopped.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
        assert 1 + sum(stopped.acceptance_lengths) == len(stopped.tokens)


def test_positions_add_up_to_the_acceptance_lengths(target, trained):
    block = trained.shape.block_size
    for prompt in prompts(4, seed=7):
        result = generate(trained, target, prompt, NEW, [])
        blocks = len(result.acceptance_lengths)
        accepted, proposed = result.accepted_by_position, result.proposed_by_position
        assert len(accepted) == len(proposed) == block - 1
        assert proposed[0] == blocks
        assert all(one >= other for one, other in itertools.pairwise(proposed))
        assert all(count <= all_of_them for count, all_of_them in zip(accepted, proposed, strict=True))
        # each block adds its accepted proposals and one token, but for the last, which max_new_tokens may cut
        assert sum(result.acceptance_lengths) - (sum(accepted) + blocks) in (0, -1)


@pytest.mark.parametrize("with_stop", [False, True])
def test_reference_implementation_generates_the_same_blocks(target, drafter, with_stop, tmp_path, monkeypatch):
    model = pytest.importorskip("dflash.model")
    monkeypatch.setattr(model, "_cuda_time", lambda: 0.0)
    export(drafter, tmp_path, torch.float32)
    reference = model.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True).eval()
    for prompt in prompts(6, seed=11):
        stop = [generate(drafter, target, prompt, NEW, []).tokens[NEW // 2]] if with_stop else []
        ours = generate(drafter, target, prompt, NEW, stop)
        theirs = model.dflash_generate(reference, target.model, torch.tensor([prompt]), NEW, stop, return_stats=True)
        assert ours.tokens == theirs.output_ids[0, len(prompt) :].tolist()
        assert ours.acceptance_lengths == theirs.acceptance_lengths


def drafted(target, run):
    """What `run` gives, and the blocks that it had the target judge."""
    judged = []
    hook = target.model.register_forward_pre_hook(lambda _, inputs: judged.append(inputs[0][0].tolist()))
    try:
        return run(), judged
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["trained", *SLIDING])
def test_reference_implementation_drafts_the_same_tokens_with_sliding_layers(target, name, tmp_path, monkeypatch):
    model = pytest.importorskip("dflash.model")
    monkeypatch.setattr(model, "_cuda_time", lambda: 0.0)
    if name == "trained":
        drafter = train(target, tiny_shape(layers=2, sliding_window=10, sliding_layers=(0,)))
    else:
        drafter = Drafter(tiny_shape(**SLIDING[name]), torch.Generator().manual_seed(0))
    export(drafter, tmp_path, torch.float32)
    reference = model.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True).eval()
    for prompt in prompts(2, seed=11, lengths=(16, 40)) + prompts(1, seed=11):
        ours, our_blocks = drafted(target, lambda: generate(drafter, target, prompt, 24, []))  # noqa: B023
        ids = torch.tensor([prompt])
        theirs, their_blocks = drafted(
            target,
            lambda: model.dflash_generate(reference, target.model, ids, 24, [], return_stats=True),  # noqa: B023
        )
        assert our_blocks == their_blocks
        assert ours.tokens == theirs.output_ids[0, len(prompt) :].tolist() == greedy(target, prompt, 24, [])
        assert ours.acceptance_lengths == theirs.acceptance_lengths
        if name == "trained":
            assert max(ours.acceptance_lengths) > 1


def test_margin_is_the_gap_of_the_two_best_logits(target):
    prompt = prompts(1)[0]
    tokens = greedy(target, prompt, 6, [])
    logits = target.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) + 2]
    best = logits.sort(descending=True).values
    assert margin_at(target, prompt, tokens, 3) == pytest.approx((best[0] - best[1]).item(), abs=1e-4)
    assert margin_at(target, prompt, tokens, 3) > 0
