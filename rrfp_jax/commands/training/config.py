"""Load the configuration of a run: a YAML file of sections, overridden from the command line.

Each section is a record that lives beside its owner; this file only composes them. A command-line option is the field's
name with dashes (``--num-stages 2``, or ``--pipeline.num-stages 2``). A field for text takes the argument as it stands;
other values are read as YAML, and ``4,4,3,3`` as a list. Nothing here imports JAX, so that a configuration that does
not fit is refused at once.
"""

import dataclasses
import difflib
import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from types import UnionType
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from rrfp_jax.cluster.config import TRANSPORTS, ClusterConfig
from rrfp_jax.commands.common.options import (
    AS_MAPPING,
    FOLDERS,
    INSTEAD,
    add_record_options,
    as_text,
    flag_of,
    given_texts,
    kinds_of,
    takes_list,
)
from rrfp_jax.commands.training.config_sources import at_home, find_config, refuse_code
from rrfp_jax.core import FUSED, SPLIT, hint_names
from rrfp_jax.core.replicas import ReduceWay
from rrfp_jax.costs.layer_sizes import REMAT_NAMES as REMATS
from rrfp_jax.data.config import (
    DATA_KINDS,
    DataSection,
    DataSetConfig,
    ImageTextConfig,
    OwnDataConfig,
    RowsConfig,
    TextConfig,
    kind_of,
    record_values,
    section_of,
)
from rrfp_jax.layout import check_device_order
from rrfp_jax.models.config import DTYPES, AdaptersConfig, LanguageModelConfig
from rrfp_jax.models.vision_config import (
    PROJECTOR_KINDS,
    VISION_KINDS,
    ProjectorConfig,
    ProjectorSection,
    VisionConfig,
    VisionSection,
    encoder_section,
    encoder_values,
)
from rrfp_jax.observe.trackers import TRACKERS
from rrfp_jax.readable import shown
from rrfp_jax.record_files import read_bounded, read_yaml
from rrfp_jax.schedules import schedule_names
from rrfp_jax.training.run_config import (
    AUTO_CUT,
    FORESIGHT_ORDER,
    OPTIMIZERS,
    ORDERS,
    SCHEDULES,
    EvaluationConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training run.

    Raises ValueError unless there is one data set, and pictures only for a model that sees.
    """

    model: LanguageModelConfig
    """The shape of the language model, or of a vision-language model's decoder."""
    data: DataSetConfig
    vision: VisionConfig | None = None
    """The encoder of images; None: a language model."""
    projector: ProjectorConfig | None = None
    adapters: AdaptersConfig | None = None
    """The adapters that train in place of the model's own layers; None: there are none."""
    pipeline: PipelineConfig
    optimizer: OptimizerConfig
    run: RunConfig
    evaluation: EvaluationConfig | None = None
    """Evaluations during the run; None: there are none."""
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if self.optimizer.shard and (self.pipeline.replicas == 1 or not isinstance(self.pipeline.replicas, int)):
            raise ValueError(
                "optimizer.shard is for several replicas of all stages, which share the state: give pipeline.replicas"
            )
        if isinstance(self.run.devices, tuple):
            size = math.prod((self.pipeline.mesh or {}).values())
            check_device_order(self.run.devices, self.pipeline.num_devices, size)
        if self.projector is not None and self.vision is None:
            raise ValueError("projector is given without vision, whose features it would project: give vision too")

    def on_part_of_ranks(self, num_ranks: int, all_ranks: int) -> "TrainConfig":
        """Returns the same with as many whole replicas as a part of the ranks can hold; a step has the same samples.

        Raises ValueError where these hold no whole number of replicas, or its microbatches cannot be dealt out to them.
        """
        if num_ranks == all_ranks:
            return self
        if not isinstance(self.pipeline.replicas, int):
            raise ValueError("a part of the ranks holds no part of replicas that differ: give all stages equally many")
        replicas, rest = divmod(self.pipeline.replicas * num_ranks, all_ranks)
        if rest or not replicas or self.data.num_microbatches % replicas:
            raise ValueError(
                f"{num_ranks} of {all_ranks} ranks hold {self.pipeline.replicas * num_ranks / all_ranks:g} replicas of "
                f"the pipeline, and a step has {self.data.num_microbatches} microbatches: give --nodes numbers with "
                "which replicas are whole and get equally many"
            )
        return dataclasses.replace(
            self,
            pipeline=dataclasses.replace(self.pipeline, replicas=replicas),
            optimizer=dataclasses.replace(self.optimizer, shard=self.optimizer.shard and replicas > 1),
            # the list names devices that are not there
            run=dataclasses.replace(self.run, devices=None) if isinstance(self.run.devices, tuple) else self.run,
        )

    @property
    def num_state_shares(self) -> int:
        """The number of equal shares of the optimizer state of which a unit holds one; by messages it holds two."""
        if not self.optimizer.shard:
            return 1
        replicas = self.pipeline.most_replicas
        return max(1, replicas // 2) if self.pipeline.by_messages else replicas

    @property
    def data_kind(self) -> str:
        """The kind of the data."""
        return str(section_of(self.data)["kind"])

    @property
    def has_segments(self) -> bool:
        """Whether rows may hold several samples, each attending to itself alone."""
        if isinstance(self.data, RowsConfig | OwnDataConfig):
            return self.data.pack
        return isinstance(self.data, ImageTextConfig)

    @property
    def images(self) -> ImageTextConfig | None:
        """The data where it is text with images."""
        return self.data if isinstance(self.data, ImageTextConfig) else None

    @property
    def counts_answers(self) -> bool:
        """Whether evaluations say how many answers are right: where the data says what is an answer."""
        return self.evaluation is not None and self.images is not None

    @property
    def row_length(self) -> int | None:
        """Tokens of a row where all microbatches are of the same rows; None: the data must be read to know it."""
        return self.data.length if isinstance(self.data, TextConfig | RowsConfig) else None

    def with_data(self, differences: Mapping[str, Any], where: str) -> "TrainConfig":
        """Returns the same with other values in the section of its data; raises ValueError, beginning with ``where``,
        for keys that the section does not have, and values that it refuses."""
        _refuse_unknown(where, "key of data", differences, [field.name for field in fields(DataSection)])
        if differences.get("num_microbatches", self.data.num_microbatches) != self.data.num_microbatches:
            raise ValueError(f"{where}: num_microbatches is that of training: leave it out, and change batch_size")
        if differences.get("kind", self.data_kind) != self.data_kind:
            raise ValueError(f"{where}: kind is that of training, {self.data_kind}: leave it out")
        try:
            record = _record("data", _joined(section_of(self.data), differences))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return dataclasses.replace(self, data=record)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data, for YAML."""
        sections = {}
        for name in (section.name for section in fields(self)):
            if (record := getattr(self, name)) is None:
                continue
            if name == "data":
                values = section_of(record)
            else:
                values = encoder_section(name, record) if name in ("vision", "projector") else asdict(record)
            sections[name] = _plain(values)
        return sections

    def as_yaml(self) -> str:
        """The text of a file that :func:`load_train_config` reads as the same."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


_MOST_NESTED = 32
_LONGEST_VALUE = 60
SECTIONS: dict[str, type] = {section.name: kinds_of(section.type)[0] for section in fields(TrainConfig)} | {
    "data": DataSection,
    "vision": VisionSection,
    "projector": ProjectorSection,
}
"""The record of each section, whose fields are the section's keys."""
_WITH_SECTION = ("vision", "projector", "adapters", "evaluation")
_NAMED = {
    "optimizer": ("name", "arguments", "schedule", "freeze", "shard", "on_host", "groups"),
    "data": ("kind", "object", "arguments", "images", "cache", "column"),
}
QUALIFIED = (*_WITH_SECTION, *(f"{section}.{key}" for section, keys in _NAMED.items() for key in keys))
"""Sections, and keys of others, whose options always name the section."""
_OFTEN = ("run", "pipeline", "optimizer", "data", "model", "cluster")
"""Sections in the order in which help texts have them; the others follow."""
_NULLS = ("null", "Null", "NULL")
_ITEM = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|([^,]*?))\s*(?:,|$)""")
_OPTIONAL = ("cluster", *_WITH_SECTION)
"""Sections that a file may leave out."""
_WANTED = {
    **dict.fromkeys(("int", "finite"), "a whole number"),
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dataclass": "a mapping",
}
"""The kinds of values that fields take, in words, by the beginning of pydantic's name of the error."""


def choices_of_options() -> dict[str, Sequence[str]]:
    """Returns the accepted values of each option with a choice, by ``section.field``."""
    return {
        "model.param_dtype": DTYPES,
        "model.compute_dtype": DTYPES,
        "data.kind": tuple(DATA_KINDS),
        "vision.kind": tuple(VISION_KINDS),
        "projector.kind": tuple(PROJECTOR_KINDS),
        "pipeline.layout": (AUTO_CUT, "TEXT"),
        "pipeline.schedule": (*schedule_names(), "FILE.py:NAME", "FILE.csv"),
        "pipeline.consume": (*ORDERS, f"{FORESIGHT_ORDER}+pairs"),
        "pipeline.hint": (*hint_names(), "FILE.py:NAME"),
        "pipeline.remat": REMATS,
        "pipeline.backward": (SPLIT, FUSED),
        "pipeline.reduce": tuple(ReduceWay),
        "cluster.transport": TRANSPORTS,
        "optimizer.name": tuple(OPTIMIZERS),
        "optimizer.schedule": tuple(SCHEDULES),
        "run.platform": ("cpu",),
        "run.trackers": TRACKERS,
    }


def load_train_config(path: str, overrides: Mapping[str, Any], *, trust: bool = False) -> TrainConfig:
    """Read the configuration of a run that is to begin, as :func:`read_train_config` does.

    Raises ValueError also if the file names code that ``overrides`` do not name, unless ``trust`` is True.
    """
    config = read_train_config(path, overrides)
    if not trust:
        refuse_code(path, config.as_dict(), overrides)
    return config


def read_train_config(path: str, overrides: Mapping[str, Any]) -> TrainConfig:
    """Read ``path``, a file or the name of a preset, and apply ``overrides``, from ``section.field`` to a value.

    The caller must not run code that the file names, see :mod:`rrfp_jax.commands.training.config_sources`.

    Raises ValueError, in one sentence, on a missing file, broken YAML, unknown sections or keys, values of a wrong
    type, and values that the records refuse.
    """
    path = find_config(path)
    sections: dict[str, dict[str, Any]] = {"cluster": {}} | _read(path)
    given: dict[str, dict[str, Any]] = {}
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        _refuse_unknown("an override", "section", [section], list(SECTIONS))
        _refuse_unknown("an override", f"key of {section}", [key], [field.name for field in fields(SECTIONS[section])])
        given.setdefault(section, {})[key] = value
    records = {
        name: _section(path, name, sections.get(name, {}), given.get(name, {})) for name in {**sections, **given}
    }
    try:
        return TrainConfig(**records)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def add_overrides(parser: ArgumentParser) -> None:
    """Add an option for every field of every section, those that one changes most often first."""
    ordered = {name: SECTIONS[name] for name in (*_OFTEN, *SECTIONS)}
    add_record_options(parser, ordered, choices_of_options(), QUALIFIED)


def overrides_of(arguments: Namespace) -> dict[str, Any]:
    """The overrides that were given on the command line, read as YAML."""
    given = dict[str, Any]()
    for name, text in given_texts(arguments).items():
        section, _, key = name.partition(".")
        if key:
            given[name] = _parse(name, text)
        elif isinstance(keys := _read_value(f"--{section}", text), dict):
            given |= {f"{section}.{key}": value for key, value in keys.items()}
        else:
            raise ValueError(f"--{section} {text!r} is no mapping: give the keys of the section, as '{{kind: ...}}'")
    return given


def _parse(name: str, text: str) -> Any:
    section, _, key = name.partition(".")
    kind = next(each.type for each in fields(SECTIONS[section]) if each.name == key)
    is_optional, members = isinstance(kind, UnionType), kinds_of(kind)
    if members == (str,):
        # A name or a path stays as it is, whatever YAML would make of it: ``try #2``, ``2026-11-26``, ``no``.
        means_none = not text or (text in _NULLS and not re.search(FOLDERS, key))
        return None if is_optional and means_none else text
    if members == (tuple[str, ...],):
        return None if is_optional and text in ("", *_NULLS) else _texts(text)
    listed = takes_list(kind) and "," in text and not text.startswith("[")
    return _read_value(flag_of(SECTIONS, name, QUALIFIED), f"[{text}]" if listed else text)


def _read_value(flag: str, text: str) -> Any:
    """Returns the value of an option that is written as in YAML."""
    try:
        value = read_yaml(text)
    except (yaml.YAMLError, ValueError):  # the latter for dates that do not exist
        raise ValueError(f"{flag} {text!r} cannot be read as a value: write it as in YAML, text in quotes") from None
    for key, of in value.items() if isinstance(value, dict) else ():
        if of is None and ":" in str(key):  # YAML takes {tensor:2} for a key without a value
            raise ValueError(f"{flag} {text!r} has no value for {key!r}: write {key.replace(':', ': ', 1)!r}")
    return value


def in_one_line(mapping: Mapping[str, Any]) -> str:
    """Returns a mapping as YAML in braces."""
    return str(yaml.safe_dump(dict(mapping), default_flow_style=True, sort_keys=False, width=1000).strip())


def _texts(text: str) -> list[str]:
    """Returns the items of a list of texts; an item that holds a comma stands in quotes."""
    listed = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    found = ("".join(parts) for parts in _ITEM.findall(listed))
    return [item for item in found if item]


def _read(path: str) -> dict[str, dict[str, Any]]:
    try:
        text = read_bounded(path).decode()
    except OSError as error:
        raise ValueError(
            f"configuration {path} cannot be read ({error.strerror}): give the path of a YAML file"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"configuration {path} is not UTF-8 text: give the path of a YAML file") from None
    try:
        content = read_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"configuration {path} is not YAML, mend this place: {error}") from None
    # A section without keys has no settings, unless leaving it out would mean something else.
    for name in [name for name, keys in content.items() if keys is None] if isinstance(content, dict) else ():
        if name in _WITH_SECTION:
            raise ValueError(f"{path}: the section {name} is empty: give it its keys, or take it out")
        content[name] = {} if name in SECTIONS else None
    if not isinstance(content, dict) or not all(isinstance(section, dict) for section in content.values()):
        needed = ", ".join(name for name in SECTIONS if name not in _OPTIONAL)
        raise ValueError(f"configuration {path} must hold the sections {needed}, each with its keys")
    _refuse_unknown(path, "section", content, list(SECTIONS))
    for name, values in content.items():
        _refuse_unknown(path, f"key of {name}", values, [field.name for field in fields(SECTIONS[name])])
    missing = [name for name in SECTIONS if name not in content and name not in _OPTIONAL]
    if missing:
        raise ValueError(f"configuration {path} lacks the section {', '.join(missing)}: add it")
    return content


def _section(path: str, name: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Returns the record of a section; ``given`` are the values of the command line, ``values`` those of the file."""

    def refusal(values: Mapping[str, Any]) -> str | None:
        try:
            _record(name, values)
        except ValueError as error:
            return str(error)
        return None

    try:
        return _record(name, _joined(values, given))
    except ValueError as error:
        # The options are to blame that do not fit into the file by themselves; none where the file is refused alike.
        told, flags = str(error), list[str]()
        if refusal(values) != told:
            flags = [key for key in given if refusal(_joined(values, {key: given[key]})) == told] or [*given]
        if name in AS_MAPPING:
            where = f"--{name} {in_one_line({key: given[key] for key in flags})}" if flags else ""
        else:
            where = " ".join(f"{flag_of(SECTIONS, f'{name}.{key}', QUALIFIED)} {as_text(given[key])}" for key in flags)
        raise ValueError(f"{where or path}: {error}") from None


def _record(name: str, values: Mapping[str, Any]) -> Any:
    kind: Any = SECTIONS[name]
    if name == "data":
        of_kind = DATA_KINDS[kind_of(values)]
        takes_several = any(field.name == "path" and takes_list(field.type) for field in fields(of_kind))
        if takes_several and isinstance(path := values.get("path"), str):
            values = {**values, "path": _texts(path)}
        kind, values = record_values(values)
    elif name in ("vision", "projector"):
        kind, values = encoder_values(name, values)
    types, given = {field.name: field.type for field in fields(kind)}, {**values}
    for key, value in values.items():
        # A single value stands for a list of one where only lists fit (``trackers: wandb``).
        if takes_list(types[key]) and not {int, str} & set(kinds_of(types[key])):
            given[key] = [value] if isinstance(value, int | float | str | dict) else value
    try:
        record = TypeAdapter(kind).validate_python(at_home(name, given))
    except ValidationError as error:
        raise ValueError(_sentence(name, error)) from None
    for key, value in asdict(record).items():
        _check_is_kept(f"{name}.{key}", value)
    return record


def _joined(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with those of ``given`` in their places; mappings of settings are joined key by key."""
    joined = {**values, **given}
    for key in ("images", "overrides"):
        if isinstance(old := values.get(key), Mapping) and isinstance(new := given.get(key), Mapping):
            joined[key] = {**old, **new}
    return joined


def _check_is_kept(name: str, value: Any, depth: int = 0) -> None:
    """Raise ValueError for a value that a checkpoint, or another process, would not give back as it is.

    YAML has more kinds of values: dates, bytes, sets, numbers as keys. In a section of free form they would pass all
    other checks, and then the first save would fail, or the same command could not go on from it.
    """
    if isinstance(value, dict | list | tuple):
        if depth == _MOST_NESTED:
            raise ValueError(f"{name} is nested more than {_MOST_NESTED} levels deep: make it flatter")
        for key, item in value.items() if isinstance(value, dict) else ((None, item) for item in value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise ValueError(f"{name} has the key {_briefly(key)}, which is no text: put it in quotes")
            _check_is_kept(name if key is None else f"{name}.{key}", item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {as_text(value)}: give a finite number")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is {_briefly(value)}: give a number of at most 64 bits, or put it in quotes")
    elif isinstance(value, str) and value != value.encode(errors="ignore").decode():
        raise ValueError(f"{name} is {_briefly(value)}, which is no Unicode text: leave the half characters out")
    elif not isinstance(value, str | int | float | None):
        kind = "a date" if isinstance(value, date) else f"of type {type(value).__name__}"
        raise ValueError(
            f"{name} is {_briefly(value)}, {kind}, which no checkpoint keeps: put it in quotes, or give a number"
        )


def _briefly(value: Any) -> str:
    text = str(value) if isinstance(value, date) else ascii(value)
    return text if len(text) < _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _refuse_unknown(path: str, what: str, given: Iterable[str], known: list[str]) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"the known ones are {', '.join(known)}"
            of_section = what.removeprefix("key of ")
            hint = INSTEAD.get(f"{of_section}.{key}") or INSTEAD.get(str(key)) or hint
            raise ValueError(f"{path}: {shown(key)} is no {what}: {hint}")


def _sentence(section: str, error: ValidationError) -> str:
    first = error.errors()[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), ValueError):
        return f"{section}: {cause}"
    field = str(first["loc"][0])
    if first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{section}.{'.'.join(map(str, first['loc']))} is missing: add it"
    if first["type"] == "unexpected_keyword_argument":
        return f"{section}.{field} has no key {first['loc'][-1]!r}: take it out"
    # A field of several types gives one entry per type.
    kinds = (each["type"].split("_", maxsplit=1)[0] for each in error.errors() if each["loc"][0] == field)
    wanted = dict.fromkeys(_WANTED.get(kind, "a value of another type") for kind in kinds)
    if [*wanted] == ["text"] and isinstance(first["input"], bool | int | float | date):  # YAML reads some names so
        return f"{section}.{field} is {first['input']}: give text, in quotes"
    return f"{section}.{field} is {shown(first['input'])}: give {' or '.join(wanted)}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
