"""What sets one family of text models apart from the others, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rrfp_jax.exchange.names import Table

NO_WINDOW, PLAIN_WINDOW, LAYERED_WINDOW, SWITCHED_WINDOW = "none", "plain", "layered", "switched"
"""How a family says that tokens look back only so far: not at all; by ``sliding_window`` alone; by
``use_sliding_window`` for the layers from ``max_window_layers`` on, or those of ``layer_types``; or for all layers."""


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """What a family calls the sizes of its experts."""

    num_experts: tuple[str, ...]
    """The name that is written, and another under which it is read."""
    mlp_dim: str | None
    """None: experts are as wide as ``intermediate_size`` says."""
    renormalise: str | None
    """None: always."""
    every: str | None = None
    """None: every layer is sparse."""
    dense_layers: str | None = None


@dataclass(frozen=True, kw_only=True)
class TextFamily:
    """One family."""

    model_type: str
    architecture: str
    names: Table
    defaults: Mapping[str, Any]
    """What a field that is missing stands for."""
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = NO_WINDOW
    experts: ExpertFields | None = None
    off: tuple[str, ...] = ()
    """Switches that must be off."""


SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
"""Defaults that most families share."""
