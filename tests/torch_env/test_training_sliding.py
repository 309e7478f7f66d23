"""Training of a drafter with sliding layers, on the tiny target."""

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
import training_cases
from training_cases import make_case, make_loop

from draftflow.drafter.mask import Kind, allowed
from draftflow.drafter.model import Drafter
from draftflow.training.step import read_statistics


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture
def make_sliding(case, tmp_path, monkeypatch):
    """A training loop of a drafter of two layers with the given keys of the block `drafter`."""
    plain = training_cases.make_settings

    def make(drafter, **training):
        def settings(*arguments, **changes):
            found = plain(*arguments, **changes)
            return {**found, "drafter": found["drafter"] | drafter}

        monkeypatch.setattr(training_cases, "make_settings", settings)
        return make_loop(case, tmp_path, **training)

    return make


@pytest.mark.parametrize(
    ("changes", "masks"),
    [
        ({"sliding_window": 5}, lambda full, causal, both: (full, causal)),
        ({"sliding_window": 5, "sliding_causal": False}, lambda full, causal, both: (full, both)),
        ({"sliding_window": 5, "sliding_layers": [0, 1]}, lambda full, causal, both: (None, causal)),
    ],
    ids=["mixed", "both directions", "all"],
)
def test_steps_follow_the_loss_under_the_masks_of_their_layers(make_sliding, changes, masks):
    loop = make_sliding(changes, steps=40)
    step, losses = loop.process.step, []
    reference = Drafter(step.drafter.shape, torch.Generator().manual_seed(loop.hyper.seed))
    for number in range(40):
        batch = loop.process.batches.train(number)
        features = loop.process.source(batch)
        if number in (0, 3):
            reference.load_state_dict(step.drafter.state_dict())
            kinds = [allowed(batch.anchors, batch.document_ids, 4, kind) for kind in (Kind(), Kind(5, True), Kind(5))]
            embed_weight = step.target.embed_weight
            embeddings = embed_weight[batch.anchor_tokens], embed_weight[reference.shape.mask_token_id]
            with torch.no_grad():
                hidden = reference(features, *embeddings, batch.position_ids, batch.block_positions, *masks(*kinds))
            logits = hidden.flatten(0, 1)[batch.supervised] @ step.target.head_weight.T
            expected = F.cross_entropy(logits, batch.labels, reduction="none") @ batch.weights / batch.weights.sum()
        losses.append(read_statistics(step.train(batch, number)[:-1])[0])
        if number in (0, 3):
            assert losses[-1] == pytest.approx(expected.item(), rel=1e-5)  # two orders of summation in fp32
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
