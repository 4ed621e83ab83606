"""Rotary embeddings in ``config.json``: one object since transformers 5, two fields before."""

from typing import Any

from rrfp_jax.exchange.config_fields import ConfigFields
from rrfp_jax.models.config import RopeScaling

_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_positions",
}
"""From their fields to ours."""


def read_rope(fields: ConfigFields) -> tuple[float, RopeScaling | None]:
    """``rope_theta`` and how waves are stretched; reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    Raises ValueError for all kinds but ``default`` and ``llama3``.
    """
    theta, length = fields.number("rope_theta"), fields.get("max_position_embeddings")
    fields.only("partial_rotary_factor", 1, why="models here turn whole heads")
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    both = fields.has("rope_parameters") and fields.has("rope_scaling")
    if both and fields.get("rope_scaling") != fields.get("rope_parameters"):
        raise fields.refusal("rope_scaling", fields.get("rope_scaling"), "rope_parameters says something else")
    for each in ("rope_parameters", "rope_scaling"):
        fields.get(each)
    rope = fields.part(name, {"rope_theta": theta, "original_max_position_embeddings": length})
    kind = rope.get("rope_type", "type") or "default"
    theta = rope.number("rope_theta")
    rope.only("partial_rotary_factor", 1, why="models here turn whole heads")
    if kind not in ("default", "llama3"):
        raise rope.refusal("rope_type", kind, "models here know default and llama3")
    scaling = None
    if kind == "llama3":
        numbers: dict[str, Any] = {ours: rope.number(theirs) for theirs, ours in _SCALING.items()}
        scaling = RopeScaling(**(numbers | {"original_max_positions": int(numbers["original_max_positions"])}))
    rope.finish()
    return theta, scaling


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The two fields that every version of transformers reads."""
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    numbers = {theirs: getattr(scaling, ours) for theirs, ours in _SCALING.items()}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": "llama3", **numbers}}
