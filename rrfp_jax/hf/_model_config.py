"""``config.json`` of a whole model: the model that a file describes, and the file for a model that began here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rrfp_jax.hf._config_fields import ConfigFields
from rrfp_jax.hf._tensor_names import NameTable
from rrfp_jax.hf._vision_language import DECODER_PREFIX, QWEN_VL, VISION_LANGUAGE_FAMILIES
from rrfp_jax.hf.decoders import DECODER_FAMILIES, DecoderFamily, read_decoder, write_decoder
from rrfp_jax.hf.model_folder import ModelSections
from rrfp_jax.models.config import LanguageModelConfig, PredictAheadConfig
from rrfp_jax.readable import shown

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DROPPED = (
    *("*.rotary_emb.inv_freq", "*.embeddings.position_ids"),
    *("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"),
)
"""Tensors that are no parameters: they follow from the configuration, or are copies of the embedding and the head."""
QUANTISED, MXFP4 = "quantization_config", "mxfp4"
_AHEAD, _MOST_AHEAD = "num_nextn_predict_layers", 64


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """The model that one ``config.json`` describes, by its family's tables."""

    sections: ModelSections
    table: NameTable
    newer: tuple[tuple[str, str], ...] = ()
    """Prefixes of newer names of tensors, each with the older one."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors that the family's files hold and its model does not use. An import carries them along."""
    is_packed: bool = False
    """Whether matrices of its files are blocks of four-bit numbers."""
    decoder_prefix: str = ""
    """The prefix of the decoder's tensors."""
    num_layers_ahead: int = 0
    """Number of layers that predict further ahead, of which the files may have the tensors."""


def read_config(
    config: Mapping[str, Any], where: str, *, has_head: bool | None, dtype: str, num_ahead: int = 0
) -> HubModel:
    """Returns the model that ``config`` describes.

    ``has_head`` says whether the tensors include a head that differs from the embedding's table; ``dtype`` is NumPy's
    name for the dtype of the parameters; ``num_ahead`` of the layers that predict further ahead belong to the model.

    Raises ValueError, in one sentence with the field's name, for everything that our models cannot express.
    """
    kind = config.get("model_type")
    known = (*DECODER_FAMILIES, *VISION_LANGUAGE_FAMILIES)
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"{where}: model_type is {shown(kind)}: models here are {', '.join(known)}")
    family, quantised = DECODER_FAMILIES.get(kind), config.get(QUANTISED)
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if quantised is not None and (family is None or not family.is_packed or method != MXFP4):
        raise ValueError(f"{where}: {QUANTISED} is given: give the model as it was before it was quantised")
    wanted = VISION_LANGUAGE_FAMILIES[kind][0] if family is None else family.architecture
    given = config.get("architectures")
    if given and given != [wanted]:
        raise ValueError(f"{where}: architectures is {shown(given)}: models here are {wanted}")
    try:
        if family is None:
            _, read, newer = VISION_LANGUAGE_FAMILIES[kind]
            sections, table, unused = read(config, where, has_head=has_head, dtype=dtype)
            prefix = "" if kind == QWEN_VL else DECODER_PREFIX
            return HubModel(sections=sections, table=table, newer=newer, unused=unused, decoder_prefix=prefix)
        fields = ConfigFields({**config, QUANTISED: None}, where, family.defaults)
        tied = fields.flag("tie_word_embeddings") and not has_head
        model = read_decoder(fields, family, tied=tied, dtype=dtype)
        number = fields.whole(_AHEAD) if family.latent and fields.get(_AHEAD) else 0
        if number > _MOST_AHEAD:
            raise fields.refusal(_AHEAD, number, f"give at most {_MOST_AHEAD}")
        if num_ahead:
            model = replace(model, predict_ahead=PredictAheadConfig(num_layers=num_ahead))
        return HubModel(
            sections=ModelSections(model=model),
            table=family.names,
            is_packed=quantised is not None,
            num_layers_ahead=number,
        )
    except ValueError as error:
        # Our own records refuse numbers without naming the file.
        located = str(error).startswith(where)
        raise error if located else ValueError(f"{where}: {error}") from None


def new_config(sections: ModelSections, where: str) -> dict[str, Any]:
    """Returns ``config.json`` for a language model that began here.

    Raises ValueError, with the field's name, where no family can express it.
    """
    if sections.vision is not None:
        raise ValueError(
            f"{where} sees, and did not begin with an import: only models with an encoder that were imported go back"
        )
    model = sections.model
    family = _family_of(model, where)
    return {
        "architectures": [family.architecture],
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": model.param_dtype,
        **write_decoder(model, family),
    }


def _family_of(model: LanguageModelConfig, where: str) -> DecoderFamily:
    """Returns the first family that has everything that the model has."""
    variant = model.layer_variant
    glm = "glm4" if variant.post_norms else "glm"
    alone = {"gpt_oss": variant.sinks, "gemma3_text": variant.norm_offset, glm: variant.interleaved}
    alone["qwen2_moe"] = model.experts is not None and model.experts.shared_gate
    if any(alone.values()):
        return DECODER_FAMILIES[next(name for name, has_it in alone.items() if has_it)]
    if model.qkv_bias and (model.qk_norm or model.experts):
        other = "qk_norm" if model.qk_norm else "experts"
        raise ValueError(f"{where}: model.qkv_bias and model.{other} are together in no family: train without one")
    if (experts := model.experts) is not None:
        for name in ("shared_mlp_dim", "capacity_factor"):
            has_it = model.latent_attention is not None and name == "shared_mlp_dim"
            if getattr(experts, name) is not None and not has_it:
                raise ValueError(f"{where}: model.experts.{name} is {getattr(experts, name)}: no family has it")
    if model.latent_attention is not None:
        return DECODER_FAMILIES["deepseek_v3"]
    if experts is not None:
        return DECODER_FAMILIES["qwen3_moe" if model.qk_norm else "mixtral"]
    if model.qk_norm:
        return DECODER_FAMILIES["qwen3"]
    if model.qkv_bias:
        return DECODER_FAMILIES["qwen2"]
    return DECODER_FAMILIES["llama" if model.sliding_window is None else "mistral"]
