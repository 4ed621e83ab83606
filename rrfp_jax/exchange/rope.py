"""Rotary embeddings in ``config.json``: one object since transformers 5, two fields before."""

import math
from typing import Any

from rrfp_jax.exchange.config_fields import ConfigFields
from rrfp_jax.models.rope_scaling import KINDS, LINEAR, LLAMA3, RopeScaling

_DEFAULT = "default"
_LENGTH = "original_max_position_embeddings"


def read_rope(fields: ConfigFields) -> tuple[float, RopeScaling | None]:
    """``rope_theta`` and how waves are stretched; reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    Raises ValueError for all kinds but ``default``, ``llama3``, ``linear`` and ``yarn``.
    """
    outer, length = fields.number("rope_theta"), fields.get("max_position_embeddings")
    fields.only("partial_rotary_factor", 1, why="models here turn whole heads")
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    both = fields.has("rope_parameters") and fields.has("rope_scaling")
    if both and fields.get("rope_scaling") != fields.get("rope_parameters"):
        raise fields.refusal("rope_scaling", fields.get("rope_scaling"), "rope_parameters says something else")
    for each in ("rope_parameters", "rope_scaling"):
        fields.get(each)
    rope = fields.part(name, {"rope_theta": outer, _LENGTH: length})
    kind = rope.get("rope_type", "type") or _DEFAULT
    theta = rope.number("rope_theta")
    if fields.has("rope_theta") and theta != outer:  # versions of transformers take one or the other
        raise fields.refusal(
            "rope_theta", outer, f"{name} says {theta:g}: give the one that the model was trained with"
        )
    rope.only("partial_rotary_factor", 1, why="models here turn whole heads")
    if kind not in (_DEFAULT, *KINDS):
        raise rope.refusal("rope_type", kind, f"models here know {', '.join((_DEFAULT, *KINDS))}")
    scaling = None if kind == _DEFAULT else RopeScaling(kind=kind, **_numbers(rope, kind))
    rope.finish()
    return theta, scaling


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The two fields that every version of transformers reads."""
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    numbers = {"factor": scaling.factor, **scaling.settings}
    if "original_max_positions" in numbers:
        numbers[_LENGTH] = numbers.pop("original_max_positions")
    return {"rope_theta": theta, "rope_scaling": {"rope_type": scaling.kind, **numbers}}


def _numbers(rope: ConfigFields, kind: str) -> dict[str, Any]:
    """The fields of our record but for its kind, from those of an object of this kind."""
    numbers: dict[str, Any] = {"factor": rope.number("factor")}
    if kind == LINEAR:
        rope.get(_LENGTH)  # says nothing about a linear one
        return numbers
    numbers["original_max_positions"] = int(rope.number(_LENGTH))
    if kind == LLAMA3:
        return numbers | {name: rope.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    rope.only("truncate", True, why="models here stretch from a whole number of a wave to another")
    given = {name: rope.number(name) for name in ("beta_fast", "beta_slow") if rope.get(name) is not None}
    return numbers | given | {"attention_factor": _attention_factor(rope, numbers["factor"])}


def _attention_factor(rope: ConfigFields, factor: float) -> float | None:
    """As it is given, or by DeepSeek's two fields; None: as our record has it without one."""
    given = {name: rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    if given["attention_factor"] is not None:
        return rope.number("attention_factor")
    if not (given["mscale"] and given["mscale_all_dim"]):
        return None
    growth = 0.1 * math.log(max(factor, 1.0))
    return (growth * rope.number("mscale") + 1) / (growth * rope.number("mscale_all_dim") + 1)
