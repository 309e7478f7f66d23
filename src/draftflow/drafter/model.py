"""The drafter: a small transformer in which each draft block attends to what the target knows and to itself.

Per block of B tokens, [anchor, MASK, .., MASK], one forward gives the hidden states from which the target's own head
reads all B - 1 proposals at once. What the target knows comes in as keys and values: its tapped features go through
`fc` and `hidden_norm` once, and every layer projects the result with the same k_proj and v_proj as the block's own
states ("KV injection", arXiv 2602.06036). Queries come from the block rows only. Parameter names are those of
the native checkpoint format.

Weights stay fp32; everything is computed in the dtype of the features, each weight cast where it is used.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftflow.drafter.attention import attend, attend_from_block
from draftflow.drafter.mask import Mask, draft_mask
from draftflow.drafter.shape import DrafterShape


class Linear(nn.Module):
    """Without bias; the weight is cast to the dtype of the input, so that its gradient comes out in its own."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


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

    def forward(
        self,
        x: Tensor,  # [B, Q, H] draft rows
        context: Tensor,  # [B, C, H]
        cos: Tensor,  # [B, C + Q, D]
        sin: Tensor,
        mask: Mask | None,
        cache: LayerCache | None,
    ) -> Tensor:
        rows = x.shape[1]
        q = self.q_norm(self.heads(self.q_proj(x))).transpose(1, 2)  # [B, Hq, Q, D]
        # projected apart and joined after: one copy of the context serves all layers
        k = self.k_norm(self.heads(torch.cat([self.k_proj(context), self.k_proj(x)], dim=1))).transpose(1, 2)
        v = self.heads(torch.cat([self.v_proj(context), self.v_proj(x)], dim=1)).transpose(1, 2)  # [B, Hkv, C + Q, D]
        q, k = rotate(q, cos[:, -rows:], sin[:, -rows:]), rotate(k, cos, sin)
        if cache is not None:
            return self.joined(attend_from_block(q, *cache.extend(k, v, rows), mask))
        return self.joined(attend(q, k, v, mask))

    def joined(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.transpose(1, 2).flatten(2))  # [B, Q, H]


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

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def run_layer(layer: Layer, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
    """One layer as a function of the layer, so that its compiled form serves every layer."""
    return layer(x, context, cos, sin, mask)


class Drafter(nn.Module):
    """The drafter of `shape`, on the CPU, in fp32, initialised.

    Args:
        shape: sizes.
        generator: CPU generator of the initial weights; the global one if there is none.
    """

    def __init__(self, shape: DrafterShape, generator: torch.Generator | None = None):
        super().__init__()
        self.shape = shape
        self.fc = Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rope = Rope(shape)
        self._run_layer = run_layer
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
        """Compile the layers, as one graph that all of them share; nothing is compiled until the first forward.

        The graph depends on shapes, dtype, device and on whether gradients are taken, on no number of a layer and on
        no content of a mask: with fixed shapes there is one compile for training and one for evaluation. A drafter with
        both full and sliding layers has one graph for each kind under BlockMasks, whose predicates are compiled in.
        """
        self._run_layer = torch.compile(run_layer, dynamic=False, fullgraph=True)

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        mask: Mask | None,
        sliding_mask: Mask | None = None,
    ) -> Tensor:
        """Hidden states of all draft blocks of packed rows, for training.

        Args:
            features: [B, S, taps * H], of the target; their dtype is the compute dtype.
            block_embeddings: [B, N * block_size, H], the target's embedding of the blocks' tokens. Frozen: no gradient
                flows to it. Neither of the two may be an inference tensor.
            context_positions: [B, S] integer, position in the document.
            block_positions: [B, N * block_size] integer.
            mask: of the full layers, `mask.block_mask` (GPU, compiled), `block_attention.intervals` (GPU) or
                `mask.allowed` (CPU).
            sliding_mask: of the sliding layers, the first or the last of these; `mask.layer_masks` makes both.

        Returns:
            [B, N * block_size, H], normed, in the dtype of `features`.
        """
        masks = [sliding_mask if number in self.shape.sliding_layers else mask for number in range(len(self.layers))]
        assert all(one is not None for one in masks), "a layer without a mask"
        context = self.hidden_norm(self.fc(features))
        # Later layers get an x that needs a gradient. A first layer whose x needs none would be a second graph.
        x = block_embeddings.to(features.dtype).detach().requires_grad_(torch.is_grad_enabled())
        cos, sin = self.rope(torch.cat([context_positions, block_positions], dim=1), features.dtype)
        for layer, one in zip(self.layers, masks, strict=True):
            x = self._run_layer(layer, x, context, cos, sin, one)
        return self.norm(x)

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
