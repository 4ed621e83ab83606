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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from types import UnionType
from typing import Any, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from rrfp_jax.bounded_text import shown
from rrfp_jax.cluster.config import ClusterConfig
from rrfp_jax.commands.common.field_words import FOLDERS, as_text, kinds_of, takes_list
from rrfp_jax.commands.common.options import INSTEAD, add_record_options, flag_of, given_texts
from rrfp_jax.commands.training.paths import at_home, whole_paths
from rrfp_jax.commands.training.presets import find_config
from rrfp_jax.commands.training.trust import refuse_code
from rrfp_jax.core import FUSED, READY, SPLIT, STRICT, GroupProtocol, hint_names
from rrfp_jax.costs.layer_sizes import REMAT_NAMES as REMATS
from rrfp_jax.data.image_text_config import ImageTextConfig
from rrfp_jax.data.own_data_config import OwnDataConfig
from rrfp_jax.data.text_bytes import DataConfig
from rrfp_jax.data.tokens_config import JsonlConfig, ParquetConfig, RowsConfig, TokensConfig
from rrfp_jax.models.config import DTYPES, LanguageModelConfig
from rrfp_jax.models.cuts import CONTEXT_ATTENTIONS
from rrfp_jax.models.encoder_config import ACTIVATIONS, NORMS, PROJECTOR_PLACES, ProjectorConfig, VisionConfig
from rrfp_jax.observe.trackers.config import TRACKERS, WANDB_MODES, TrackingConfig
from rrfp_jax.record_files import read_bounded
from rrfp_jax.schedules import schedule_names
from rrfp_jax.training.optimizer_config import OPTIMIZERS, SCHEDULES, OptimizerConfig
from rrfp_jax.training.run_config import AUTO_CUT, EvaluationConfig, PipelineConfig, RunConfig
from rrfp_jax.yaml_text import read_yaml

DataSetConfig = DataConfig | ImageTextConfig | TokensConfig | JsonlConfig | ParquetConfig | OwnDataConfig
"""What a data set can be."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training run.

    Raises ValueError unless there is one data set, and pictures only for a model that sees.
    """

    model: LanguageModelConfig
    """Of a vision-language model, its decoder."""
    data: DataConfig | None = None
    image_text: ImageTextConfig | None = None
    tokens: TokensConfig | None = None
    jsonl: JsonlConfig | None = None
    parquet: ParquetConfig | None = None
    own_data: OwnDataConfig | None = None
    vision: VisionConfig | None = None
    """None: a language model."""
    projector: ProjectorConfig | None = None
    pipeline: PipelineConfig
    optimizer: OptimizerConfig
    run: RunConfig
    evaluation: EvaluationConfig | None = None
    """None: no evaluation."""
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        given = [name for name in DATA_SETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'no data set'} {'are' if given else 'is'} given: give one of the sections "
                f"{', '.join(DATA_SETS)}"
            )
        if self.projector is not None and self.vision is None:
            raise ValueError("projector is given without vision, whose features it would project: give vision too")

    @property
    def data_set(self) -> DataSetConfig:
        """The one that is given."""
        return next(each for name in DATA_SETS if (each := getattr(self, name)) is not None)

    @property
    def data_section(self) -> str:
        """Its section's name."""
        return next(name for name in DATA_SETS if getattr(self, name) is not None)

    @property
    def has_segments(self) -> bool:
        """Whether rows may hold several samples, each attending to itself alone."""
        if isinstance(data := self.data_set, RowsConfig | OwnDataConfig):
            return data.pack
        return self.data is None

    @property
    def counts_answers(self) -> bool:
        """Whether evaluations say how many answers are right: where the data says what is an answer."""
        return self.evaluation is not None and self.image_text is not None

    @property
    def row_length(self) -> int | None:
        """Tokens of a row where all microbatches are of the same rows; None: the data must be read to know it."""
        data = self.data_set
        return data.length if isinstance(data, DataConfig | RowsConfig) else None

    def with_data(self, differences: Mapping[str, Any], where: str) -> "TrainConfig":
        """The same with other values in the section of its data; raises ValueError, beginning with ``where``, for keys
        that the section does not have, and values that it refuses."""
        section, known = self.data_section, [field.name for field in fields(self.data_set)]
        _refuse_unknown(where, f"key of {section}", differences, known)
        if differences.get("num_microbatches", self.data_set.num_microbatches) != self.data_set.num_microbatches:
            raise ValueError(f"{where}: num_microbatches is that of training: leave it out, and change batch_size")
        try:
            record = _record(section, {**asdict(self.data_set), **differences})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return dataclasses.replace(self, **{section: record})

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for YAML."""
        given = {section.name: getattr(self, section.name) for section in fields(self)}
        return {name: _plain(asdict(record)) for name, record in given.items() if record is not None}

    def as_saved(self) -> dict[str, Any]:
        """Returns plain data with whole paths, which mean the same wherever they are read."""
        return whole_paths(self.as_dict(), self.data_section)

    def as_yaml(self) -> str:
        """The text of a file that :func:`load_train_config` reads as the same."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


def _record_type(kind: Any) -> type:
    return next(member for member in get_args(kind) or (kind,) if member is not type(None))


_MOST_NESTED = 32
_LONGEST_VALUE = 60
DATA_SETS = ("data", "image_text", "tokens", "jsonl", "parquet", "own_data")
"""Sections of which there is one."""
SECTIONS: dict[str, type] = {section.name: _record_type(section.type) for section in fields(TrainConfig)}
_WITH_SECTION = (*(name for name in DATA_SETS if name != "data"), "vision", "projector", "evaluation", "tracking")
QUALIFIED = (*_WITH_SECTION, "optimizer.name", "optimizer.schedule", "optimizer.groups")
"""Sections, and keys of others, whose options always name the section."""
_OFTEN = ("run", "pipeline", "optimizer", "data", "model", "cluster")
"""Sections in the order in which help texts have them; the others follow."""
_NULLS = ("null", "Null", "NULL")
_ITEM = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|([^,]*?))\s*(?:,|$)""")
_OPTIONAL = ("cluster", "data", *_WITH_SECTION)
"""Sections that a file may leave out."""


def choices_of_options() -> dict[str, Sequence[str]]:
    """What the options with a choice accept, by ``section.field``."""
    return {
        "model.param_dtype": DTYPES,
        "model.compute_dtype": DTYPES,
        **{f"vision.{name}": DTYPES for name in ("param_dtype", "compute_dtype")},
        **{f"{section}.activation": ACTIVATIONS for section in ("vision", "projector")},
        "vision.norm": NORMS,
        "pipeline.layers_per_chunk": (AUTO_CUT, "N,N,..."),
        "pipeline.costs": ("FILE.json",),
        "pipeline.context_attention": CONTEXT_ATTENTIONS,
        "pipeline.projector_in": PROJECTOR_PLACES,
        "pipeline.schedule": (*schedule_names(), "FILE.py:NAME", "FILE.csv"),
        "pipeline.consume": (READY, STRICT),
        "pipeline.hint": (*hint_names(), "FILE.py:NAME"),
        "pipeline.remat": REMATS,
        "pipeline.backward": (SPLIT, FUSED),
        "pipeline.transport": ("auto", "sockets", "transfer"),
        "pipeline.group_protocol": (GroupProtocol.LEADER, GroupProtocol.PROPOSE),
        "optimizer.name": tuple(OPTIMIZERS),
        "optimizer.schedule": tuple(SCHEDULES),
        "run.platform": ("cpu",),
        "run.trackers": TRACKERS,
        "tracking.wandb_mode": WANDB_MODES,
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

    The caller must not run code that the file names, see :mod:`rrfp_jax.commands.training.trust`.

    Raises ValueError, in one sentence, on a missing file, broken YAML, unknown sections or keys, values of a wrong
    type, and values that the records refuse.
    """
    path = find_config(path)
    sections: dict[str, dict[str, Any]] = {"tracking": {}, "cluster": {}} | _read(path)
    given: dict[str, dict[str, Any]] = {}
    for name, value in overrides.items():
        section, _, field = name.partition(".")
        given.setdefault(section, {})[field] = value
    _refuse_other_data_set(path, sections, overrides)
    records = {
        name: _section(path, name, sections.get(name, {}), given.get(name, {})) for name in {**sections, **given}
    }
    try:
        return TrainConfig(**records)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _refuse_other_data_set(path: str, sections: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Options without a section's name are of ``data``, which is easily overlooked beside another data set."""
    held = [name for name in DATA_SETS if name in sections]
    for name in overrides:
        section, _, key = name.partition(".")
        if section in DATA_SETS and held and section not in held:
            is_known = section == "data" and key in {field.name for field in fields(SECTIONS[held[0]])}
            advice = flag_of(SECTIONS, f"{held[0]}.{key}", QUALIFIED) if is_known else f"another file than {path}"
            raise ValueError(
                f"{flag_of(SECTIONS, name, QUALIFIED)} is of the section {section}, and the data of {path} is "
                f"{held[0]}: give {advice}"
            )


def add_overrides(parser: ArgumentParser) -> None:
    """Add an option for every field of every section, those that one changes most often first."""
    ordered = {name: SECTIONS[name] for name in (*_OFTEN, *SECTIONS)}
    add_record_options(parser, ordered, choices_of_options(), QUALIFIED)


def overrides_of(arguments: Namespace) -> dict[str, Any]:
    """The overrides that were given on the command line, read as YAML."""
    return {name: _parse(name, text) for name, text in given_texts(arguments).items()}


def _parse(name: str, text: str) -> Any:
    section, _, key = name.partition(".")
    kind = next(each.type for each in fields(SECTIONS[section]) if each.name == key)
    if (members := kinds_of(kind)) in ((str,), (tuple[str, ...],)):
        is_optional = isinstance(kind, UnionType)
        return _text(text, key, is_optional=is_optional) if members == (str,) else _texts(text, is_optional=is_optional)
    flag = flag_of(SECTIONS, name, QUALIFIED)
    try:
        value = read_yaml(f"[{text}]" if takes_list(kind) and "," in text and not text.startswith("[") else text)
    except (yaml.YAMLError, ValueError):  # the latter for dates that do not exist
        raise ValueError(f"{flag} {text!r} cannot be read as a value: write it as in YAML, text in quotes") from None
    for key, of in value.items() if isinstance(value, dict) else ():
        if of is None and ":" in str(key):  # YAML takes {tensor:2} for a key without a value
            raise ValueError(f"{flag} {text!r} has no value for {key!r}: write {key.replace(':', ': ', 1)!r}")
    return value


def _text(text: str, key: str, *, is_optional: bool) -> str | None:
    """Returns a name or a path as it is, whatever YAML would make of it: ``try #2``, ``2026-11-26``, ``no``. ``null``
    is None for an optional field, except for a field that names a folder."""
    names_folder = re.search(FOLDERS, key) is not None
    return None if is_optional and (not text or (text in _NULLS and not names_folder)) else text


def _texts(text: str, *, is_optional: bool) -> list[str] | None:
    """Returns the items of a list of texts; an item that holds a comma stands in quotes."""
    if is_optional and text in ("", *_NULLS):
        return None
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
    if isinstance(content, dict):
        content = {name: _nothing_below(path, name) if keys is None else keys for name, keys in content.items()}
    if not isinstance(content, dict) or not all(isinstance(section, dict) for section in content.values()):
        needed = ", ".join(name for name in SECTIONS if name not in _OPTIONAL)
        sections = f"{needed} and one of {', '.join(DATA_SETS)}"
        raise ValueError(f"configuration {path} must hold the sections {sections}, each with its keys")
    _refuse_unknown(path, "section", content, list(SECTIONS))
    for name, values in content.items():
        _refuse_unknown(path, f"key of {name}", values, [field.name for field in fields(SECTIONS[name])])
    missing = [name for name in SECTIONS if name not in content and name not in _OPTIONAL]
    if missing:
        raise ValueError(f"configuration {path} lacks the section {', '.join(missing)}: add it")
    return content


def _nothing_below(path: str, name: str) -> dict[str, Any] | None:
    """Returns the keys of a section that has none: no settings. Raises ValueError if leaving the section out means
    something else."""
    if name in _OPTIONAL and name not in ("cluster", "tracking"):
        raise ValueError(f"{path}: the section {name} is empty: give it its keys, or take it out")
    return {} if name in SECTIONS else None


def _section(path: str, name: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """The record of a section; ``given`` are the values of the command line, ``values`` those of the file."""
    try:
        return _record(name, {**values, **given})
    except ValueError as error:
        flags = _to_blame(name, values, given, str(error))
        where = " ".join(f"{flag_of(SECTIONS, f'{name}.{key}', QUALIFIED)} {as_text(given[key])}" for key in flags)
        raise ValueError(f"{where or path}: {error}") from None


def _to_blame(name: str, values: Mapping[str, Any], given: Mapping[str, Any], refusal: str) -> list[str]:
    """The fields of the command line that do not fit into the file; none where it is refused alike without them."""
    if _refusal(name, values) == refusal:
        return []
    return [key for key in given if _refusal(name, {**values, key: given[key]}) == refusal] or [*given]


def _refusal(name: str, values: Mapping[str, Any]) -> str | None:
    try:
        _record(name, values)
    except ValueError as error:
        return str(error)
    return None


def _record(name: str, values: Mapping[str, Any]) -> Any:
    types = {field.name: field.type for field in fields(SECTIONS[name])}
    try:
        record: Any = TypeAdapter(SECTIONS[name]).validate_python(
            at_home(name, {key: _one_or_many(types[key], values[key]) for key in values})
        )
    except ValidationError as error:
        raise ValueError(_sentence(name, error)) from None
    for key, value in asdict(record).items():
        _check_is_kept(f"{name}.{key}", value)
    return record


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


def _one_or_many(kind: Any, value: Any) -> Any:
    """A single value where only several fit (``layers_per_chunk: 4``) stands for a list of one."""
    members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    alone = {int, str} & set(members)
    is_list = takes_list(kind) and (not alone or (alone == {str} and isinstance(value, int)))
    return [value] if is_list and isinstance(value, int | float | str) else value


def _refuse_unknown(path: str, what: str, given: Mapping[str, Any], known: list[str]) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"the known ones are {', '.join(known)}"
            hint = INSTEAD.get(str(key), hint)
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
    # a field of several types gives one entry per type
    wanted = dict.fromkeys(_wanted(each["type"]) for each in error.errors() if each["loc"][0] == field)
    if [*wanted] == ["text"] and isinstance(first["input"], bool | int | float | date):  # YAML reads some names so
        return f"{section}.{field} is {first['input']}: give text, in quotes"
    return f"{section}.{field} is {shown(first['input'])}: give {' or '.join(wanted)}"


def _wanted(kind: str) -> str:
    """What a field takes, by pydantic's name of the error."""
    whole = "a whole number"
    names = {
        "int": whole,
        "finite": whole,
        "float": "a number",
        "bool": "true or false",
        "string": "text",
        "tuple": "a list",
        "dataclass": "a mapping",
    }
    return names.get(kind.split("_", maxsplit=1)[0], "a value of another type")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
