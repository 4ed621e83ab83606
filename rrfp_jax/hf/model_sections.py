"""The sections of a configuration that describe a model, as a file beside parameters, and how two models differ."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from rrfp_jax.hf._tensor_names import TensorShape
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.vision_config import (
    ProjectorConfig,
    VisionConfig,
    VisionLanguageConfig,
    encoder_section,
    encoder_values,
)

_RECORDS: dict[str, type] = {"model": LanguageModelConfig, "vision": VisionConfig, "projector": ProjectorConfig}
# Fields that parameters do not depend on: how a model begins, its dtypes, and the terms that it adds to the loss.
_FREE = {
    *("init_std", "param_dtype", "compute_dtype", "capacity_factor"),
    *("z_loss", "balance_coefficient", "z_coefficient"),
}


@dataclass(frozen=True, kw_only=True)
class ModelSections:
    """A language model, or a vision-language model."""

    model: LanguageModelConfig
    vision: VisionConfig | None = None
    projector: ProjectorConfig | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "ModelSections":
        """Returns the model of a configuration, whose other sections do not count.

        Raises ValueError in one sentence.
        """
        from pydantic import TypeAdapter, ValidationError

        if not isinstance(config.get("model"), dict):
            raise ValueError(f"{where} has no section model: give the folder of a run or of an import")
        records: dict[str, Any] = {}
        for name, record in _RECORDS.items():
            if config.get(name) is None:
                continue
            try:
                values = config[name] if name == "model" else encoder_values(name, config[name])[1]
                records[name] = TypeAdapter(record).validate_python(values)
            except (AttributeError, ValueError) as error:
                if not isinstance(error, ValidationError):
                    raise ValueError(f"{where}: {name} does not fit ({error}): import or train again") from None
                first = error.errors()[0]
                way = ".".join(map(str, (name, *first["loc"])))
                raise ValueError(f"{where}: {way} does not fit ({first['msg']}): import or train again") from None
        if "vision" in records:
            records.setdefault("projector", ProjectorConfig())
        return cls(**records)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Returns plain data: the fields that differ from the defaults of the records."""
        held = {name: getattr(self, name) for name in _RECORDS}
        return {
            name: dict(_changed_fields(record)) if name == "model" else encoder_section(name, record)
            for name, record in held.items()
            if record is not None
        }

    def shapes(self) -> dict[tuple[str, ...], TensorShape]:
        """Returns the shape of every array of the model, by layer and path in the layer, in the model's order."""
        from rrfp_jax.checkpoint import named_leaves
        from rrfp_jax.models import language_model, vision_language_model
        from rrfp_jax.programs.chunk import param_specs

        if self.vision is None:
            chunks = language_model(self.model).split(1)
        else:
            projector = self.projector or ProjectorConfig()
            whole = VisionLanguageConfig(vision=self.vision, projector=projector, decoder=self.model)
            chunks = vision_language_model(whole).split().chunks
        return {
            (layer, *path): tuple(spec.shape)
            for chunk in chunks
            for layer, params in param_specs(chunk).items()
            for path, spec in named_leaves(params).items()
        }


def model_differences(known: ModelSections, given: ModelSections) -> list[str]:
    """Returns why the parameters of ``known`` do not fit ``given``, each by the field's name; empty where they fit."""
    found = []
    for section in _RECORDS:
        there, here = (_shaping_fields(getattr(each, section)) for each in (known, given))
        found += [
            f"{section}.{name} is {here.get(name)!r} and not {there.get(name)!r}"
            for name in dict.fromkeys((*there, *here))
            if there.get(name) != here.get(name)
        ]
    return found


def _shaping_fields(record: Any) -> dict[str, Any]:
    """Returns the fields that parameters depend on, those of records inside by dotted names."""
    if record is None:
        return {}
    plain: dict[str, Any] = {}
    for name, value in asdict(record).items():
        if isinstance(value, dict):
            plain |= {f"{name}.{inner}": each for inner, each in value.items() if inner not in _FREE}
        elif name == "layer_scale":  # the number is only where training begins
            plain[name] = value is not None
        elif name not in _FREE:
            plain[name] = value
    if isinstance(record, LanguageModelConfig):
        # Two files may say the same by a number and by leaving it out.
        plain |= {"num_kv_heads": record.num_key_value_heads, "head_dim": record.size_per_head}
    return plain


def _changed_fields(record: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            if hasattr(value, "__dataclass_fields__"):
                value = dict(_changed_fields(value))
            yield field.name, list(value) if isinstance(value, tuple) else value
