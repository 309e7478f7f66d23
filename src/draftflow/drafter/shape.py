"""The shape of a drafter: every number that its parameters and its checkpoint depend on. Standard library only."""

from dataclasses import dataclass
from typing import Any

from draftflow.errors import DraftflowError
from draftflow.target.taps import tap_layers

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not change with the length of the input


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter and what it has to know of its target.

    Hidden size, MLP, heads, RMSNorm and RoPE are the target's: the drafter reads the target's embedding and writes for
    its head, both frozen and not its own.

    Args:
        layers: transformer layers of the drafter.
        rope_parameters: as in a Hugging Face config: `rope_type`, `rope_theta` and what the type needs.
        vocab_size: rows of the target's embedding.
        block_size: tokens of a draft block, the anchor and block_size - 1 proposals.
        mask_token_id: token that stands for "to be drafted".
        target_layer_ids: tapped target layers, 0-based; the feature is the output of the layer.
        num_target_layers: layers of the target.
        sliding_window: tokens that a row of a sliding layer sees, itself included, at least a block; None without such
            layers.
        sliding_layers: the layers, 0-based and ascending, that see a window in place of the whole document.
        sliding_causal: whether a row of a sliding layer sees its own block only up to itself; True without such layers.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    sliding_causal: bool = True

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return self.rope_parameters["rope_theta"]

    @classmethod
    def from_target(cls, description: dict[str, Any], drafter_settings: dict[str, Any]) -> "DrafterShape":
        """The drafter of a target.

        Args:
            description: the target's `target.json`.
            drafter_settings: the `drafter` block of the configuration.

        Raises:
            DraftflowError: mask token outside the vocabulary or not to be had, tapped layers out of range, a RoPE that
                the drafter cannot have, or a window or sliding layers that do not fit it.
        """
        target_layers = description["num_hidden_layers"]
        window, sliding_layers = _sliding(drafter_settings)
        return cls(
            hidden_size=description["hidden_size"],
            intermediate_size=description["intermediate_size"],
            layers=drafter_settings["layers"],
            heads=description["num_attention_heads"],
            kv_heads=description["num_key_value_heads"],
            head_dim=description["head_dim"],
            rms_norm_eps=description["rms_norm_eps"],
            rope_parameters=_checked_rope(description["rope_parameters"]),
            max_position_embeddings=description["max_position_embeddings"],
            vocab_size=description["vocab_size"],
            block_size=drafter_settings["block_size"],
            mask_token_id=_mask_token(description, drafter_settings["mask_token"]),
            target_layer_ids=_target_layers(target_layers, drafter_settings),
            num_target_layers=target_layers,
            bos_token_id=description["bos_token_id"],
            eos_token_ids=tuple(description["eos_token_ids"]),
            sliding_window=window,
            sliding_layers=sliding_layers,
            sliding_causal=window is None or drafter_settings.get("sliding_causal", True),
        )


def _target_layers(num_hidden_layers: int, settings: dict[str, Any]) -> tuple[int, ...]:
    """The tapped layers. The last is refused: Hugging Face gives its output normed, and servers not at all."""
    named = settings["target_layers"]
    ids = tuple(tap_layers(num_hidden_layers, settings["taps"]) if named is None else named)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_hidden_layers - 2:
        raise DraftflowError(
            f"target layers {list(ids)} cannot be tapped in a target of {num_hidden_layers} layers.",
            f"Name different layers from 0 to {num_hidden_layers - 2}, ascending.",
            "drafter.target_layers",
        )
    return ids


def _sliding(settings: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """Window and sliding layers; the last layer sees everything unless it is named."""
    layers, window, named = settings["layers"], settings.get("sliding_window"), settings.get("sliding_layers")
    if window is None:
        if named is not None:
            raise DraftflowError(
                f"sliding layers {named} have no window.",
                "Set drafter.sliding_window to a number of tokens, or sliding_layers to null.",
                "drafter.sliding_layers",
            )
        return None, ()
    if window < settings["block_size"]:
        raise DraftflowError(
            f"a window of {window} tokens is smaller than a draft block of {settings['block_size']}.",
            f"Set {settings['block_size']} tokens or more; 2048 is usual.",
            "drafter.sliding_window",
        )
    ids = tuple(range(layers - 1) if named is None else named)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= layers:
        raise DraftflowError(
            f"layers {list(ids)} cannot be the sliding ones of a drafter of {layers}.",
            f"Name different layers from 0 to {layers - 1}, ascending, or set sliding_window to null.",
            "drafter.sliding_layers",
        )
    return window, ids


def _mask_token(description: dict[str, Any], setting: Any) -> int:
    vocab_size = description["vocab_size"]
    token = description["mask_token_id_auto"] if setting == "auto" else setting
    if token is None:
        raise DraftflowError(
            "the target has no mask token and no unused row in its vocabulary.",
            f"Name a token between 0 and {vocab_size - 1} that its texts never contain.",
            "drafter.mask_token",
        )
    if not 0 <= token < vocab_size:
        raise DraftflowError(
            f"mask token {token} is outside the target's vocabulary.",
            f"Name a token between 0 and {vocab_size - 1}, or set `auto`.",
            "drafter.mask_token",
        )
    return token


def _checked_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES or parameters.get("partial_rotary_factor") not in (None, 1):
        raise DraftflowError(
            f"the target's rotary embedding ({rope_type}, {parameters}) is not one that a drafter can have.",
            f"Choose a target with a full rotary embedding of type {', '.join(ROPE_TYPES)}.",
            "target.source",
        )
    return {"rope_type": rope_type, **parameters}
