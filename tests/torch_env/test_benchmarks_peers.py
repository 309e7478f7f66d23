"""On the same weights, rows and anchors the peers' losses are ours, and where their definitions differ, only there."""

from dataclasses import asdict

import fetched_peers
import pytest
import torch
import torch.nn.functional as F
from drafter_cases import tiny_shape
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftflow.drafter.loss import block_targets, loss_weights
from draftflow.drafter.mask import allowed
from draftflow.drafter.model import Drafter
from draftflow.errors import DraftflowError
from draftflow.target.load import Target
from draftflow.training.data import Rows
from draftflow.training.plan import make_plan

LENGTH, GAMMA = 96, 4.0
SPECFORGE, SPECULATORS = ("loss in chunks of 128 blocks", "unchunked"), ("CE", "KL")

# Sums in fp32 in another order: of some hundred losses, relative; and of the terms of a gradient, relative to its
# largest entry.
LOSS_ROUNDING, ROUNDING = 4e-6, 1e-5


def make_rows(documents: list[list[tuple[int, int]]]) -> Rows:
    """Rows of documents, each given by the lengths of its prompt, which is not supervised, and of its response."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(documents), LENGTH)
    ids, mask = torch.randint(3, 95, shape, generator=generator), torch.zeros(shape, dtype=torch.bool)
    numbers, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for row, lengths in enumerate(documents):
        start = 0
        for number, (prompt, response) in enumerate(lengths):
            part = slice(start, start + prompt + response)
            numbers[row, part], positions[row, part] = number, torch.arange(prompt + response)
            mask[row, start + prompt : part.stop] = True
            start = part.stop
    return Rows("train", ids, numbers, positions, mask)


def greedy_hidden(ids: Tensor, head: Tensor) -> Tensor:
    """Last hidden states from which the target's head reads the next token: what greedy text looks like."""
    hidden = torch.zeros(*ids.shape, head.shape[1])
    hidden[:, :-1] = head[ids[:, 1:]]
    return hidden


def make(rows: Rows, anchors: int, block_size: int = 8, last_hidden: Tensor | None = None):
    """A case in fp32 on the CPU, and a sample of it."""
    from trainers import Case, make_samples

    shape = tiny_shape(block_size=block_size)
    torch.manual_seed(0)
    facts = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "qwen3", **facts, head_dim=16, vocab_size=96, num_hidden_layers=1, tie_word_embeddings=False
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    model.lm_head.weight.normal_(0.0, 0.5)  # the loss is far from ln V
    model.get_decoder().norm.weight.normal_(1.0, 0.1)
    settings = {"row_length": LENGTH, "rows_per_step": len(rows), "anchors_per_row": anchors, "precision": "fp32"}
    plan = make_plan(asdict(shape), settings, "cpu", 1)
    weights = Drafter(shape, torch.Generator().manual_seed(0)).state_dict()
    weights = {name: value + 0.1 * torch.randn_like(value) for name, value in weights.items()}
    both = fetched_peers.both()
    case = Case(shape, plan, weights, Target(model, {}), GAMMA, torch.device("cpu"), both, True, compiled=False)
    features = torch.randn(len(rows), LENGTH, 3 * 64)
    if last_hidden is None:
        last_hidden = torch.randn(len(rows), LENGTH, 64)
    (sample,) = make_samples(case, rows, features, last_hidden, 1)
    return case, sample


def loss_of(kind: type, case, sample, setting: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and gradients of a trainer."""
    trainer = kind(case)
    trainer.restore()
    loss = trainer.forward_backward(sample, setting)
    return loss, {name: value.clone() for name, value in trainer.gradients().items()}


def hidden_of(case, sample) -> tuple[Drafter, Tensor]:
    """Our drafter and its hidden states of all proposals, [B, N, block_size - 1, H]."""
    drafter = Drafter(case.shape)
    drafter.load_state_dict(dict(case.weights))
    batch, size = sample.batch, case.shape.block_size
    mask = allowed(sample.anchors, sample.document_ids, size)
    embed_weight = case.target.embed_weight
    embeddings = F.embedding(batch.anchor_tokens, embed_weight), embed_weight[case.shape.mask_token_id]
    hidden = drafter(sample.features, *embeddings, sample.position_ids, batch.block_positions, mask)
    return drafter, hidden.unflatten(1, (-1, size - 1))


def places(sample, block_size: int) -> Tensor:
    """The place in the row of every proposal, [B, N, block_size - 1], beyond the end at the last token."""
    return (sample.anchors.positions[:, :, None] + torch.arange(1, block_size)).clamp(max=LENGTH - 1)


def take(values: Tensor, places: Tensor) -> Tensor:
    """values [B, S, ..] at places [B, N, block_size - 1]."""
    return torch.stack([row[place] for row, place in zip(values, places, strict=True)])


def assert_equal(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Loss and the gradient of every parameter, to rounding; and the gradients are not nothing."""
    torch.testing.assert_close(found[0], expected[0], rtol=LOSS_ROUNDING, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        largest = gradient.abs().max().item()
        assert largest > 1e-7, name
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=ROUNDING * largest, msg=name)


def scaled(result: tuple[Tensor, dict[str, Tensor]], factor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return result[0] * factor, {name: value * factor for name, value in result[1].items()}


ONE_DOCUMENT = [[(20, 40)]]
TWO_ROWS = [[(20, 40)], [(7, 89)]]  # the second fills its row, so that blocks run over the end


@pytest.mark.parametrize("setting", SPECFORGE)
@pytest.mark.parametrize(("documents", "anchors", "block_size"), [(ONE_DOCUMENT, 12, 8), (TWO_ROWS, 48, 16)])
def test_specforges_loss_and_gradients_are_ours(documents, anchors, block_size, setting):
    """One document in a row, which is all that SpecForge knows; the second case has slots without an anchor."""
    from trainers import Draftflow, SpecForge

    case, sample = make(make_rows(documents), anchors, block_size)
    assert len(documents) == 1 or not sample.anchors.valid.all()
    assert_equal(loss_of(SpecForge, case, sample, setting), loss_of(Draftflow, case, sample, ""))


def test_specforge_in_several_chunks(monkeypatch):
    from trainers import Draftflow, SpecForge

    monkeypatch.setitem(SpecForge.chunks, "chunks of 5 blocks", 5)
    case, sample = make(make_rows(ONE_DOCUMENT), 12)
    assert_equal(loss_of(SpecForge, case, sample, "chunks of 5 blocks"), loss_of(Draftflow, case, sample, ""))


def test_specforge_goes_on_after_a_token_that_the_target_did_not_write():
    """Ours ends a block there, as generation does."""
    from trainers import Draftflow, SpecForge

    rows = make_rows([[(20, 60)]])
    rows.loss_mask[:, 50:53] = False
    case, sample = make(rows, 24)
    drafter, hidden = hidden_of(case, sample)
    at = places(sample, 8)
    supervised = take(sample.loss_mask, at) & sample.anchors.valid[:, :, None]
    ce = F.cross_entropy(
        (hidden @ case.target.head_weight.T).movedim(-1, 1), take(sample.input_ids, at), reduction="none"
    )
    weights = supervised * loss_weights(8, GAMMA)[1:]
    loss = (ce * weights).sum() / weights.sum()
    loss.backward()
    found = loss_of(SpecForge, case, sample, "unchunked")
    assert_equal(found, (loss.detach(), {name: value.grad for name, value in drafter.named_parameters()}))
    _, ours = block_targets(sample.input_ids, sample.loss_mask, sample.document_ids, sample.anchors, 8)
    assert ours.sum() < supervised.sum()
    assert abs(loss_of(Draftflow, case, sample, "")[0] - found[0]) > 1e-3


def test_specforges_dpace_is_ours_but_for_its_divisor(monkeypatch):
    """It divides by the number of rows, ours by the number of blocks."""
    from trainers import Draftflow, SpecForge

    monkeypatch.setitem(Draftflow.objectives, "D-PACE", "dpace")
    case, sample = make(make_rows(TWO_ROWS), 48, 16)
    blocks = (sample.batch.offsets == 1).sum()
    theirs = SpecForge(case)
    theirs.restore()
    theirs.model.loss_type = "dpace"
    found = theirs.forward_backward(sample, "unchunked"), theirs.gradients()
    assert_equal(found, scaled(loss_of(Draftflow, case, sample, "D-PACE"), blocks / 2))


@pytest.mark.parametrize(("setting", "same"), [("CE", ""), ("KL", "KL")])
def test_speculators_losses_are_ours_but_for_their_divisor(setting, same):
    """It divides by the number of supervised positions, ours by the sum of their weights. CE is on text that the target
    wrote greedily. Documents may share a row; a prompt as long as a block lies between two responses, since it does
    not look where a document ends."""
    from trainers import Draftflow, Speculators

    rows = make_rows([[(12, 30), (10, 25)]])
    case, sample = make(rows, 24)
    if setting == "CE":
        last_hidden = greedy_hidden(rows.input_ids, case.target.head_weight) / case.final_norm.weight
        case, sample = make(rows, 24, last_hidden=last_hidden)
    weights = sample.batch.weights
    expected = scaled(loss_of(Draftflow, case, sample, same), weights.sum() / (len(weights) + 1e-5))
    assert_equal(loss_of(Speculators, case, sample, setting), expected)


@pytest.mark.parametrize("setting", SPECULATORS)
def test_speculators_losses_look_at_the_target_alone(setting):
    """On any text: CE against the target's likeliest token, KL(target || drafter), both from the target's hidden state
    one position before; the tokens of the row are no labels."""
    from trainers import Speculators

    case, sample = make(make_rows([[(12, 30), (10, 25)]]), 24)
    drafter, hidden = hidden_of(case, sample)
    at, head = places(sample, 8), case.target.head_weight
    q = (hidden @ head.T).log_softmax(-1)
    p = (case.final_norm(take(sample.last_hidden, at - 1)) @ head.T).log_softmax(-1)
    if setting == "CE":
        losses = -q.gather(-1, p.argmax(-1, keepdim=True)).squeeze(-1)
    else:
        losses = (p.exp() * (p - q)).sum(-1)
    _, supervised = block_targets(sample.input_ids, sample.loss_mask, sample.document_ids, sample.anchors, 8)
    losses = losses * supervised[:, :, 1:] * loss_weights(8, GAMMA)[1:]
    loss = losses.sum() / (supervised.sum() + 1e-5)
    loss.backward()
    expected = loss.detach(), {name: value.grad for name, value in drafter.named_parameters()}
    assert_equal(loss_of(Speculators, case, sample, setting), expected)


@pytest.mark.parametrize("name", ["Draftflow", "SpecForge", "Speculators"])
def test_a_trainer_that_was_released_starts_over(name):
    """Memory is measured with the others released, and times with all of them restored."""
    import trainers

    case, sample = make(make_rows(ONE_DOCUMENT), 12)
    trainer = getattr(trainers, name)(case)
    trainer.restore()
    setting = trainer.settings[0]
    first = trainer.forward_backward(sample, setting)
    trainer.train(sample, setting)
    assert trainer.forward_backward(sample, setting) < first
    trainer.release()
    trainer.restore()
    assert trainer.forward_backward(sample, setting) == first


def test_peers_that_were_not_fetched_are_refused(tmp_path):
    import peers

    with pytest.raises(DraftflowError, match=r"site is missing.*benchmarks/peers.py"):
        peers.load(tmp_path)
