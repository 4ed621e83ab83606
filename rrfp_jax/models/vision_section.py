"""The sections ``vision`` and ``projector`` of a configuration: a kind, sizes, and fields that differ from the kind.

The kinds are the encoders and projectors that are imported from Hugging Face, and ``plain``, a packed encoder of one's
own. A section becomes a :class:`VisionConfig` or :class:`ProjectorConfig`, which have a field for everything.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from rrfp_jax.models.encoder_config import ProjectorConfig, VisionConfig

VISION_KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "clip": {
        **{"class_token": True, "patch_bias": False, "pre_norm": True, "activation": "quick_gelu"},
        **{"final_norm": False, "feature_layer": -2, "norm_eps": 1e-5},
    },
    "siglip": {"activation": "gelu_tanh"},
    "intern": {"class_token": True, "layer_scale": 0.1, "final_norm": False},
}
"""Fields in which each kind of encoder differs from the defaults of :class:`VisionConfig`."""
PROJECTOR_KINDS: Mapping[str, Mapping[str, Any]] = {
    "llava": {},
    "intern": {"patches_per_feature": 4, "row_order": True, "norm": True},
}
_GRID = ("num_patches", "max_rows", "max_columns")


@dataclass(frozen=True, kw_only=True)
class VisionSection:
    """The encoder of images, a vision transformer (Dosovitskiy et al. 2021)."""

    kind: str = "plain"
    """The kind of the encoder, ``clip``, ``siglip``, ``intern`` or ``plain``, which decides its activation, norms,
    biases, class token and feature layer."""
    hidden: int
    """The width of the residual stream."""
    num_layers: int
    """The number of layers of the published model."""
    num_heads: int
    """The number of attention heads; divides ``hidden``."""
    mlp_dim: int
    """The inner width of the MLP."""
    patch_dim: int
    """The numbers of a patch: its pixels times the channels, 588 for 14 x 14 pixels of three colours."""
    grid: int | tuple[int, ...]
    """The patches of an image: their number where all images are alike, such as 256, or the most rows and columns where
    rows pack images of several sizes, such as ``2,16``."""
    overrides: dict[str, Any] | None = None
    """The fields of :class:`VisionConfig` in which the encoder differs from its kind, such as ``{feature_layer: -1,
    compute_dtype: bfloat16}``. None: none."""


@dataclass(frozen=True, kw_only=True)
class ProjectorSection:
    """The projector from features of the encoder to vectors of the decoder."""

    kind: str = "llava"
    """The kind of the projector: ``llava``, two products with an activation between them, or ``intern``, which first
    merges 2 x 2 patches of square images and normalises them."""
    overrides: dict[str, Any] | None = None
    """The fields of :class:`ProjectorConfig` in which the projector differs from its kind, such as
    ``{patches_per_feature: 4}``. None: none."""


def encoder_values(section: str, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the record of a section ``vision`` or ``projector``, and the values of its fields.

    Raises ValueError, in one sentence, for a kind or a field that does not exist.
    """
    kinds, record = _of(section)
    kind = values.get("kind", next(iter(kinds)))
    if kind not in kinds:
        raise ValueError(f"{section}: kind is {kind!r}: give one of {', '.join(kinds)}")
    overrides, known = values.get("overrides") or {}, [field.name for field in fields(record)]
    if not isinstance(overrides, Mapping):
        raise ValueError(f"{section}.overrides is {overrides!r}: give a mapping")
    if (odd := next((key for key in overrides if key not in known), None)) is not None:
        raise ValueError(f"{section}.overrides has no key {odd!r}: the known ones are {', '.join(known)}")
    given = {key: value for key, value in values.items() if key not in ("kind", "overrides", "grid")}
    return record, {**kinds[kind], **_grid(values.get("grid")), **given, **overrides}


def encoder_section(section: str, record: VisionConfig | ProjectorConfig) -> dict[str, Any]:
    """Returns the section that becomes this record, by the kind from which it differs least."""
    kinds, of = _of(section)
    values = asdict(record)
    defaults = {field.name: field.default for field in fields(of) if field.default is not MISSING}
    own = {field.name for field in fields(VisionSection)}
    taken = {"kind": "", **{key: value for key, value in values.items() if section == "vision" and key in own}}
    if section == "vision":
        alike = values["num_patches"]
        taken["grid"] = [values["max_rows"], values["max_columns"]] if alike is None else alike
    rest = {key: value for key, value in values.items() if key not in taken and key not in _GRID}

    def differences(kind: str) -> dict[str, Any]:
        expected = {**defaults, **kinds[kind]}
        return {key: value for key, value in rest.items() if key not in expected or expected[key] != value}

    kind = min(kinds, key=lambda kind: len(differences(kind)))
    return {**taken, "kind": kind, "overrides": differences(kind)}


def _of(section: str) -> tuple[Mapping[str, Mapping[str, Any]], type]:
    return (VISION_KINDS, VisionConfig) if section == "vision" else (PROJECTOR_KINDS, ProjectorConfig)


def _grid(given: Any) -> dict[str, Any]:
    if isinstance(given, list | tuple):
        if len(given) != 2:
            raise ValueError(f"vision.grid has {len(given)} numbers: give one number of patches, or rows and columns")
        return {"max_rows": given[0], "max_columns": given[1]}
    return {} if given is None else {"num_patches": given}
