"""From the configuration of a text model to the record of ours, and back."""

from typing import Any

from rrfp_jax.exchange.config_fields import ConfigFields
from rrfp_jax.exchange.families.text_family import (
    LAYERED_WINDOW,
    NO_WINDOW,
    PLAIN_WINDOW,
    SWITCHED_WINDOW,
    TextFamily,
)
from rrfp_jax.exchange.rope import read_rope, write_rope
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.experts_config import ExpertsConfig

_SILU = {"silu": None, "swish": None}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROUTER_SILENT = ("router_aux_loss_coef",)
"""It counts only where ``output_router_logits`` is true, which is refused."""


def read_text(fields: ConfigFields, family: TextFamily, *, tied: bool, dtype: str) -> LanguageModelConfig:
    """The record of a decoder; ``fields`` have the family's defaults, and are finished.

    ``tied`` says whether it is, which depends on the file too; ``dtype`` is that of its parameters.

    Raises ValueError, with the field's name, for what our models cannot express.
    """
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.choice("hidden_act", _SILU)
    fields.only("attention_dropout", 0, why="models here drop nothing")
    for name in family.off:
        fields.only(name, False, why="models here have no such thing: give false, if the model does without it")
    fields.get("tie_word_embeddings")
    num_layers = fields.whole("num_hidden_layers")
    theta, scaling = read_rope(fields)
    kv_heads = fields.get("num_key_value_heads")
    head_dim = fields.get("head_dim")
    record: dict[str, Any] = dict(  # noqa: C408 - the names are those of the record
        vocab_size=fields.whole("vocab_size"),
        hidden=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else fields.whole("num_key_value_heads"),
        head_dim=hidden // heads if head_dim is None else fields.whole("head_dim"),
        mlp_dim=fields.whole("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=_window(fields, family, num_layers),
        experts=_experts(fields, family),
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=tied,
        param_dtype=dtype,
        compute_dtype=dtype,
    )
    fields.finish()
    return LanguageModelConfig(**record)


def write_text(config: LanguageModelConfig, family: TextFamily) -> dict[str, Any]:
    """The fields of ``config.json`` that describe a decoder of this family; the other way round."""
    values: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.size_per_head,
        "intermediate_size": config.mlp_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        **write_rope(config.rope_theta, config.rope_scaling),
    }
    if family.window != NO_WINDOW:
        values["sliding_window"] = config.sliding_window
    if family.window in (LAYERED_WINDOW, SWITCHED_WINDOW):
        values |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    return values | _expert_values(config, family)


def _window(fields: ConfigFields, family: TextFamily, num_layers: int) -> int | None:
    kind = family.window
    if kind == NO_WINDOW:
        return None
    is_on = kind == PLAIN_WINDOW or fields.flag("use_sliding_window")
    size = fields.get("sliding_window")
    first = fields.get("max_window_layers") if kind != PLAIN_WINDOW else 0
    types = fields.get("layer_types") if kind == LAYERED_WINDOW else None
    if not is_on or size is None:
        if types is not None and set(types) != {_FULL}:
            raise fields.refusal("layer_types", types, "there is no window for them: give use_sliding_window true")
        return None
    if kind != LAYERED_WINDOW:
        return fields.whole("sliding_window")
    name, told = ("layer_types", types) if types is not None else ("max_window_layers", first)
    if types is None:
        types = [_FULL if layer < (first or 0) else _SLIDING for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {_FULL, _SLIDING}:
        raise fields.refusal(name, told, f"{_FULL} or {_SLIDING} is needed for each of {num_layers} layers")
    if len(set(types)) > 1:
        raise fields.refusal(name, told, "models here have one window for all layers, or none")
    return fields.whole("sliding_window") if types[0] == _SLIDING else None


def _experts(fields: ConfigFields, family: TextFamily) -> ExpertsConfig | None:
    names = family.experts
    if names is None:
        return None
    for name in _ROUTER_SILENT:
        fields.get(name)
    fields.only("router_jitter_noise", 0, why="routers here have no noise")
    dense = fields.get(names.dense_layers) if names.dense_layers else []
    if not isinstance(dense or [], list) or not all(isinstance(layer, int) for layer in dense or []):
        raise fields.refusal(str(names.dense_layers), dense, "a list of layers is needed")
    return ExpertsConfig(
        num_experts=fields.whole(*names.num_experts),
        experts_per_token=fields.whole("num_experts_per_tok"),
        mlp_dim=fields.whole(names.mlp_dim) if names.mlp_dim else None,
        renormalise=fields.flag(names.renormalise) if names.renormalise else True,
        every=fields.whole(names.every) if names.every else 1,
        dense_layers=tuple(dense or ()),
    )


def _expert_values(config: LanguageModelConfig, family: TextFamily) -> dict[str, Any]:
    experts, names = config.experts, family.experts
    if experts is None or names is None:
        return {}
    values: dict[str | None, Any] = {
        names.num_experts[0]: experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        names.mlp_dim: config.expert_dim,
        names.renormalise: experts.renormalise,
        names.every: experts.every,
        names.dense_layers: list(experts.dense_layers),
    }
    return {name: value for name, value in values.items() if name is not None}
