import functools

import pytest

torch = pytest.importorskip("torch")

from drafter_cases import MASK_TOKEN, SLIDING, anchors_at, document_ids, position_ids, tiny_shape  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from draftflow.drafter.anchors import block_inputs, sample_anchors  # noqa: E402
from draftflow.drafter.checkpoint import expected_tensors, native_config  # noqa: E402
from draftflow.drafter.mask import Kind, allowed, block_mask, block_masks, kinds_of, layer_masks  # noqa: E402
from draftflow.drafter.model import Drafter, Rope, spread  # noqa: E402


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Case:
    """A batch of two packed rows with random features, for a drafter of `shape`."""

    def __init__(self, shape, length=96, count=6, seed=0, anchors=None):
        generator = seeded(seed)
        self.shape = shape
        self.documents = document_ids([[50, 46], [30, 40]], length)
        self.positions = position_ids(self.documents)
        drawn = sample_anchors(torch.ones_like(self.documents), self.documents, count, generator)
        self.anchors = drawn if anchors is None else anchors
        self.features = torch.randn(2, length, 3 * shape.hidden_size, generator=generator)
        tokens = torch.randint(0, MASK_TOKEN, (2, length), generator=generator)
        embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
        tokens, self.block_positions = block_inputs(tokens, self.positions, self.anchors, shape.block_size)
        self.anchor_embeddings, self.mask_embedding = embedding[tokens], embedding[shape.mask_token_id]
        rows = torch.cat([self.anchor_embeddings, self.mask_embedding.expand(2, 1, -1)], dim=1)
        self.embeddings = spread(rows, shape.block_size)

    def run(self, drafter, features=None, anchor_embeddings=None, masks=None):
        features = self.features if features is None else features
        return drafter(
            features,
            (self.anchor_embeddings if anchor_embeddings is None else anchor_embeddings).to(features.dtype),
            self.mask_embedding.to(features.dtype),
            self.positions,
            self.block_positions,
            *(layer_masks(self.anchors, self.documents, self.shape, torch.float32) if masks is None else masks),
        )

    def sparse_masks(self):
        """The masks of the full and sliding layers as on a GPU."""
        kinds = kinds_of(self.shape)
        present = tuple(kind for kind in kinds if kind is not None)
        made = iter(block_masks(self.anchors, self.documents, self.shape.block_size, present))
        return [None if kind is None else next(made) for kind in kinds]


def scattered(shape, seed=0):
    """A drafter whose norms are not all ones, so that a missing or misplaced one shows."""
    drafter = Drafter(shape, seeded(seed))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=seeded(seed)) * 0.3)
            else:
                parameter.mul_(3.0)
    return drafter


def test_parameters_are_those_of_the_native_format_in_fp32():
    shape = tiny_shape()
    parameters = dict(Drafter(shape).state_dict())
    assert {name: tuple(value.shape) for name, value in parameters.items()} == expected_tensors(shape)
    assert all(value.dtype == torch.float32 for value in parameters.values())


def test_initial_weights_depend_on_the_generator_alone():
    shape = tiny_shape()
    first, again, other = (Drafter(shape, seeded(seed)).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert first["fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert first["norm.weight"].eq(1).all()


@pytest.mark.parametrize("changes", [{}, *SLIDING.values()], ids=["full", *SLIDING])
def test_blocks_of_packed_rows_are_what_the_reference_drafts_one_by_one(changes):
    model = pytest.importorskip("dflash.model")
    shape = tiny_shape(**changes)
    drafter, case = scattered(shape), Case(shape)
    reference = model.DFlashDraftModel(model.Qwen3Config(**native_config(shape, torch.float32))).eval()
    reference.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        hidden = case.run(drafter).unflatten(1, (-1, shape.block_size - 1))
        for row, slot in case.anchors.valid.nonzero().tolist():
            anchor = int(case.anchors.positions[row, slot])
            start = anchor - int(case.positions[row, anchor])
            expected = reference(
                position_ids=torch.arange(anchor - start + shape.block_size)[None],
                noise_embedding=case.embeddings[row, None, slot * shape.block_size : (slot + 1) * shape.block_size],
                target_hidden=case.features[row, None, start:anchor],
            )
            torch.testing.assert_close(hidden[row, slot], expected[0, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, *SLIDING.values()], ids=["full", *SLIDING])
def test_drafting_with_a_cache_is_the_training_form(changes):
    shape = tiny_shape(**changes)
    drafter, case = scattered(shape), Case(shape, count=12)
    blocks = case.embeddings.unflatten(1, (-1, shape.block_size))
    cache, known = drafter.new_cache(), 0
    first_document = [slot for slot in range(12) if case.documents[0, case.anchors.positions[0, slot]] == 0]
    assert len(first_document) > 1
    with torch.no_grad():
        hidden = case.run(drafter).unflatten(1, (-1, shape.block_size - 1))
        for slot in first_document:
            anchor = int(case.anchors.positions[0, slot])
            positions = torch.arange(known, anchor + shape.block_size)[None]
            drafted = drafter.draft(case.features[:1, known:anchor], blocks[:1, slot], positions, cache)
            torch.testing.assert_close(drafted[0, 1:], hidden[0, slot], rtol=1e-5, atol=1e-5)
            known = anchor
            for layer, held in enumerate(cache):
                assert held.length == (min(known, shape.sliding_window - 1) if layer in shape.sliding_layers else known)
    assert known > 30  # beyond the windows


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
)
def test_rotary_tables_are_those_of_the_exported_config(parameters):
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    shape = tiny_shape(rope_parameters=parameters)
    positions = torch.tensor([[0, 1, 7, 300, 511]])
    reference = qwen3.Qwen3RotaryEmbedding(qwen3.Qwen3Config(**native_config(shape)))
    expected = reference(torch.empty(0), positions)
    for ours, theirs in zip(Rope(shape)(positions, torch.float32), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_rotary_tables_survive_a_cast_of_the_drafter():
    shape = tiny_shape()
    positions = torch.tensor([[500]])
    exact = Rope(shape)(positions, torch.float32)
    cast = Drafter(shape).to(torch.bfloat16).rope(positions, torch.float32)
    assert torch.equal(exact[0], cast[0])


def test_compute_is_in_the_dtype_of_the_features_and_gradients_in_that_of_the_weights():
    shape = tiny_shape()
    drafter, case = scattered(shape), Case(shape)
    exact = case.run(drafter)
    exact.square().mean().backward()
    gradients = {name: value.grad.clone() for name, value in drafter.named_parameters()}
    drafter.zero_grad()
    rounded = case.run(drafter, case.features.bfloat16())
    assert rounded.dtype == torch.bfloat16
    rounded.float().square().mean().backward()
    torch.testing.assert_close(rounded.float(), exact, rtol=0.1, atol=0.1)
    for name, value in drafter.named_parameters():
        assert value.grad.dtype == torch.float32
        assert torch.cosine_similarity(value.grad.flatten(), gradients[name].flatten(), dim=0) > 0.99, name


def test_features_at_or_after_the_anchor_and_of_other_documents_do_not_reach_a_block():
    shape = tiny_shape()
    drafter, case = scattered(shape), Case(shape)
    features = case.features.clone().requires_grad_()
    hidden = case.run(drafter, features=features).unflatten(1, (-1, shape.block_size - 1))
    for row, slot in case.anchors.valid.nonzero().tolist():
        (gradient,) = torch.autograd.grad(hidden[row, slot].square().sum(), features, retain_graph=True)
        anchor = int(case.anchors.positions[row, slot])
        reached = gradient.abs().sum(-1) > 0
        expected = torch.zeros_like(reached)
        expected[row, :anchor] = case.documents[row, :anchor] == case.documents[row, anchor]
        assert torch.equal(reached, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_of_a_sliding_layer_is_reached_from_its_window_and_no_further(causal):
    shape = tiny_shape(layers=1, sliding_window=10, sliding_layers=(0,), sliding_causal=causal)
    drafter, case = scattered(shape), Case(shape, count=4)
    features = case.features.clone().requires_grad_()
    # the layer takes the embeddings as they are, so that they are reached through its own input
    taken = []
    drafter._run = drafter._run._replace(layer=lambda layer, x, *rest: taken.append(x) or layer(x, *rest))
    hidden = case.run(drafter, features)
    seen = allowed(case.anchors, case.documents, shape.block_size, Kind(10, causal))[:, 0]
    seen = seen.unflatten(1, (-1, shape.block_size))[:, :, 1:].flatten(1, 2)
    for row in range(2):
        for q in range(hidden.shape[1]):
            reached = torch.autograd.grad(hidden[row, q].square().sum(), (features, taken[0]), retain_graph=True)
            found = torch.cat([(gradient.abs().sum(-1) > 0) for gradient in reached], dim=1)
            assert torch.equal(found[row], seen[row, q]), (row, q)
            assert not found[1 - row].any()


def test_a_layer_without_its_mask_is_refused():
    shape = tiny_shape(**SLIDING["mixed"])
    drafter, case = scattered(shape), Case(shape)
    full, sliding = layer_masks(case.anchors, case.documents, shape, torch.float32)
    for masks in ((full,), (full, None), (None, sliding)):
        with pytest.raises(AssertionError, match="a layer without a mask"):
            case.run(drafter, masks=masks)


def test_changed_anchor_feature_changes_no_block_that_may_not_see_it():
    shape = tiny_shape()
    drafter, case = (
        scattered(shape),
        Case(shape, anchors=anchors_at([[5, 20, 35, 55, 70, None], [8, 40, None, None, None, None]])),
    )
    anchor = 20
    features = case.features.clone()
    features[0, anchor] += 5.0
    with torch.no_grad():
        before, after = case.run(drafter), case.run(drafter, features=features)
    changed = (before != after).any(-1).unflatten(1, (-1, shape.block_size - 1)).any(-1)
    same_document = case.documents[0, case.anchors.positions[0]] == case.documents[0, anchor]
    may_change = (case.anchors.positions[0] > anchor) & same_document & case.anchors.valid[0]
    assert torch.equal(changed[0], may_change)
    assert may_change.tolist() == [False, False, True, False, False, False]
    assert not changed[1].any()


def test_the_anchor_of_another_block_does_not_reach_a_block():
    shape = tiny_shape()
    drafter, case = scattered(shape), Case(shape)
    embeddings = case.anchor_embeddings.clone()
    embeddings[:, 2] += 5.0
    with torch.no_grad():
        before, after = case.run(drafter), case.run(drafter, anchor_embeddings=embeddings)
    changed = (before != after).any(-1).unflatten(1, (-1, shape.block_size - 1))
    assert changed[:, 2].all()
    assert not changed[:, [0, 1, 3, 4, 5]].any()


APART = {
    "full": {},
    "mixed": {"sliding_window": 20, "sliding_layers": (0,)},
    "last sliding": {"sliding_window": 20, "sliding_layers": (-1,), "sliding_causal": False},
}


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", APART)
def test_first_and_last_layers_that_compute_less_give_the_same_numbers(name, layers, block_size):
    changes = {**APART[name], "block_size": block_size, "layers": layers}
    if "sliding_layers" in changes:
        changes["sliding_layers"] = tuple(number % layers for number in changes["sliding_layers"])
    shape = tiny_shape(**changes)
    anchors = anchors_at([[1, 20, 35, 55, 70, None], [0, 8, 40, None, None, None]])
    case = Case(shape, anchors=anchors)
    case.features, case.anchor_embeddings = case.features.double(), case.anchor_embeddings.double()
    found = []
    for apart in (False, True):
        drafter = scattered(shape).double()
        drafter.apart = apart
        hidden = case.run(drafter)
        direction = torch.randn(hidden.shape, generator=seeded(1), dtype=torch.float64)
        (hidden * direction).sum().backward()
        found.append([hidden, *(value.grad for value in drafter.parameters())])
    assert found[0][0].shape == (2, 6 * (block_size - 1), shape.hidden_size)
    assert all(value.abs().max() > 0 for value in found[0])
    for one, other in zip(*found, strict=True):
        # norms have their mean squares, and rotations their angles, in fp32
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6 * one.abs().max().item())


def test_mask_rows_of_the_first_layer_are_projected_once_and_anchors_not_at_all_after_the_last():
    shape = tiny_shape()
    drafter, case = scattered(shape), Case(shape)
    drafter.apart = True
    taken = {}
    for name, module in drafter.named_modules():
        hook = lambda module, inputs, name=name: taken.setdefault(name, []).append(inputs[0].shape[1])  # noqa: E731
        module.register_forward_pre_hook(hook)
    case.run(drafter)
    count, rows = 6, 6 * shape.block_size
    assert [taken[f"layers.{number}.self_attn.q_proj"] for number in range(3)] == [[count + 1], [rows], [rows]]
    assert [taken[f"layers.{number}.self_attn.v_proj"][1] for number in range(3)] == [count + 1, rows, rows]
    for name in ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
        assert [taken[f"layers.{number}.{name}"] for number in range(3)] == [[rows], [rows], [rows - count]]
    assert taken["norm"] == [rows - count]


@pytest.fixture
def graphs(monkeypatch):
    """A function that tells how many graphs dynamo made; the backend runs them as they are."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_layers_share_one_graph_that_serves_every_step(graphs):
    shape = tiny_shape()
    drafter = Drafter(shape, seeded())
    drafter.compile_layers()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            Case(shape, seed=step).run(drafter).sum().backward()
            assert graphs() == 1
    assert drafter.fc.weight.grad.abs().sum() > 0


def test_evaluation_is_one_more_graph(graphs):
    shape = tiny_shape()
    drafter = Drafter(shape, seeded())
    drafter.compile_layers()
    for step in range(2):
        Case(shape, seed=step).run(drafter).sum().backward()
        with torch.no_grad():
            Case(shape, seed=step).run(drafter)
    assert graphs() == 2


def test_block_masks_of_other_steps_cause_no_other_graph(graphs):
    shape = tiny_shape()
    drafter = Drafter(shape, seeded())
    compiled = Drafter(shape, seeded())
    compiled.compile_layers()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            case = Case(shape, seed=step)
            sparse = case.run(compiled, masks=[block_mask(case.anchors, case.documents, shape.block_size)])
            torch.testing.assert_close(sparse, case.run(drafter), rtol=1e-4, atol=1e-5)
    assert graphs() == 1


def five_layers(*sliding):
    return {"layers": 5, "sliding_window": 12, "sliding_layers": sliding}


@pytest.mark.parametrize(
    ("changes", "apart", "number"),
    [
        (SLIDING["mixed"], False, 2),
        (SLIDING["all"], False, 1),
        (five_layers(0, 2), True, 5),  # both kinds between the first and the last, and the norm of the context
        (five_layers(0, 4), True, 4),
    ],
    ids=["mixed", "all", "apart, both kinds between", "apart, first and last"],
)
def test_each_kind_of_layers_has_one_graph_that_serves_every_step(graphs, changes, apart, number):
    shape = tiny_shape(**changes)
    drafter, compiled = scattered(shape), scattered(shape)
    compiled.apart = apart
    compiled.compile_layers()
    with torch.no_grad():
        for step in range(3):
            case = Case(shape, seed=step)
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                sparse = case.run(compiled, masks=case.sparse_masks())
            torch.testing.assert_close(sparse, case.run(drafter), rtol=1e-4, atol=1e-5)
            assert graphs() == number


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 4),  # of the first, the middle and the last layer, and of the norm of the context
        ({"layers": 5}, 4),
        ({"layers": 2}, 3),
        ({"layers": 1}, 2),
    ],
)
def test_first_and_last_layers_apart_have_graphs_of_their_own_that_serve_every_step(graphs, changes, number):
    shape = tiny_shape(**changes)
    drafter, compiled = scattered(shape), scattered(shape)
    drafter.apart = compiled.apart = True
    compiled.compile_layers()
    for step in range(3):
        case = Case(shape, seed=step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            hidden = case.run(compiled)
            hidden.square().sum().backward()
            assert graphs() == number + (step > 0) * number
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=step > 0):
            torch.testing.assert_close(case.run(compiled), hidden, rtol=1e-4, atol=1e-5)
            assert graphs() == 2 * number
        torch.testing.assert_close(case.run(drafter), hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@torch._inductor.config.patch(force_disable_caches=True)  # kernels of another number of threads would be found
@pytest.mark.parametrize(("apart", "layers"), [(None, 3), (True, 2)], ids=["shared", "apart"])
def test_compiled_layers_are_the_eager_ones_on_cpus(apart, layers):
    torch._dynamo.reset()
    shape = tiny_shape(layers=layers)
    case, eager, compiled = Case(shape), scattered(shape), scattered(shape)
    compiled.apart = apart
    compiled.compile_layers()
    hidden = [case.run(drafter) for drafter in (eager, compiled)]
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-5)
    for value in hidden:
        value.square().sum().backward()
    for (name, one), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3 * one.grad.abs().max(), msg=name)
    if apart:
        return
    with torch.no_grad():
        sparse = case.run(compiled, masks=[block_mask(case.anchors, case.documents, shape.block_size)])
    torch.testing.assert_close(sparse, hidden[0], rtol=1e-4, atol=1e-5)
