"""Check that a run's data uses the tokens of the model that the run trains further.

The model is that of the run directory once it holds checkpoints, else that of ``run.init_from``. Data without a
tokenizer of its own is written in the model's tokens, and all other data is compared with them.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.data import ImageTextConfig
from rrfp_jax.data.config import JsonlConfig, ParquetConfig, TokensConfig
from rrfp_jax.data.images import TextWriter
from rrfp_jax.data.tokenizer_files import TokenKind, kind_of_file, read_tokenizer, tokenizer_file
from rrfp_jax.data.tokens import BYTE_TOKENIZER, TOKENIZER
from rrfp_jax.hf.image_settings import read_image_tokens
from rrfp_jax.hf.model_folder import CHECKPOINTS, CONFIG, files_are_kept, has_unread_tokenizer, open_model

if TYPE_CHECKING:
    from rrfp_jax.commands.training.data_sets import RunData

INIT_FROM = "run.init_from"


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """The model that a run begins or goes on with, as far as its tokens are concerned."""

    where: Path | None = None
    """The folder of an import or a run; None: the run begins at random."""
    tokens: TokenKind | None = None
    """The tokens that the model knows; None: nothing tells."""
    files: Path | None = None
    """The folder of files that belong to the model; None: there are none."""
    has_begun: bool = False
    """Whether the run directory itself holds the model."""

    @property
    def is_of_hub(self) -> bool:
        """Whether the model began with an import, which knows how texts open and which tokens stand for images."""
        return self.files is not None and (self.files / CONFIG).is_file()


def known_model(config: TrainConfig, directory: Path | None = None, *, fresh: bool = False) -> KnownModel:
    """Find the model that a run in ``directory`` goes on with; ``fresh``: ignore the directory's own model.

    Raises ValueError, with the remedy, if there is no such folder, or if its files do not fit together.
    """
    if directory is not None and not fresh and any((directory / CHECKPOINTS).glob("step_*/commit.json")):
        return _begun(directory)
    if config.run.init_from is None:
        return KnownModel()
    folder = open_model(Path(config.run.init_from), INIT_FROM)
    return KnownModel(where=folder.path, tokens=folder.tokens(), files=folder.files())


def _begun(directory: Path) -> KnownModel:
    """Returns the model of a run that goes on."""
    try:
        folder = open_model(directory, "run_dir")
    except ValueError:  # other code says whether the run can go on
        return KnownModel(where=directory, has_begun=True)
    if files_are_kept(directory):
        return KnownModel(where=directory, tokens=folder.tokens(), files=folder.files(), has_begun=True)
    files = tokens = None
    with suppress(ValueError):  # an earlier version began it: its import may be gone, or its data moved
        files = folder.files()
        tokens = folder.tokens()
    return KnownModel(where=directory, tokens=tokens, files=files, has_begun=True)


def with_tokenizer(data: JsonlConfig | ParquetConfig, known: KnownModel) -> JsonlConfig | ParquetConfig:
    """Returns the same files with the tokenizer to use: the given one, else that of the model, else bytes."""
    return replace(data, tokenizer=_tokenizer_of(data.tokenizer, known))


def with_kept_tokenizer(data: TokensConfig, known: KnownModel) -> TokensConfig:
    """Returns the same token sets with the tokenizer that a run has kept, if the named one is gone."""
    return data if data.tokenizer is None else replace(data, tokenizer=_tokenizer_of(data.tokenizer, known))


def text_writer(data: ImageTextConfig, known: KnownModel, *, sees: bool) -> TextWriter | None:
    """Returns the writer of text with images, or None if tokens are bytes. Raises ValueError if there can be no
    writer."""
    name = _tokenizer_of(data.tokenizer, known)
    if name == BYTE_TOKENIZER.name:
        return None
    file = tokenizer_file(name)
    kind = kind_of_file(file, (read_tokenizer(file, None).end_of_document,))
    is_of_hub = known.is_of_hub and known.tokens is not None and kind.is_same(known.tokens)
    marks = read_image_tokens(known.files) if is_of_hub and sees and known.files is not None else None
    if sees and marks is None:
        raise ValueError(
            f"data.tokenizer is {name}, and nothing says what stands for images among its tokens: give "
            f"{INIT_FROM} with a model that has this tokenizer, or tokenizer bytes"
        )
    return TextWriter(kind, marks, opens=is_of_hub)


def _tokenizer_of(given: str | None, known: KnownModel) -> str:
    file = None if known.tokens is None else known.tokens.file
    if given is None:
        return BYTE_TOKENIZER.name if file is None else str(file)
    if file is not None and known.has_begun and given != BYTE_TOKENIZER.name and not Path(given).expanduser().exists():
        return str(file)  # the run keeps the tokenizer that it was trained with
    return given


def check_tokens(kind_of_data: str, kind: TokenKind | None, known: KnownModel) -> None:
    """Raise ValueError if the tokens of the data, ``kind``, are not those of the model."""
    if known.where is None or kind is None:
        return
    tokens = known.tokens
    if tokens is None and kind.is_bytes and known.files is not None and has_unread_tokenizer(known.files):
        raise ValueError(
            f"the tokens of the data are bytes, and the model in {known.where} has a tokenizer in a form that is not "
            f"read here: save it as {TOKENIZER} into the folder that was imported, import again, or give --force"
        )
    if tokens is None or kind.is_same(tokens):
        return
    if tokens.is_bytes:
        remedy = "give data.tokenizer bytes, or data.kind text"
    elif kind_of_data == "tokens":
        remedy = f"tokenize the text with --tokenizer {tokens.file}"
    elif kind_of_data == "text":
        remedy = "give data.kind jsonl, parquet, tokens or image_text, with the model's tokenizer"
    else:
        remedy = f"give data.tokenizer {tokens.file}, or leave it out"
    raise ValueError(
        f"the tokens of the data are {kind}, and the model in {known.where} knows {tokens}: {remedy}, or give --force "
        "where it is to learn them"
    )


def token_notes(data: "RunData", known: KnownModel) -> list[str]:
    """Returns sentences about tokens that cannot be compared, and about tokens that end texts and differ."""
    notes = []
    kind, tokens = data.token_kind, known.tokens
    if known.where is not None and not known.has_begun:
        if tokens is None:
            notes.append(
                f"nothing in {known.where} says which tokens its model knows, so nobody has compared those of the data"
            )
        elif kind is None:
            notes.append(f"the data does not say which tokens it has: they must be {tokens}, as the model's are")
        elif kind.ends and tokens.ends and kind.is_same(tokens) and kind.ends[0] not in tokens.ends:
            ends = ", ".join(map(str, tokens.ends))
            notes.append(
                f"a text of the data ends with token {kind.ends[0]}, and the model in {known.where} ends one with "
                f"{ends}: end_of_document names another"
            )
    return [*notes, *getattr(data, "notes", ())]
