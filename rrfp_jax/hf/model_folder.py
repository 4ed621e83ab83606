"""The folder that an import writes or a run leaves: its model, its parameters and its tokenizer.

An import writes::

    model.yaml           the sections of a configuration that describe the model
    checkpoints/         its parameters, as a run's checkpoint after 0 steps
    hugging-face/        config.json, tokenizer and so on as they came; tensors that our models do not use

A run keeps a copy of ``hugging-face/`` in ``tokenizer/``, so that it no longer needs the import once it has begun, or
it keeps the tokenizer of its data there if it began here. ``tokens.json`` in it says which tokens the run's model
knows.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from rrfp_jax.data._sources import check_inside
from rrfp_jax.data.tokenizer_files import (
    BYTE_TOKENS,
    TOKENIZER_CONFIG,
    TokenKind,
    ends_of_model,
    kind_of_file,
    kind_of_tokens,
    read_tokenizer,
    tokenizer_file,
)
from rrfp_jax.data.tokens import TOKENIZER
from rrfp_jax.hf._tensor_names import TensorShape, fits
from rrfp_jax.hf.tensor_files import read_json
from rrfp_jax.models.config import AdaptersConfig, LanguageModelConfig
from rrfp_jax.models.vision_config import (
    ProjectorConfig,
    VisionConfig,
    VisionLanguageConfig,
    encoder_section,
    encoder_values,
)
from rrfp_jax.observe.output_files import check_folder
from rrfp_jax.record_files import TEXT_BYTES, read_yaml
from rrfp_jax.storage import BucketPath, check_bucket, local_copy, located, move_up, read_stored, temporary_folder

MODEL, CHECKPOINTS, CARRIED = "model.yaml", "checkpoints", "hugging-face"
CONFIG = "config.json"
"""The configuration in the form of Hugging Face."""
UNUSED = "unused.safetensors"
"""The tensors that an import carries along."""
RUN = "config.yaml"
KEPT, TOKENS = "tokenizer", "tokens.json"
"""The folder of a run that keeps such files, and the record of the run's tokens in it."""
# Files that belong to a tokenizer, and are not copied if another one takes its place.
_OF_TOKENIZERS = (
    *("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.tiktoken"),
    *("chat_template*", "generation_config.json"),
)
# Files of tokenizers in forms that are not read here.
_UNREAD = ("*.model", "*.tiktoken", "vocab.json", "merges.txt", "vocab.txt")
# Kinds of data whose tokens may be bytes, with the tokens that end their samples then.
_OF_BYTES: dict[str, tuple[int, ...]] = {"text": (), "image_text": (0,), "jsonl": (0,), "parquet": (0,)}
_OF_FILES = ("jsonl", "parquet", "image_text")
_PLAIN = ("model", "adapters")
_RECORDS: dict[str, type] = {
    "model": LanguageModelConfig,
    "vision": VisionConfig,
    "projector": ProjectorConfig,
    "adapters": AdaptersConfig,
}
# Fields that parameters do not depend on: how a model begins, its dtypes, and the terms that it adds to the loss.
_FREE = {
    *("init_std", "param_dtype", "compute_dtype", "fp8", "capacity_factor"),
    *("z_loss", "balance_coefficient", "z_coefficient", "dropout", "loss_weight"),
}


@dataclass(frozen=True, kw_only=True)
class ModelSections:
    """A language model, or a vision-language model, maybe with adapters."""

    model: LanguageModelConfig
    vision: VisionConfig | None = None
    projector: ProjectorConfig | None = None
    adapters: AdaptersConfig | None = None

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
                values = config[name] if name in _PLAIN else encoder_values(name, config[name])[1]
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
            name: dict(_changed_fields(record)) if name in _PLAIN else encoder_section(name, record)
            for name, record in held.items()
            if record is not None
        }

    def shapes(self) -> dict[tuple[str, ...], TensorShape]:
        """Returns the shape of every array of the model, by layer and path in the layer, in the model's order."""
        from rrfp_jax.checkpoint import named_leaves
        from rrfp_jax.models import add_adapters, language_model, vision_language_model
        from rrfp_jax.programs.chunk import param_specs

        if self.vision is None:
            chunks = language_model(self.model).split(1)
        else:
            projector = self.projector or ProjectorConfig()
            whole = VisionLanguageConfig(vision=self.vision, projector=projector, decoder=self.model)
            chunks = vision_language_model(whole).split().chunks
        if self.adapters is not None:
            chunks = add_adapters(chunks, self.adapters)
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
        if section == "adapters" and known.adapters is None:  # a model without adapters may get some
            continue
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
        if name in _FREE:
            continue
        if isinstance(value, dict):
            # of the rate of a bias, only whether there is one
            each_of = {**value, "bias_rate": value["bias_rate"] is not None} if "bias_rate" in value else value
            plain |= {f"{name}.{inner}": each for inner, each in each_of.items() if inner not in _FREE}
        elif name == "layer_scale":  # the number is only where training begins
            plain[name] = value is not None
        else:
            plain[name] = value
    if isinstance(record, LanguageModelConfig):
        # Two files may say the same by a number and by leaving it out.
        plain |= {"num_kv_heads": record.num_key_value_heads, "head_dim": record.size_per_head}
        if plain.pop("global_layers.every", None) is not None:
            plain["global_layers.layers"] = tuple(filter(record.is_global, range(record.num_layers)))
    return plain


def _changed_fields(record: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            if hasattr(value, "__dataclass_fields__"):
                value = dict(_changed_fields(value))
            yield field.name, list(value) if isinstance(value, tuple) else value


# ------------------------------------------------------------------------------------------------------------- folders


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """An imported model, or a run."""

    path: Path
    sections: ModelSections
    config: dict[str, Any]
    """The whole configuration of a run, or the sections of an import."""

    @property
    def is_import(self) -> bool:
        """Whether the model was imported, and not trained here."""
        return (self.path / MODEL).is_file()

    @property
    def checkpoints(self) -> Path:
        """The folder of the parameters."""
        return self.path / CHECKPOINTS

    def check_fits(self, given: ModelSections, what: str) -> None:
        """Raises ValueError if parameters of this folder do not fit a model; ``what`` is the key to mend."""
        found = model_differences(self.sections, given)
        if found:
            raise ValueError(
                f"{what} {self.path} holds another model: {'; '.join(found)}: take the model from its "
                f"{MODEL if self.is_import else RUN}, or name another folder"
            )

    def files(self) -> Path | None:
        """Returns the folder of files that belong to the model: ``config.json`` of an import, tokenizer and so on.

        Returns None for a run that began here on bytes. Raises ValueError if the folder must be looked for in an import
        that is gone, which only runs of earlier versions need.
        """
        folder, seen = self, {self.path.resolve()}
        while not folder.is_import:
            if files_are_kept(folder.path):
                return local_copy(folder.path / KEPT)
            began = (folder.config.get("run") or {}).get("init_from")
            if began is None:
                return None
            folder = open_model(Path(began), f"{folder.path} began with init_from")
            if folder.path.resolve() in seen:
                raise ValueError(f"{folder.path} began with itself, by its init_from: give the import in its place")
            seen.add(folder.path.resolve())
        return local_copy(folder.path / CARRIED)

    def tokens(self) -> TokenKind | None:
        """Returns the kind of tokens that the model knows; None if no file tells.

        The record that a run keeps counts first, then the data that the run was trained on, then the tokenizer that
        came with the model. Raises ValueError, with the remedy, if a file that should tell is damaged.
        """
        files = self.files()
        if files is not None and (files / TOKENS).is_file():
            return _recorded_kind(files)
        if not self.is_import and (kind := self._tokens_of_data()) is not None:
            return kind
        return None if files is None or not (files / TOKENIZER).is_file() else _tokenizer_kind(files)

    def _tokens_of_data(self) -> TokenKind | None:
        """Returns the tokens that the run was trained on, by its configuration."""
        section = self.config.get("data")
        if section is None:
            return None
        kind = section.get("kind", "text")
        if kind == "tokens":
            path = section["path"]
            return kind_of_tokens(path if isinstance(path, str) else path[0], section.get("tokenizer"))
        if kind in _OF_FILES and section.get("tokenizer") not in (None, "bytes"):
            end = read_tokenizer(section["tokenizer"], section.get("end_of_document")).end_of_document
            return kind_of_file(tokenizer_file(section["tokenizer"]), (end,))
        return replace(BYTE_TOKENS, ends=_OF_BYTES[kind]) if kind in _OF_BYTES else None


def open_model(path: Path, what: str) -> ModelFolder:
    """Returns the folder of an import or a run, without a look at its parameters.

    ``what`` names it in the sentence of the ValueError that is raised if it is neither.
    """
    path = located(path)
    file = next((path / name for name in (MODEL, RUN) if (path / name).is_file()), None)
    if file is None:
        raise ValueError(f"{what} {path} has neither {MODEL} nor {RUN}: give the folder of an import, or of a run")
    try:
        config = read_yaml(read_stored(file, TEXT_BYTES)[0].decode())
    except (OSError, ValueError, yaml.YAMLError) as error:  # no UTF-8, and dates that do not exist, are ValueErrors
        reason = getattr(error, "strerror", None) or "no YAML"
        raise ValueError(f"{what} {file} cannot be read ({reason}): import or train again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{what} {file} holds no sections: import or train again")
    return ModelFolder(path=path, sections=ModelSections.of(config, str(file)), config=config)


# --------------------------------------------------------------------------------------------------------------- files


def check_new(path: Path, what: str) -> None:
    """Raises ValueError unless the folder can be made: it is not there yet, or is empty."""
    if isinstance(path, BucketPath):
        check_bucket(path, what)
    else:
        check_folder(path, what)
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{what} {path} is not empty: name a new folder, or remove this one")


def copy_file(source: Path, target: Path) -> None:
    """Copies a file with its permissions: nobody may read the copy who may not read the source.

    Raises ValueError if the source is a link that leads out of its folder, and OSError if the target is there.
    """
    check_inside(source, source.parent)
    with source.open("rb") as file:
        rights = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
        # Private from the first byte on: the rights come only once the file is known to be new.
        with open(target, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as copy:
            os.fchmod(copy.fileno(), rights)
            shutil.copyfileobj(file, copy)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Makes a folder beside ``path`` that becomes ``path`` when the block succeeds, and is removed when it raises.

    A killed process leaves a folder behind whose name begins with a dot and ends in ``.part``. What goes to an object
    store is made on a disk, and copied up with the files last by which others know that it is whole.
    """
    path = path.absolute()
    if isinstance(path, BucketPath):
        temporary = temporary_folder()
        try:
            yield temporary
            move_up(temporary, path, last=(f"{CHECKPOINTS}/step_00000000/commit.json", CONFIG, MODEL))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    temporary.mkdir()
    try:
        yield temporary
        if path.is_dir():
            path.rmdir()  # it was empty
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def keep_files(run: Path, files: Path | None, kind: TokenKind | None) -> None:
    """Gives a run copies of ``files``, which belong to its model, and the record of its tokens, ``kind``.

    If these tokens are not those of the tokenizer in ``files``, the data's tokenizer takes its place. Nothing is kept
    for a run that began here and whose configuration tells all. Raises ValueError if a file cannot be copied safely.
    """
    has_tokenizer = files is not None and (files / TOKENIZER).is_file()
    with_model = _tokenizer_kind(files) if files is not None and has_tokenizer else None
    is_other = kind is not None and (not kind.is_same(with_model) if with_model else kind.file is not None)
    if files is None and (kind is None or (kind.file is None and not kind.ends)):
        return
    if (run / KEPT).exists() and not files_are_kept(run):
        raise ValueError(f"{run / KEPT} is not of this run, which keeps its tokenizer there: move it away")
    # A complete folder is made first and takes its place by one rename, so that a killed run loses nothing.
    fresh = run / f".{KEPT}"
    shutil.rmtree(fresh, ignore_errors=True)
    with new_folder(fresh) as folder:
        for path in sorted(files.iterdir()) if files is not None else ():
            if path.is_file() and path.name != TOKENS and not (is_other and fits(path.name, _OF_TOKENIZERS)):
                copy_file(path, folder / path.name)
        if is_other and kind is not None and kind.file is not None:
            copy_file(kind.file.resolve(), folder / TOKENIZER)  # a user who names a link means its target
            _write_tokenizer_config(folder, kind)
        record: dict[str, Any] = {"is_known": kind is not None, "came_with_the_model": not is_other}
        if kind is not None:
            ends = kind.ends if is_other or with_model is None else dict.fromkeys((*kind.ends, *with_model.ends))
            digest = None if kind.is_bytes else kind_of_file(folder / TOKENIZER).tokenizer.sha256
            record |= {"ends": list(ends), "sha256": digest}
        (folder / TOKENS).write_text(json.dumps(record) + "\n", encoding="utf-8")
    shutil.rmtree(run / KEPT, ignore_errors=True)
    os.rename(fresh, run / KEPT)


def files_are_kept(run: Path) -> bool:
    """Returns whether a run has its own copies; a folder of that name without the record is somebody else's."""
    return (run / KEPT / TOKENS).is_file()


def came_with_the_model(files: Path | None) -> bool:
    """Returns whether the tokenizer in ``files`` is the one that the model was imported with."""
    if files is None or not (files / TOKENS).is_file():
        return True
    return read_json(files / TOKENS).get("came_with_the_model") is not False


def has_unread_tokenizer(files: Path) -> bool:
    """Returns whether there is a tokenizer in a form that is not read here, and no other."""
    names = [path.name for path in files.iterdir()]
    return TOKENIZER not in names and any(fits(name, _UNREAD) for name in names)


def _tokenizer_kind(files: Path) -> TokenKind:
    """Returns the tokens of the tokenizer.json that came with a model."""
    ends = ends_of_model(files)
    if not ends:
        with suppress(ValueError):  # the tokenizer need not say
            ends = (read_tokenizer(files, None).end_of_document,)
    return kind_of_file(files / TOKENIZER, ends)


def _recorded_kind(files: Path) -> TokenKind | None:
    """Returns the tokens that the record of a run names; None if nothing told when the run began."""
    record = read_json(files / TOKENS)
    if record.get("is_known") is False:
        return None
    ends, digest = record.get("ends"), record.get("sha256")
    if not isinstance(ends, list) or not all(type(end) is int for end in ends) or "sha256" not in record:
        raise ValueError(f"{files / TOKENS} is no record of tokens: put that of the run there, or remove {files}")
    if digest is None:
        return replace(BYTE_TOKENS, ends=tuple(ends))
    kind = kind_of_file(files / TOKENIZER, tuple(ends))
    if kind.tokenizer.sha256 != digest:
        raise ValueError(
            f"{files / TOKENIZER} is another tokenizer than the one that the run was trained with: put that one there "
            f"(SHA-256 {digest[:16]}...)"
        )
    return kind


def _write_tokenizer_config(folder: Path, kind: TokenKind) -> None:
    """Writes, in the form of transformers, which token ends a text; a tokenizer.json itself does not say."""
    from tokenizers import Tokenizer

    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if kind.ends:
        settings["eos_token"] = Tokenizer.from_file(str(folder / TOKENIZER)).id_to_token(kind.ends[0])
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
