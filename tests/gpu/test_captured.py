"""Steps whose forward and backward are replayed, against the same steps launched kernel by kernel."""

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch import Tensor  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from draftflow.drafter.attention import forbid_dense  # noqa: E402
from draftflow.drafter.loss import Objective  # noqa: E402
from draftflow.drafter.shape import DrafterShape  # noqa: E402
from draftflow.training.data import Batches, rows_of_one_token  # noqa: E402
from draftflow.training.optimizer import Hyperparameters  # noqa: E402
from draftflow.training.plan import make_plan, worth_capturing  # noqa: E402
from draftflow.training.step import Step  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPE = DrafterShape(
    hidden_size=256,
    intermediate_size=512,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=4096,
    vocab_size=1000,
    block_size=8,
    mask_token_id=999,
    target_layer_ids=(1, 3),
    num_target_layers=8,
    bos_token_id=None,
    eos_token_ids=(2,),
)
STEPS = 6


class Case:
    """Rows, features and a target, and steps of equal weights on them; what is compiled serves them all."""

    def __init__(self, shape: DrafterShape, kind: str):
        torch._dynamo.reset()
        settings = {"row_length": 384, "rows_per_step": 2, "anchors_per_row": 24, "precision": "bf16", "loss": kind}
        self.shape, self.plan = shape, make_plan(asdict(shape), settings, "cuda", 1)
        assert worth_capturing(self.plan)
        rows, generator = rows_of_one_token(self.plan, 10), torch.Generator().manual_seed(0)
        rows.input_ids.copy_(torch.randint(3, 998, rows.input_ids.shape, generator=generator))
        rows.document_ids[:, 200:] = 1
        rows.loss_mask[:, 150:180] = 0
        self.batches = Batches(self.plan, rows, rows, 4.0, 0, 0, 1)
        self.features = torch.randn(10, 384, len(self.plan.feature_layers) * 256, generator=generator).bfloat16().cuda()
        weights = torch.randn(1000, 256, generator=generator).bfloat16().cuda()
        self.target: Any = SimpleNamespace(embed_weight=weights, head_weight=weights)
        self.hyper = Hyperparameters(STEPS + 2, Objective(kind, 4.0), learning_rate=1e-2)  # type: ignore[arg-type]
        self.device = torch.device("cuda:0")

    def step(self) -> Step:
        return Step(self.plan, self.shape, self.target, self.source, self.hyper, self.device)

    def source(self, batch: Any) -> Tensor:
        return self.features[list(batch.indices)]

    def train(self, replayed: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Statistics of some steps and an evaluation between them, the weights after them, and how a last one ran."""
        monkeypatch.setattr("draftflow.training.step.worth_capturing", lambda plan: replayed)
        step, found = self.step(), []
        with forbid_dense():
            for number in range(STEPS):
                graphs = counters["stats"]["unique_graphs"]
                found.append(step.train(self.batches.train(number).to(self.device), number))
                assert number == 0 or counters["stats"]["unique_graphs"] == graphs
                if number == 3:
                    found.append(step.evaluate(self.batches.held_out()))
            assert (step._captured is not None) == replayed
            batch = self.batches.train(STEPS).to(self.device)
            step.source = lambda _: self.features[:2]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step.train(batch, STEPS)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            with torch.profiler.profile() as profile:
                step.train(batch, STEPS + 1)
                torch.cuda.synchronize()
        calls = {event.key: event.count for event in profile.key_averages()}
        launches = sum(calls[name] for name in calls if name.startswith(("cudaLaunch", "cuLaunch", "cudaGraph")))
        return {"statistics": torch.cat(found).cpu(), "weights": step.optimizer.weights(), "launches": launches}


SLIDING = {"sliding_window": 100, "sliding_layers": (0, 1)}


@pytest.mark.parametrize("kind", ["decay", "kl"])
@pytest.mark.parametrize("sliding", [{}, SLIDING], ids=["full", "sliding"])
def test_replayed_steps_are_the_launched_ones(
    kind: str, sliding: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(replace(SHAPE, **sliding), kind)
    launched, replayed = (case.train(one, monkeypatch) for one in (False, True))
    assert launched["statistics"].isfinite().all()
    torch.testing.assert_close(replayed["statistics"], launched["statistics"], rtol=0, atol=0)
    torch.testing.assert_close(replayed["weights"], launched["weights"], rtol=0, atol=0)
    print(kind, sliding, launched["launches"], replayed["launches"])
    assert replayed["launches"] < launched["launches"] / 3


def test_gradients_that_are_replayed_are_summed_over_ranks_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SHAPE, "decay")
    step = case.step()
    batch, gradients = case.batches.train(0).to(case.device), []
    summed: list[int] = []

    def doubled(value: Tensor, group: Any, async_op: bool) -> Any:
        """A sum over two ranks of equal gradients."""
        value.mul_(2)
        summed.append(value.numel())
        return SimpleNamespace(wait=lambda: None)

    for ranks in (1, 1, 2, 2):  # launched, replayed; and of two ranks
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda ranks=ranks: ranks > 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
        monkeypatch.setattr(torch.distributed, "all_reduce", doubled)
        for parameter in step.drafter.parameters():
            parameter.grad = None
        step.forward_backward(batch, case.source(batch))
        assert len(summed) == max(0, len(gradients) - 1)
        step.sums.end()
        gradients.append([parameter.grad.clone() for parameter in step.drafter.parameters()])
    assert step._captured is not None
    for once, replayed, *twice in zip(*gradients, strict=True):
        torch.testing.assert_close(replayed, once, rtol=0, atol=0)
        for value in twice:
            torch.testing.assert_close(value, 2 * once, rtol=0, atol=0)
