"""A model in the form of Hugging Face: its family, what its configuration says, and what its tensors are called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rrfp_jax.bounded_text import shown
from rrfp_jax.exchange.config_fields import ConfigFields
from rrfp_jax.exchange.families.llama import LLAMA
from rrfp_jax.exchange.families.llava import DECODER
from rrfp_jax.exchange.families.mistral import MISTRAL
from rrfp_jax.exchange.families.mixtral import MIXTRAL
from rrfp_jax.exchange.families.qwen2 import QWEN2
from rrfp_jax.exchange.families.qwen3 import QWEN3
from rrfp_jax.exchange.families.qwen3_moe import QWEN3_MOE
from rrfp_jax.exchange.families.text_family import TextFamily
from rrfp_jax.exchange.model_sections import ModelSections
from rrfp_jax.exchange.names import Table
from rrfp_jax.exchange.text_fields import read_text
from rrfp_jax.exchange.vision_language_fields import READERS

TEXT_FAMILIES: dict[str, TextFamily] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)
}
"""By ``model_type``."""
_QUANTISED = "quantization_config"


@dataclass(frozen=True, kw_only=True)
class HubForm:
    """What a family's tables make of one ``config.json``."""

    sections: ModelSections
    table: Table
    newer: tuple[tuple[str, str], ...] = ()
    """Beginnings of the newer names of tensors, each with the older one instead."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors that the family's files hold and its model does not use: they are carried along."""
    renamed: str = ""
    """What stands before their names of the decoder's tensors."""


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DROPPED = ("*.rotary_emb.inv_freq", "*.embeddings.position_ids")
"""Tensors of old files that are no parameters, but follow from the configuration."""


def read_config(config: Mapping[str, Any], where: str, *, has_head: bool | None, dtype: str) -> HubForm:
    """The form of the model that ``config`` describes.

    ``has_head`` says whether the file holds a head of its own that is not the embedding's table; ``dtype`` is that of
    its parameters, as NumPy calls it.

    Raises ValueError, in one sentence with the field's name, for what our models cannot express.
    """
    kind = config.get("model_type")
    known = {**TEXT_FAMILIES, **READERS}
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"{where}: model_type is {shown(kind)}: models here are {', '.join(known)}")
    if config.get(_QUANTISED) is not None:
        raise ValueError(f"{where}: {_QUANTISED} is given: give the model as it was before it was quantised")
    if kind in READERS:
        return _seeing(kind, config, where, has_head=has_head, dtype=dtype)
    family = TEXT_FAMILIES[kind]
    check_architecture(config, family.architecture, where)
    fields = ConfigFields(config, where, family.defaults)
    tied = fields.flag("tie_word_embeddings") and not has_head
    try:
        model = read_text(fields, family, tied=tied, dtype=dtype)
    except ValueError as error:
        raise _located(error, where) from None
    return HubForm(sections=ModelSections(model=model), table=family.names)


def _seeing(kind: str, config: Mapping[str, Any], where: str, *, has_head: bool | None, dtype: str) -> HubForm:
    architecture, read, newer = READERS[kind]
    check_architecture(config, architecture, where)
    try:
        sections, table, unused = read(config, where, TEXT_FAMILIES, has_head=has_head, dtype=dtype)
    except ValueError as error:
        raise _located(error, where) from None
    return HubForm(sections=sections, table=table, newer=newer, unused=unused, renamed=DECODER)


def check_architecture(config: Mapping[str, Any], wanted: str, where: str) -> None:
    """Raise ValueError where the file says that it holds another model than the family's."""
    given = config.get("architectures")
    if given and given != [wanted]:
        raise ValueError(f"{where}: architectures is {shown(given)}: models here are {wanted}")


def _located(error: ValueError, where: str) -> ValueError:
    """What a record of ours refuses does not say where it stands."""
    return error if str(error).startswith(where) else ValueError(f"{where}: {error}")
