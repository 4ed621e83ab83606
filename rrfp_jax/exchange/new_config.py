"""``config.json`` for a model that began here: the family that has what the model has."""

from typing import Any

from rrfp_jax.exchange.families.text_family import TextFamily
from rrfp_jax.exchange.hub_form import TEXT_FAMILIES
from rrfp_jax.exchange.model_sections import ModelSections
from rrfp_jax.exchange.text_fields import write_text
from rrfp_jax.models.config import LanguageModelConfig


def new_config(sections: ModelSections, where: str) -> dict[str, Any]:
    """What to write for a language model; raises ValueError, with the field's name, where no family has it."""
    if sections.vision is not None:
        raise ValueError(
            f"{where} sees, and did not begin with an import: only models with an encoder that were imported go back"
        )
    model = sections.model
    family = _family(model, where)
    return {
        "architectures": [family.architecture],
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": model.param_dtype,
        **write_text(model, family),
    }


def _family(model: LanguageModelConfig, where: str) -> TextFamily:
    if model.qkv_bias and (model.qk_norm or model.experts):
        other = "qk_norm" if model.qk_norm else "experts"
        raise ValueError(f"{where}: model.qkv_bias and model.{other} are together in no family: train without one")
    if model.experts is not None:
        return _with_experts(model, where)
    if model.qk_norm:
        return TEXT_FAMILIES["qwen3"]
    if model.qkv_bias:
        return TEXT_FAMILIES["qwen2"]
    return TEXT_FAMILIES["llama" if model.sliding_window is None else "mistral"]


def _with_experts(model: LanguageModelConfig, where: str) -> TextFamily:
    assert model.experts is not None
    for name in ("shared_mlp_dim", "capacity_factor"):
        if getattr(model.experts, name) is not None:
            raise ValueError(f"{where}: model.experts.{name} is {getattr(model.experts, name)}: no family has it")
    return TEXT_FAMILIES["qwen3_moe" if model.qk_norm else "mixtral"]
