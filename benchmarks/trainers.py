"""One step of each trainer of DFlash drafters on the same rows, weights and target: ours, SpecForge's, speculators'.

Each takes its own way as its maintainers' training loop takes it on one device, with its own precision, compilation and
AdamW:

    draftflow     training.step.Step: bf16 weights, fp32 master weights in its optimizer; in `fp8` its linear layers are
                  float8, where the device has that
    SpecForge     OnlineDFlashModel: the same; the loss over all blocks at once, or in chunks of 128 blocks, which
                  computes the logits twice and keeps few of them
    speculators   DFlashDraftModel: fp32 weights under autocast, compiled as a whole; its fused losses. The labels are
                  the target's own choices, for which it computes the target's logits at all positions of the blocks.

On a CPU everything is in fp32, attention is dense and nothing of the peers is compiled.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from draftflow.drafter.anchors import Anchors
from draftflow.drafter.checkpoint import native_config
from draftflow.drafter.loss import Objective
from draftflow.drafter.model import EAGER, Drafter
from draftflow.drafter.shape import DrafterShape
from draftflow.target.load import Target
from draftflow.training.data import Batch, Batches, Rows
from draftflow.training.optimizer import Hyperparameters, Optimizer
from draftflow.training.plan import FLOAT8_CAPABILITY, Plan
from draftflow.training.step import Step

LEARNING_RATE, CLIP_NORM = 6e-4, 1.0
STEPS = 1000  # of the schedules, which no measurement comes near


@dataclass(frozen=True)
class Case:
    """What all trainers of one measurement have in common.

    Attributes:
        weights: of a drafter of `shape`, by their native names, on the host.
        target: on `device`, in the plan's precision.
        gamma: decay of the loss weights.
        peers: what `peers.load` gave.
        given_anchors: the peers take the anchors of the sample, and draw none of their own.
        compiled: compile our layers.
    """

    shape: DrafterShape
    plan: Plan
    weights: Mapping[str, Tensor]
    target: Target
    gamma: float
    device: torch.device
    peers: tuple[SimpleNamespace, SimpleNamespace]
    given_anchors: bool = False
    compiled: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Of features and computation."""
        return getattr(torch, self.plan.precision)

    @property
    def final_norm(self) -> nn.Module:
        """The target's last norm, of [.., H]."""
        return self.target.model.get_decoder().norm


@dataclass(frozen=True)
class Sample:
    """Packed rows as every trainer is given them, on the device.

    Attributes:
        input_ids, document_ids, position_ids: [B, S] int64.
        loss_mask: [B, S] bool.
        anchors: of N slots per row.
        features: [B, S, taps * H].
        last_hidden: [B, S, H], output of the target's last layer before the final norm.
        features_and_last: [B, S, (taps + 1) * H], the features, and behind them the last hidden states after that norm.
        batch: the same for our step.
    """

    input_ids: Tensor
    document_ids: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    anchors: Anchors
    features: Tensor
    last_hidden: Tensor
    features_and_last: Tensor
    batch: Batch


class Trainer(ABC):
    """A trainer under measurement. It holds no memory of the device before `restore` and after `release`.

    Attributes:
        name: whose it is.
        settings: ways to run it, by name.
    """

    name: ClassVar[str]
    settings: tuple[str, ...]

    def __init__(self, case: Case):
        self.case = case

    @classmethod
    def settings_on(cls, device: torch.device) -> tuple[str, ...]:
        """Those of its settings that work on a device."""
        return cls.settings

    def feature_plan(self, setting: str) -> Plan:
        """The plan by which a target has to compute features for it."""
        return self.case.plan

    @abstractmethod
    def reads(self, sample: Sample, setting: str) -> tuple[Tensor, ...]:
        """The large tensors of the target and of the sample that its step reads where they lie."""

    @abstractmethod
    def restore(self) -> None:
        """Put the case's weights on the device; there is no state of an optimizer yet."""

    @abstractmethod
    def release(self) -> None:
        """Give back all memory of the device."""

    @abstractmethod
    def forward_backward(self, sample: Sample, setting: str) -> Tensor:
        """Forward, loss and backward from gradients of zero; returns the mean loss, detached."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Of the mean loss of the last `forward_backward`, by native names."""

    @abstractmethod
    def train(self, sample: Sample, setting: str, source: Callable[[Batch], Tensor] | None = None) -> None:
        """A whole step with the optimizer, on the sample's features or on those that `source` computes."""


class Draftflow(Trainer):
    """Ours, with the loss on the tokens of the row, the same in float8, and with that on the target's distribution."""

    name = "draftflow"
    objectives: ClassVar[dict[str, Literal["decay", "dpace", "kl"]]] = {"": "decay", "fp8": "decay", "KL": "kl"}
    settings = tuple(objectives)

    def __init__(self, case: Case):
        super().__init__(case)
        self.hyper = Hyperparameters(STEPS, Objective("decay", case.gamma), LEARNING_RATE, clip_norm=CLIP_NORM)

    @classmethod
    def settings_on(cls, device: torch.device) -> tuple[str, ...]:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY:
            return cls.settings
        return tuple(setting for setting in cls.settings if setting != "fp8")

    def restore(self) -> None:
        case = self.case
        # A billion random numbers on the host take ten seconds, and the moments wait until they are needed.
        with (
            mock.patch.object(Drafter, "initialize"),
            mock.patch("draftflow.training.step.Optimizer"),
            torch.device(case.device),
        ):
            self.step = Step(case.plan, case.shape, case.target, self._no_features, self.hyper, case.device)
        self.step.drafter.load_state_dict({name: value.to(case.device) for name, value in case.weights.items()})
        self.step.drafter.to(case.dtype)
        self.has_optimizer = False
        self._recorded: dict[bool, tuple[Any, bool]] = {}
        if not case.compiled:
            self.step.drafter._run = EAGER

    def release(self) -> None:
        self.step = None

    def reads(self, sample: Sample, setting: str) -> tuple[Tensor, ...]:
        return (self.case.target.embed_weight, self.case.target.head_weight, self._features(sample, setting))

    def feature_plan(self, setting: str) -> Plan:
        return replace(self.case.plan, loss=self.objectives[setting])

    def forward_backward(self, sample: Sample, setting: str) -> Tensor:
        step, batch = self._set(setting), sample.batch
        for parameter in step.drafter.parameters():
            parameter.grad = None
        loss, self.normalizer = step.forward_backward(batch, self._features(sample, setting))[:2]
        return loss / self.normalizer

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad / self.normalizer for name, value in self.step.drafter.named_parameters()}

    def train(self, sample: Sample, setting: str, source: Callable[[Batch], Tensor] | None = None) -> None:
        step = self._set(setting)
        if not self.has_optimizer:
            for parameter in step.drafter.parameters():
                parameter.data, parameter.grad = parameter.data.float(), None
            step.forget()  # where the weights were
            self._recorded.clear()
            step.optimizer, self.has_optimizer = Optimizer(step.drafter, self.hyper, self.case.dtype), True
        step.source = source or (lambda _: self._features(sample, setting))
        step.train(sample.batch, 0)

    def _set(self, setting: str) -> Step:
        step, drafter, in_float8 = self.step, self.step.drafter, setting == "fp8"
        step.objective = Objective(self.objectives[setting], self.case.gamma)
        if drafter.fc.float8 != in_float8:  # a replay would multiply as it was recorded; each has its own
            self._recorded[not in_float8] = step._captured, step._trained
            step._captured, step._trained = self._recorded.get(in_float8, (None, False))
            drafter.use_float8(in_float8)
        return step

    def _features(self, sample: Sample, setting: str) -> Tensor:
        return sample.features_and_last if self.objectives[setting] == "kl" else sample.features

    def _no_features(self, batch: Batch) -> Tensor:
        raise AssertionError("`train` says where features come from")


def make_samples(case: Case, rows: Rows, features: Tensor, last_hidden: Tensor, count: int) -> list[Sample]:
    """Samples of the same `rows`, which make one batch, with anchors drawn anew for each."""
    batches = Batches(case.plan, rows, rows, case.gamma, seed=0, rank=0, world_size=1)
    features_and_last = torch.cat([features, case.final_norm(last_hidden)], dim=-1)
    samples = []
    for number in range(count):
        batch = batches.train(number).to(case.device)
        mask = rows.loss_mask[list(batch.indices)].to(case.device)
        facts = (batch.input_ids, batch.document_ids, batch.position_ids, mask, batch.anchors)
        samples.append(Sample(*facts, features, last_hidden, features_and_last, batch))
    return samples


class _Module(Trainer):
    """A trainer around a module, whose storage comes and goes so that what was compiled for it stays."""

    module: nn.Module
    optimizer: Any = None

    def value(self, name: str) -> Tensor:
        """What a parameter of the module holds at the start."""
        return self.case.weights[name]

    def restore(self) -> None:
        for name, parameter in self.module.named_parameters():
            # cast where it is fast
            parameter.data = self.value(name).to(self.case.device, copy=True).to(parameter.dtype)

    def release(self) -> None:
        self.optimizer = None
        for parameter in self.module.parameters():
            parameter.data, parameter.grad = torch.empty(0, dtype=parameter.dtype, device=self.case.device), None

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self.module.named_parameters() if value.requires_grad}

    def clear(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


class SpecForge(_Module):
    """SpecForge's model and loss."""

    name = "SpecForge"
    chunks: ClassVar[dict[str, int]] = {"loss in chunks of 128 blocks": 128, "unchunked": 0}
    settings = tuple(chunks)

    def __init__(self, case: Case):
        super().__init__(case)
        theirs, on_gpu = case.peers[0], case.device.type == "cuda"
        # eager: in fp32 as exact as ours, and defined where a block sees nothing
        backend = "flex_attention" if on_gpu else "eager"
        config = Qwen3Config(**native_config(case.shape, case.dtype))
        config._attn_implementation = backend
        with torch.device(case.device):
            self.module = theirs.AutoDraftModel.from_config(config, torch_dtype=case.dtype).train()
        head = nn.Linear(case.shape.hidden_size, case.shape.vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(case.target.head_weight, requires_grad=False)
        embedding = nn.Embedding(case.shape.vocab_size, case.shape.hidden_size, device="meta")
        embedding.weight = nn.Parameter(case.target.embed_weight, requires_grad=False)
        self.model = theirs.OnlineDFlashModel(
            self.module,
            head,
            embedding,
            mask_token_id=case.shape.mask_token_id,
            block_size=case.shape.block_size,
            attention_backend=backend,
            num_anchors=case.plan.anchors,
            loss_decay_gamma=case.gamma,
        ).train()
        self.release()

    def reads(self, sample: Sample, setting: str) -> tuple[Tensor, ...]:
        return (self.case.target.embed_weight, self.case.target.head_weight, sample.features)

    def forward_backward(self, sample: Sample, setting: str) -> Tensor:
        self.clear()
        if self.case.given_anchors:
            self.model._sample_anchor_positions = lambda *_: tuple(sample.anchors)
        self.model.objective_chunk_blocks = self.chunks[setting]
        loss, _, _ = self.model(
            input_ids=sample.input_ids, hidden_states=sample.features, loss_mask=sample.loss_mask.long()
        )
        loss.backward()
        return loss.detach()

    def train(self, sample: Sample, setting: str, source: Callable[[Batch], Tensor] | None = None) -> None:
        if self.optimizer is None:
            self.optimizer = self.case.peers[0].BF16Optimizer(
                self.module, lr=LEARNING_RATE, max_grad_norm=CLIP_NORM, warmup_ratio=0.04, total_steps=STEPS
            )
        if source is not None:
            sample = replace(sample, features=source(sample.batch))
        self.forward_backward(sample, setting)
        self.optimizer.step()


class Speculators(_Module):
    """speculators' model and loss: one row at a time."""

    name = "speculators"
    losses: ClassVar[dict[str, str]] = {"CE": "ce", "KL": "kl_div"}
    settings = tuple(losses)

    def __init__(self, case: Case):
        super().__init__(case)
        theirs, shape, on_gpu = case.peers[1], case.shape, case.device.type == "cuda"
        layer = Qwen3Config(**native_config(shape, torch.float32))
        layer._attn_implementation = "simple_flex_attention" if on_gpu else "eager"
        config = theirs.DFlashSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=shape.vocab_size,
            block_size=shape.block_size,
            aux_hidden_state_layer_ids=[number + 1 for number in shape.target_layer_ids],
            mask_token_id=shape.mask_token_id,
        )
        with torch.device(case.device):
            self.module = theirs.DFlashDraftModel(config).train()
        implementation = "fused" if on_gpu else "eager"
        self.configs = {name: theirs.resolve_loss_config(loss, implementation) for name, loss in self.losses.items()}
        self.release()

    def value(self, name: str) -> Tensor:
        target = self.case.target
        frozen = {
            "embed_tokens.weight": target.embed_weight,
            "lm_head.weight": target.head_weight,
            "verifier_lm_head.weight": target.head_weight,
            "verifier_norm.weight": self.case.final_norm.weight,
        }
        return frozen[name] if name in frozen else super().value(name)

    def reads(self, sample: Sample, setting: str) -> tuple[Tensor, ...]:
        return (sample.features, sample.last_hidden)  # of the target it has fp32 copies

    def feature_plan(self, setting: str) -> Plan:
        return replace(self.case.plan, loss="kl")  # both of its losses look at the target's last layer

    def forward_backward(self, sample: Sample, setting: str) -> Tensor:
        self.clear()
        theirs, case = self.case.peers[1], self.case
        anchors = lambda *_: (sample.anchors.positions[0], sample.anchors.valid[0])  # noqa: E731
        draw = mock.patch.object(theirs.core, "select_anchors", anchors) if case.given_anchors else nullcontext()
        bf16 = torch.autocast(case.device.type, dtype=case.dtype, enabled=case.dtype != torch.float32)
        with draw, bf16:
            _, loss, _ = self.module(
                hidden_states=sample.features,
                input_ids=sample.input_ids,
                loss_mask=sample.loss_mask,
                verifier_last_hidden_states=sample.last_hidden,
                document_ids=sample.document_ids,
                position_ids=sample.position_ids,
                loss_config=self.configs[setting],
                gamma=case.gamma,
                max_anchors=case.plan.anchors,
            )
        loss.backward()
        return loss.detach()

    def train(self, sample: Sample, setting: str, source: Callable[[Batch], Tensor] | None = None) -> None:
        if self.optimizer is None:
            trained = [value for value in self.module.parameters() if value.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
        if source is not None:
            features = source(sample.batch)[..., : sample.features.shape[-1]]
            sample = replace(sample, features=features)
        self.forward_backward(sample, setting)
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP_NORM)
        self.optimizer.step()


TRAINERS: tuple[type[Trainer], ...] = (Draftflow, SpecForge, Speculators)
