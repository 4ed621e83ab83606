"""Reads the fields of a decoder in ``config.json`` into the record of our models, and writes them back."""

import math
from typing import Any

from rrfp_jax.hf._config_fields import ConfigFields
from rrfp_jax.hf.decoders import (
    LAYERED_WINDOW,
    NO_WINDOW,
    PLAIN_WINDOW,
    SWITCHED_WINDOW,
    DecoderFamily,
)
from rrfp_jax.models.config import LINEAR_ROPE, LLAMA3_ROPE, ROPE_KINDS, ExpertsConfig, LanguageModelConfig, RopeScaling

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_ROPE = "default"
_ORIGINAL_LENGTH = "original_max_position_embeddings"


def read_decoder(fields: ConfigFields, family: DecoderFamily, *, tied: bool, dtype: str) -> LanguageModelConfig:
    """Returns the record of a decoder. ``fields`` have the family's defaults; all of them must have been read after.

    ``tied`` says whether the head is the embedding's table, which depends on the tensors too; ``dtype`` is the dtype
    of the parameters.

    Raises ValueError, with the field's name, for fields that our models cannot express.
    """
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.choice("hidden_act", {"silu": None, "swish": None})
    fields.only("attention_dropout", 0, why="models here drop nothing")
    for name in family.off:
        fields.only(name, False, why="models here have no such thing: give false, if the model does without it")
    fields.get("tie_word_embeddings")
    num_layers = fields.whole("num_hidden_layers")
    theta, scaling = _read_rope(fields)
    kv_heads, head_dim = fields.get("num_key_value_heads"), fields.get("head_dim")
    # The record is built last: it checks how its numbers go together, which only makes sense once each has been read.
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
        sliding_window=_read_window(fields, family, num_layers),
        experts=_read_experts(fields, family),
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=tied,
        param_dtype=dtype,
        compute_dtype=dtype,
    )
    fields.finish()
    return LanguageModelConfig(**record)


def write_decoder(config: LanguageModelConfig, family: DecoderFamily) -> dict[str, Any]:
    """Returns the fields of ``config.json`` that describe a decoder of this family."""
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
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
    }
    if (scaling := config.rope_scaling) is not None:
        # The two fields that every version of transformers reads, not the newer single object.
        numbers = {"factor": scaling.factor, **scaling.settings}
        if "original_max_positions" in numbers:
            numbers[_ORIGINAL_LENGTH] = numbers.pop("original_max_positions")
        values["rope_scaling"] = {"rope_type": scaling.kind, **numbers}
    if family.window != NO_WINDOW:
        values["sliding_window"] = config.sliding_window
    if family.window in (LAYERED_WINDOW, SWITCHED_WINDOW):
        values |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    experts, names = config.experts, family.experts
    if experts is not None and names is not None:
        written: dict[str | None, Any] = {
            names.num_experts[0]: experts.num_experts,
            "num_experts_per_tok": experts.experts_per_token,
            names.mlp_dim: config.expert_dim,
            names.renormalise: experts.renormalise,
            names.every: experts.every,
            names.dense_layers: list(experts.dense_layers),
        }
        values |= {name: value for name, value in written.items() if name is not None}
    return values


def _read_window(fields: ConfigFields, family: DecoderFamily, num_layers: int) -> int | None:
    """Returns the window that all layers have, or None; refuses a window of some layers only."""
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
    name, given = ("layer_types", types) if types is not None else ("max_window_layers", first)
    if types is None:
        types = [_FULL if layer < (first or 0) else _SLIDING for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {_FULL, _SLIDING}:
        raise fields.refusal(name, given, f"{_FULL} or {_SLIDING} is needed for each of {num_layers} layers")
    if len(set(types)) > 1:
        raise fields.refusal(name, given, "models here have one window for all layers, or none")
    return fields.whole("sliding_window") if types[0] == _SLIDING else None


def _read_experts(fields: ConfigFields, family: DecoderFamily) -> ExpertsConfig | None:
    names = family.experts
    if names is None:
        return None
    # The coefficient counts only where output_router_logits is true, which is refused.
    fields.get("router_aux_loss_coef")
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


def _read_rope(fields: ConfigFields) -> tuple[float, RopeScaling | None]:
    """Returns the base of rotary embeddings and how their frequencies are scaled.

    Reads ``rope_parameters``, the one object since transformers 5, or ``rope_theta`` and ``rope_scaling``. Raises
    ValueError for all kinds but ``default``, ``llama3``, ``linear`` and ``yarn``.
    """
    outer, length = fields.number("rope_theta"), fields.get("max_position_embeddings")
    fields.only("partial_rotary_factor", 1, why="models here turn whole heads")
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    both = fields.has("rope_parameters") and fields.has("rope_scaling")
    if both and fields.get("rope_scaling") != fields.get("rope_parameters"):
        raise fields.refusal("rope_scaling", fields.get("rope_scaling"), "rope_parameters says something else")
    for each in ("rope_parameters", "rope_scaling"):
        fields.get(each)
    rope = fields.part(name, {"rope_theta": outer, _ORIGINAL_LENGTH: length})
    kind = rope.get("rope_type", "type") or _DEFAULT_ROPE
    theta = rope.number("rope_theta")
    # Versions of transformers take one or the other, so two different numbers have no single meaning.
    if fields.has("rope_theta") and theta != outer:
        raise fields.refusal(
            "rope_theta", outer, f"{name} says {theta:g}: give the one that the model was trained with"
        )
    rope.only("partial_rotary_factor", 1, why="models here turn whole heads")
    if kind not in (_DEFAULT_ROPE, *ROPE_KINDS):
        raise rope.refusal("rope_type", kind, f"models here know {', '.join((_DEFAULT_ROPE, *ROPE_KINDS))}")
    scaling = None if kind == _DEFAULT_ROPE else RopeScaling(kind=kind, **_read_scaling(rope, kind))
    rope.finish()
    return theta, scaling


def _read_scaling(rope: ConfigFields, kind: str) -> dict[str, Any]:
    """Returns the numbers of :class:`RopeScaling` for this kind."""
    numbers: dict[str, Any] = {"factor": rope.number("factor")}
    if kind == LINEAR_ROPE:
        rope.get(_ORIGINAL_LENGTH)  # linear scaling does not depend on it
        return numbers
    numbers["original_max_positions"] = int(rope.number(_ORIGINAL_LENGTH))
    if kind == LLAMA3_ROPE:
        return numbers | {name: rope.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    rope.only("truncate", True, why="models here stretch from a whole number of a wave to another")
    given = {name: rope.number(name) for name in ("beta_fast", "beta_slow") if rope.get(name) is not None}
    factors = {name: rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    attention_factor = None  # the record's own rule
    if factors["attention_factor"] is not None:
        attention_factor = rope.number("attention_factor")
    elif factors["mscale"] and factors["mscale_all_dim"]:  # DeepSeek's two fields
        growth = 0.1 * math.log(max(numbers["factor"], 1.0))
        attention_factor = (growth * rope.number("mscale") + 1) / (growth * rope.number("mscale_all_dim") + 1)
    return numbers | given | {"attention_factor": attention_factor}
