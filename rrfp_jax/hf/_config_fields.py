"""Reads ``config.json`` field by field, so that no field is passed over.

A family reads each field that its models depend on. A field that nobody has read is refused by name, unless it is known
to say nothing about the result (``_SILENT``) or its value says that something is off: null, false or empty.
"""

import math
from collections.abc import Mapping
from typing import Any

from rrfp_jax.readable import shown

_LARGEST = (1 << 31) - 1
# Fields about the file, tokens, generation, labels and software; then how untrained weights begin, and how long texts
# were, which rotary embeddings do not depend on.
_SILENT_NAMES = """
    _name_or_path architectures dtype model_type torch_dtype transformers_version transformers.js_config
    unsloth_fixed unsloth_version

    bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id
    forced_eos_token_id image_seq_length pad_token_id prefix sep_token_id suppress_tokens tokenizer_class

    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_scores remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate temperature top_k
    top_p typical_p use_cache

    finetuning_task id2label label2id num_labels problem_type task_specific_params

    _attn_implementation _attn_implementation_autoset attn_implementation ignore_keys_at_rope_validation
    keys_to_ignore_at_inference output_attentions output_hidden_states pretraining_tp return_dict tf_legacy_loss
    torchscript use_bfloat16

    initializer_factor initializer_range max_position_embeddings
"""
_SILENT = frozenset(_SILENT_NAMES.split())


class ConfigFields:
    """The fields of one object of ``config.json``. All methods raise ValueError with the field's name.

    Args:
        values: the object.
        where: the file, or the file and the path of the object in it, for messages.
        defaults: the family's values of fields that are missing.
    """

    def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any]) -> None:
        self._values, self.where, self._defaults = values, where, defaults
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Returns whether the field is there and not null."""
        return self._values.get(name) is not None

    def get(self, name: str, *older: str) -> Any:
        """Returns the value of a field, or that of an older name, or the family's default."""
        self._read.update((name, *older))
        for each in (name, *older):
            if self._values.get(each) is not None:
                return self._values[each]
        # A null in the file is a value too: it takes the place of a default that is not null.
        return None if name in self._values else self._defaults.get(name)

    def whole(self, name: str, *older: str) -> int:
        """Returns a whole number of at least 1."""
        value = self.get(name, *older)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise self.refusal(name, value, f"a whole number from 1 to {_LARGEST} is needed")
        return value

    def number(self, name: str) -> float:
        """Returns a number, neither infinite nor NaN."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, value, "a number is needed")
        if not abs(value) < math.inf:
            raise self.refusal(name, value, "a finite number is needed")
        return float(value)

    def flag(self, name: str) -> bool:
        """Returns true or false; null is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(name, value, "true or false is needed")
        return bool(value)

    def choice(self, name: str, known: Mapping[str, Any]) -> Any:
        """Returns the entry of ``known`` that the field's word names."""
        value = self.get(name)
        if not isinstance(value, str) or value not in known:
            raise self.refusal(name, value, f"models here know {', '.join(known)}")
        return known[value]

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """Refuses all values but the allowed ones and null."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.refusal(name, value, why)

    def part(self, name: str, defaults: Mapping[str, Any] | None = None) -> "ConfigFields":
        """Returns the fields of an object in this one; of an empty object where it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, value, "an object is needed")
        return ConfigFields(value or {}, f"{self.where}: {name}", defaults or {})

    def refusal(self, name: str, value: Any, why: str) -> ValueError:
        """Returns the error for a field's value."""
        return ValueError(f"{self.where}: {name} is {shown(value)}: {why}")

    def finish(self) -> None:
        """Refuses the first field that nobody has read, unless it is silent or off."""
        for name, value in self._values.items():
            if name in self._read or name in _SILENT or value is None or value is False or value in ({}, [], ""):
                continue
            raise self.refusal(name, value, "models here have nothing for this field")
