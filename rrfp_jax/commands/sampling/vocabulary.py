"""From text to tokens and back, by the tokenizer of a run or of an imported model.

Runs on bytes, and on images with text, have a token for each byte of UTF-8. Token sets and imports bring their
tokenizer along, as the ``tokenizers`` library reads it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.tokenizer_files import first_line, load, lost_part, raise_unless_of_library, unknown_of
from rrfp_jax.hf.model_folder import ModelFolder
from rrfp_jax.hf.tensor_files import read_json

_OF_ROWS = ("tokens", "jsonl", "parquet")
"""Sections of data sets whose documents are laid into rows."""
_REMEDY_OF_IMAGES = "give the tokenizer.json that came with the model"
_REMEDY = "give the tokenizer.json of its tokens with --tokenizer, or --tokenizer bytes"


class Vocabulary(Protocol):
    """A tokenizer, and the tokens at which a text ends."""

    stops: tuple[int, ...]

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns tokens, int32 ``[length]``; raises ValueError for text that cannot be written with them, and for none
        at all."""

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Returns the text of tokens, with broken characters replaced."""


class Bytes:
    """A token for each byte."""

    def __init__(self, stops: tuple[int, ...] = ()) -> None:
        self.stops = stops

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the tokens of a text, int32 ``[length]``."""
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt holds {text[error.start]!r}, which is no character: take it out") from None
        if not content:
            raise ValueError("the prompt is empty, and a text of bytes has no start token: give it a character")
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        return bytes(int(token) for token in tokens if 0 <= token < 256).decode(errors="replace")


class Tokenizer:
    """A tokenizer from a file.

    ``opens`` says whether the tokens that the file has texts open with are put there, as imported models know it; runs
    on data of their own do not. ``start`` is put in place of an empty prompt where nothing else is.
    """

    def __init__(
        self, path: Path, *, stops: tuple[int, ...] = (), start: int | None = None, opens: bool = True
    ) -> None:
        self.stops, self._start, self._opens = stops, start, opens
        self._tokenizer = load(path.read_bytes(), str(path))
        self._unknown = unknown_of(self._tokenizer)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the tokens of a text, int32 ``[length]``."""
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=self._opens)
        except BaseException as error:
            raise_unless_of_library(error)
            raise ValueError(
                f"the tokenizer cannot write the prompt ({first_line(error)}): give it other words"
            ) from None
        if (lost := lost_part(self._tokenizer, text, encoded, self._unknown)) is not None:
            raise ValueError(f"the tokenizer has no token for {lost!r} of the prompt: take it out")
        tokens = encoded.ids
        if not tokens and self._start is not None:
            tokens = [self._start]
        if not tokens:
            raise ValueError("the prompt is empty, and the tokenizer has no start token: give it a character")
        return np.array(tokens, np.int32)

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text

    def word_of(self, token: int) -> str:
        """Returns the text of a token; raises ValueError where there is none of this number."""
        word: str | None = self._tokenizer.id_to_token(token)
        if word is None:
            raise ValueError(f"the tokenizer has no token {token}, which stands for images: {_REMEDY_OF_IMAGES}")
        return word


def vocabulary_of(folder: ModelFolder, given: str | None) -> Vocabulary:
    """The vocabulary of a run or an import; ``given`` is a tokenizer's file, or ``bytes``, to take in its place.

    Raises ValueError, with the remedy, where there is none.
    """
    if given is not None:
        return Bytes() if given == "bytes" else Tokenizer(_existing(Path(given).expanduser()))
    kind = folder.tokens()
    if kind is None:
        raise ValueError(f"{folder.path} does not say what its tokens are: {_REMEDY}")
    if kind.file is None:
        return Bytes(kind.ends)
    section = None if folder.is_import else next(filter(None, map(folder.config.get, _OF_ROWS)), None)
    if section is None:
        return Tokenizer(_existing(kind.file), stops=kind.ends, opens=knows_openings(folder))
    # Rows that go on across documents show the beginning of a document after the end of the one before.
    start = None if section.get("pack") else kind.ends[0]
    return Tokenizer(_existing(kind.file), stops=kind.ends, start=start, opens=False)


def knows_openings(folder: ModelFolder) -> bool:
    """Returns whether the model was imported, and so knows the tokens with which its tokenizer opens a text."""
    files = folder.files()
    return files is not None and (files / "config.json").is_file()


def check_fits(tokens: NDArray[np.int32], folder: ModelFolder, max_tokens: int) -> None:
    """Raise ValueError where a prompt has tokens that the model does not know, or leads beyond its positions.

    Models here have no positions of their own, but those of Hugging Face say up to where they were trained.
    """
    vocab_size = folder.sections.model.vocab_size
    if tokens.max() >= vocab_size:
        raise ValueError(
            f"the prompt has token {tokens.max()}, and the model knows {vocab_size}: give the tokenizer that it was "
            "trained with"
        )
    most = _positions_of(folder)
    if most is not None and len(tokens) + max_tokens > most:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, and max_tokens is {max_tokens}, but the model has {most} positions: "
            "give fewer"
        )


def _positions_of(folder: ModelFolder) -> int | None:
    files = folder.files()
    path = None if files is None else files / "config.json"
    if path is None or not path.is_file():
        return None
    config = read_json(path)
    most: int | None = config.get("text_config", config).get("max_position_embeddings")
    return most


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"there is no tokenizer {path}: {_REMEDY}")
    return path
