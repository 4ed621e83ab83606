"""What makes tokens of texts: a file of the ``tokenizers`` library, or nothing but the bytes of UTF-8.

A text is tokenised as it stands: what the file says about cutting, padding, dropping merges at random, or tokens that
open a text is not applied, for those are no part of the text.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokens.header import BYTES, TOKENIZER
from rrfp_jax.record_files import parse_json, read_record

_CONFIG = "tokenizer_config.json"
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_MOST_GROWTH = 100
_THREADS = "TOKENIZERS_PARALLELISM"


class Encoder(Protocol):
    """Makes tokens of texts."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of every text, ``[tokens]`` each."""
        ...


class ByteEncoder:
    """Tokens are bytes."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The bytes of every text, uint8 ``[bytes]`` each."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class FileEncoder:
    """Tokens of a tokenizer.json; its special tokens in a text are plain text, unless ``reads_special``."""

    def __init__(self, data: bytes, *, reads_special: bool, name: str = TOKENIZER) -> None:
        self._name = name
        self._tokenizer = load(data, name)
        self._tokenizer.encode_special_tokens = not reads_special

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of every text, uint32 ``[tokens]`` each."""
        try:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            raise_unless_of_library(error)
            raise BrokenData(
                f"the tokenizer {self._name} cannot encode the text ({first_line(error)}): take one for any text, or "
                "leave this one out"
            ) from error
        return [np.array(each.ids, np.uint32) for each in encoded]


def raise_unless_of_library(error: BaseException) -> None:
    """Raise an error again that a library in Rust cannot have raised.

    Such a library raises Exception, and PanicException, which is none, where its own code has given up: for example a
    pattern on a text for which it takes too many steps.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def first_line(error: BaseException) -> str:
    """What a library says, in one line."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class TokenizerFile(NamedTuple):
    """A tokenizer that can be used."""

    name: str
    data: bytes | None
    """tokenizer.json as it stands; None: tokens are bytes."""
    end_of_document: int
    vocab_size: int


PLAIN = TokenizerFile(BYTES.name, None, end_of_document=0, vocab_size=256)
"""Bytes; the zero byte closes a document."""


def read_tokenizer(path: str | os.PathLike[str], end_of_document: str | None) -> TokenizerFile:
    """The tokenizer in a file, or in a folder that has a tokenizer.json.

    ``end_of_document`` is the token that closes documents; None: the ``eos_token`` of tokenizer_config.json beside, or
    a usual one that the tokenizer has. Raises ValueError, with the remedy, where there is no such file or token.
    """
    file = Path(path).expanduser()
    file = file / TOKENIZER if file.is_dir() else file
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"tokenizer {file} does not exist: name a tokenizer.json, train, or bytes") from None
    except OSError as error:
        raise ValueError(
            f"tokenizer {file} cannot be read ({error.strerror}): make it readable, or name another"
        ) from None
    tokenizer = load(data, str(file))
    return TokenizerFile(file.name, data, end_of_document_in(tokenizer, file, end_of_document), size_of(tokenizer))


def load(data: bytes, name: str) -> Any:
    """The ``tokenizers.Tokenizer`` of a tokenizer.json, without what does not belong to a text's own tokens."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(data.decode())
        growth = _growth(tokenizer)
    except BaseException as error:
        raise_unless_of_library(error)
        raise ValueError(
            f"{name} is no file of the tokenizers library ({first_line(error)}): name a tokenizer.json"
        ) from None
    if growth > _MOST_GROWTH:
        raise ValueError(f"{name} writes {growth} letters for one before it makes tokens: name another tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def _growth(tokenizer: Any) -> int:
    """How many letters a tokenizer may put in the place of one; a few lines of its file make millions."""
    growth = 1
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    waiting = [parse_json(part.__getstate__()) for part in parts if part is not None]
    while waiting:
        step = waiting.pop()
        for name in ("normalizers", "pretokenizers", "decoders"):
            waiting += step.get(name) or []
        if step.get("type") == "Replace":
            pattern = step.get("pattern") or {}
            growth *= max(1, -(-len(step.get("content") or "") // len(pattern.get("String") or " ")))
    return growth


def size_of(tokenizer: Any) -> int:
    """One more than the largest token."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1


def end_of_document_in(tokenizer: Any, file: Path, named: str | None) -> int:
    """The number of the token that closes documents; arguments as in :func:`read_tokenizer`."""
    if named is not None:
        number = tokenizer.token_to_id(named)
        if number is None:
            raise ValueError(f"{file} has no token {named!r}: name one of its tokens with --end-of-document")
        return number
    candidates = (_configured_end(file.parent / _CONFIG), *_USUAL_ENDS)
    numbers = (tokenizer.token_to_id(token) for token in candidates if token is not None)
    found = next((number for number in numbers if number is not None), None)
    if found is None:
        raise ValueError(
            f"{file} does not say which token closes a document, and has none of {', '.join(_USUAL_ENDS)}: name one of "
            "its tokens with --end-of-document"
        )
    return found


def _configured_end(path: Path) -> str | None:
    try:
        token = parse_json(read_record(path)[0]).get("eos_token")
    except (OSError, ValueError, AttributeError):  # missing, or nothing that tells
        return None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


@contextmanager
def threads_of_tokenizers(are_on: bool) -> Iterator[None]:
    """Whether the ``tokenizers`` library uses threads of its own in the block; afterwards as before."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "true" if are_on else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
