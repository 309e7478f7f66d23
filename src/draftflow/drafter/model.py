"""The drafter: a small transformer in which each draft block attends to what the target knows and to itself.

Per block of B tokens, [anchor, MASK, .., MASK], one forward gives the hidden states from which the target's own head
reads all B - 1 proposals at once. What the target knows comes in as keys and values: its tapped features go through
`fc` and `hidden_norm` once, and every layer projects the result with the same k_proj and v_proj as the block's own
states ("KV injection", arXiv 2602.06036). Queries come from the block rows only. Parameter names are those of
the native checkpoint format.

In training there is less to compute in the first and in the last layer. Before rotary embedding the MASK rows of the
first layer are all the same row, which is projected once. And slot 0 of a block, the anchor, proposes nothing: what
comes after attention in the last layer is computed for the other slots alone.

Weights stay fp32; everything is computed in the dtype of the features, each weight cast where it is used; in training
the products of the linear layers may be float8 (`float8.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftflow.drafter import float8
from draftflow.drafter.attention import attend, attend_from_block
from draftflow.drafter.mask import Mask, draft_mask
from draftflow.drafter.shape import DrafterShape


class Linear(nn.Module):
    """Without bias; the weight is cast to the dtype of the input, so that its gradient comes out in its own.

    Attributes:
        float8: multiply in float8, see `float8.py`.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.float8 = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return float8.linear(x, weight) if self.float8 else F.linear(x, weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the mean square in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class Rope(nn.Module):
    """Tables of the rotary embedding, computed in fp32 from positions, as Hugging Face computes the target's."""

    inverse_frequencies: Tensor

    def __init__(self, shape: DrafterShape):
        super().__init__()
        if shape.rope_parameters["rope_type"] == "default":
            exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
            inverse, self.scaling = 1.0 / shape.rope_theta**exponents, 1.0
        else:
            config = Qwen3Config(
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_position_embeddings,
                rope_parameters=dict(shape.rope_parameters),
            )
            inverse, self.scaling = ROPE_INIT_FUNCTIONS[shape.rope_parameters["rope_type"]](config, "cpu")
        self.register_buffer("inverse_frequencies", inverse, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Follow the module to a device, but never to a narrower dtype: positions times a rounded frequency drift."""
        exact = self.inverse_frequencies
        super()._apply(fn, recurse)
        self.inverse_frequencies = exact.to(self.inverse_frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [B, L] -> cos, sin, each [B, L, head_dim]."""
        angles = positions[:, :, None].float() * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to heads [B, heads, L, D]; the first half of D pairs with the second."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


class LayerCache:
    """Keys and values of the context in one layer, for drafting block after block. The block's own are not kept.

    Args:
        window: of a sliding layer, whose older context is dropped; a row of the next block sees window - 1 at most.
    """

    def __init__(self, window: int | None = None) -> None:
        self.oldest = 0 if window is None else 1 - window  # where the kept part begins, from its end
        self.k: Tensor | None = None  # [B, Hkv, context, D]
        self.v: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of the context that it holds."""
        return 0 if self.k is None else self.k.shape[2]

    def extend(self, k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Take [new context | block] and return [known context | block]; keep of it what is not the last `block`."""
        if self.k is not None and self.v is not None:
            k, v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.k, self.v = (x[:, :, :-block][:, :, self.oldest :] for x in (k, v))
        return k, v


class Attention(nn.Module):
    """Queries of the block against keys and values of the context and of the block."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = Linear(shape.hidden_size, shape.heads * shape.head_dim)
        self.k_proj = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, L, heads, D]

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draft rows [B, Q, H] and context [B, C, H] -> q [B, Q, Hq, D], k and v [B, C + Q, Hkv, D], without rotary."""
        q = self.q_norm(self.heads(self.q_proj(x)))
        # projected apart and joined after: one copy of the context serves all layers
        k = self.k_norm(self.heads(torch.cat([self.k_proj(context), self.k_proj(x)], dim=1)))
        return q, k, self.heads(torch.cat([self.v_proj(context), self.v_proj(x)], dim=1))

    def attend(
        self,
        q: Tensor,  # [B, Q, Hq, D]
        k: Tensor,  # [B, C + Q, Hkv, D]
        v: Tensor,
        cos: Tensor,  # [B, C + Q, D]
        sin: Tensor,
        mask: Mask | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """What the heads find, joined: [B, Q, Hq * D]."""
        rows = q.shape[1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = rotate(q, cos[:, -rows:], sin[:, -rows:]), rotate(k, cos, sin)
        if cache is not None:
            found = attend_from_block(q, *cache.extend(k, v, rows), mask)
        else:
            found = attend(q, k, v, mask)
        return found.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm transformer layer. The context is not normed again: it comes out of `hidden_norm`."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Rows [B, Q, H]; the rest as of `attend`."""
        return self.finish(x, self.attend(x, *rest))

    def attend(
        self,
        x: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Rows [B, Q, H] -> what their heads find, [B, Q, Hq * D]."""
        projected = self.self_attn.project(self.input_layernorm(x), context)
        return self.self_attn.attend(*projected, cos, sin, mask, cache)

    def attend_spread(
        self, rows: Tensor, block_size: int, context: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None
    ) -> Tensor:
        """The same of `spread(rows, block_size)`; rows [B, N + 1, H]."""
        q, k, v = self.self_attn.project(self.input_layernorm(rows), context)
        known = context.shape[1]
        k, v = (torch.cat([x[:, :known], spread(x[:, known:], block_size)], dim=1) for x in (k, v))
        return self.self_attn.attend(spread(q, block_size), k, v, cos, sin, mask)

    def finish(self, x: Tensor, found: Tensor) -> Tensor:
        """What comes after attention, for rows [B, L, H] whose heads found [B, L, Hq * D]."""
        x = x + self.self_attn.o_proj(found)
        return x + self.mlp(self.post_attention_layernorm(x))


def spread(rows: Tensor, block_size: int) -> Tensor:
    """N rows of anchors and one of MASK over the blocks' positions: [B, N + 1, ..] -> [B, N * block_size, ..]."""
    anchors, mask = rows[:, :-1, None], rows[:, None, -1:]
    masks = mask.expand(-1, anchors.shape[1], block_size - 1, *rows.shape[2:])
    return torch.cat([anchors, masks], dim=2).flatten(1, 2)


def proposals(x: Tensor, block_size: int) -> Tensor:
    """All but slot 0 of each block: [B, N * block_size, H] -> [B, N * (block_size - 1), H]."""
    return x.unflatten(1, (-1, block_size))[:, :, 1:].flatten(1, 2)


# The parts of the forward as functions of their modules, so that the compiled form of one serves every layer.


def run_context(fc: Linear, norm: RMSNorm, features: Tensor) -> Tensor:
    return norm(fc(features))


def run_layer(layer: Layer, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
    return layer(x, context, cos, sin, mask)


def run_first_layer(layer: Layer, rows: Tensor, block_size: int, *rest: Any) -> Tensor:
    """Rows [B, N + 1, H], see `spread`; the rest as of `run_layer`."""
    return layer.finish(spread(rows, block_size), layer.attend_spread(rows, block_size, *rest))


def run_last_layer(layer: Layer, norm: RMSNorm, x: Tensor, block_size: int, *rest: Any) -> Tensor:
    """The last layer and the norm after it, of the proposals: [B, N * (block_size - 1), H]."""
    return norm(layer.finish(proposals(x, block_size), proposals(layer.attend(x, *rest), block_size)))


def run_only_layer(layer: Layer, norm: RMSNorm, rows: Tensor, block_size: int, *rest: Any) -> Tensor:
    """A layer that is first and last."""
    found = layer.attend_spread(rows, block_size, *rest)
    return norm(layer.finish(proposals(spread(rows, block_size), block_size), proposals(found, block_size)))


class Runs(NamedTuple):
    """The functions above, compiled or, by default, as they are."""

    context: Callable[..., Tensor] = run_context
    layer: Callable[..., Tensor] = run_layer
    first_layer: Callable[..., Tensor] = run_first_layer
    last_layer: Callable[..., Tensor] = run_last_layer
    only_layer: Callable[..., Tensor] = run_only_layer


EAGER = Runs()


class Drafter(nn.Module):
    """The drafter of `shape`, on the CPU, in fp32, initialised.

    Args:
        shape: sizes.
        generator: CPU generator of the initial weights; the global one if there is none.

    Attributes:
        apart: whether the first and the last layer are computed in ways of their own, with graphs of their own; None:
            on GPUs. Elsewhere, where compiling is slow, one graph serves all layers and computes every row in each.
    """

    def __init__(self, shape: DrafterShape, generator: torch.Generator | None = None):
        super().__init__()
        self.shape = shape
        self.fc = Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rope = Rope(shape)
        self.apart: bool | None = None
        self._run = EAGER
        self.initialize(generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Matrices from a normal distribution with deviation 0.02, norms at 1."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)

    def compile_layers(self) -> None:
        """Compile the layers; nothing is compiled until the first forward.

        Graphs depend on shapes, dtype, device and on whether gradients are taken, on no number of a layer and on no
        content of a mask: with fixed shapes each is compiled once for training and once for evaluation. All layers
        share one. Where the first and the last are `apart`, they have one each, as has the context. A drafter with
        both full and sliding layers has graphs for each kind under BlockMasks, whose predicates are compiled in.
        """
        self._run = Runs(*(torch.compile(run, dynamic=False, fullgraph=True) for run in EAGER))

    def use_float8(self, on: bool = True) -> None:
        """Have the linear layers multiply in float8, all but those of which a side is no multiple of 16."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.float8 = on and not any(side % float8.MULTIPLE for side in module.weight.shape)

    def forward(
        self,
        features: Tensor,
        anchor_embeddings: Tensor,
        mask_embedding: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        mask: Mask | None,
        sliding_mask: Mask | None = None,
    ) -> Tensor:
        """Hidden states of the proposals of all draft blocks of packed rows, for training.

        Args:
            features: [B, S, taps * H], of the target; their dtype is the compute dtype.
            anchor_embeddings: [B, N, H], the target's embedding of the anchors' tokens.
            mask_embedding: [H], that of the MASK token, which all other tokens of a block are. Both are frozen: no
                gradient flows to them. None of the three may be an inference tensor.
            context_positions: [B, S] integer, position in the document.
            block_positions: [B, N * block_size] integer.
            mask: of the full layers, `mask.block_mask` (GPU, compiled), `block_attention.intervals` (GPU) or
                `mask.allowed` (CPU).
            sliding_mask: of the sliding layers, the first or the last of these; `mask.layer_masks` makes both.

        Returns:
            [B, N * (block_size - 1), H], normed, in the dtype of `features`; slot 0 of a block proposes nothing.
        """
        masks = [sliding_mask if number in self.shape.sliding_layers else mask for number in range(len(self.layers))]
        assert all(one is not None for one in masks), "a layer without a mask"
        rows = torch.cat([anchor_embeddings, mask_embedding.expand(len(features), 1, -1)], dim=1)
        rows = rows.to(features.dtype).detach()
        cos, sin = self.rope(torch.cat([context_positions, block_positions], dim=1), features.dtype)
        if features.is_cuda if self.apart is None else self.apart:
            context = self._run.context(self.fc, self.hidden_norm, features)
            return self._forward_apart(rows, context, cos, sin, masks)
        context = run_context(self.fc, self.hidden_norm, features)
        # Later layers get an x that needs a gradient. A first layer whose x needs none would be a second graph.
        x = spread(rows, self.shape.block_size).requires_grad_(torch.is_grad_enabled())
        for layer, one in zip(self.layers, masks, strict=True):
            x = self._run.layer(layer, x, context, cos, sin, one)
        return self.norm(proposals(x, self.shape.block_size))

    def _forward_apart(
        self, rows: Tensor, context: Tensor, cos: Tensor, sin: Tensor, masks: list[Mask | None]
    ) -> Tensor:
        run, size, last = self._run, self.shape.block_size, len(self.layers) - 1
        rest = [(context, cos, sin, mask) for mask in masks]
        if last == 0:
            return run.only_layer(self.layers[0], self.norm, rows, size, *rest[0])
        x = run.first_layer(self.layers[0], rows, size, *rest[0])
        for number in range(1, last):
            x = run.layer(self.layers[number], x, *rest[number])
        return run.last_layer(self.layers[last], self.norm, x, size, *rest[last])

    def new_cache(self) -> list[LayerCache]:
        """An empty cache for `draft`."""
        window, sliding = self.shape.sliding_window, self.shape.sliding_layers
        return [LayerCache(window if number in sliding else None) for number in range(len(self.layers))]

    def draft(self, features: Tensor, block_embeddings: Tensor, positions: Tensor, cache: list[LayerCache]) -> Tensor:
        """Hidden states of one draft block per sequence, for inference.

        The block sees the whole context and itself in a full layer, in a sliding layer what its window leaves of them.

        Args:
            features: [B, C, taps * H], of the tokens that came after the cached ones and before the anchor.
            block_embeddings: [B, L, H], of the anchor and L - 1 mask tokens.
            positions: [B, C + L] integer, of the features and then of the block.
            cache: from `new_cache`; takes in the new context.

        Returns:
            [B, L, H], normed, in the dtype of `features`.
        """
        context = self.hidden_norm(self.fc(features))
        x = block_embeddings.to(features.dtype)
        cos, sin = self.rope(positions, features.dtype)
        sliding, window, sliding_mask = self.shape.sliding_layers, self.shape.sliding_window, None
        if window is not None:
            known = cache[sliding[0]].length + features.shape[1]
            sliding_mask = draft_mask(known, x.shape[1], window, self.shape.sliding_causal, x.device)
        for number, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            x = layer(x, context, cos, sin, sliding_mask if number in sliding else None, layer_cache)
        return self.norm(x)
