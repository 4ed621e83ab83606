"""The sections of a configuration that describe a model, as a file beside parameters, and how two models differ."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from rrfp_jax.exchange.transforms import Shape
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.encoder_config import ProjectorConfig, VisionConfig
from rrfp_jax.models.vision_language_config import VisionLanguageConfig

_RECORDS: dict[str, type] = {"model": LanguageModelConfig, "vision": VisionConfig, "projector": ProjectorConfig}
_LOSSES = {"z_loss", "balance_coefficient", "z_coefficient"}
_FREE = {"init_std", "param_dtype", "compute_dtype", "capacity_factor", *_LOSSES}
"""Fields that parameters do not depend on: how a model begins, in which numbers it computes, and what it adds to the
loss."""


@dataclass(frozen=True, kw_only=True)
class ModelSections:
    """A language model, or one that also sees."""

    model: LanguageModelConfig
    vision: VisionConfig | None = None
    projector: ProjectorConfig | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "ModelSections":
        """From the sections of a configuration, other sections set aside; raises ValueError in one sentence."""
        from pydantic import TypeAdapter, ValidationError

        if not isinstance(config.get("model"), dict):
            raise ValueError(f"{where} has no section model: give the folder of a run or of an import")
        records: dict[str, Any] = {}
        for name, record in _RECORDS.items():
            if config.get(name) is None:
                continue
            try:
                records[name] = TypeAdapter(record).validate_python(config[name])
            except ValidationError as error:
                first = error.errors()[0]
                way = ".".join(map(str, (name, *first["loc"])))
                raise ValueError(f"{where}: {way} does not fit ({first['msg']}): import or train again") from None
        sections = cls(**records)
        if sections.vision is not None and sections.projector is None:
            return cls(model=sections.model, vision=sections.vision, projector=ProjectorConfig())
        return sections

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data: what differs from the defaults of the records."""
        held = {name: getattr(self, name) for name in _RECORDS}
        return {name: dict(_given(record)) for name, record in held.items() if record is not None}

    def shapes(self) -> dict[tuple[str, ...], Shape]:
        """The shape of every array of the model, by layer and way in the layer, in the model's order."""
        from rrfp_jax.checkpoint.arrays import named_leaves
        from rrfp_jax.models import language_model, vision_language_model
        from rrfp_jax.programs.chunk import param_specs

        if self.vision is None:
            chunks = language_model(self.model).split(1)
        else:
            projector = self.projector or ProjectorConfig()
            whole = VisionLanguageConfig(vision=self.vision, projector=projector, decoder=self.model)
            chunks = vision_language_model(whole).split().chunks
        return {
            (layer, *way): tuple(spec.shape)
            for chunk in chunks
            for layer, params in param_specs(chunk).items()
            for way, spec in named_leaves(params).items()
        }


def differences(known: ModelSections, given: ModelSections) -> list[str]:
    """What another model's parameters do not fit, each by the name of its field; empty where they do."""
    found = []
    for section in _RECORDS:
        there, here = (_plain(getattr(each, section)) for each in (known, given))
        names = dict.fromkeys((*there, *here))
        found += [
            f"{section}.{name} is {here.get(name)!r} and not {there.get(name)!r}"
            for name in names
            if there.get(name) != here.get(name)
        ]
    return found


def _plain(record: Any) -> dict[str, Any]:
    """The fields that parameters depend on, those of records inside by dotted names."""
    if record is None:
        return {}
    plain: dict[str, Any] = {}
    for name, value in asdict(record).items():
        if isinstance(value, dict):
            plain |= {f"{name}.{inner}": each for inner, each in value.items() if inner not in _FREE}
        elif name == "layer_scale":  # the number is where it begins
            plain[name] = value is not None
        elif name not in _FREE:
            plain[name] = value
    if isinstance(record, LanguageModelConfig):
        plain |= {"num_kv_heads": record.num_key_value_heads, "head_dim": record.size_per_head}
    return plain


def _given(record: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            yield field.name, dict(_given(value)) if hasattr(value, "__dataclass_fields__") else _as_list(value)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
