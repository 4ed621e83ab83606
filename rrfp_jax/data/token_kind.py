"""Which tokens the numbers of a data set or of a model stand for; data and model must agree on it.

A data set has a kind of tokens, and so has a model: an import by the tokenizer that came with it, a run by the data
that it was trained on. Two kinds are the same if one tokenizer made them. The tokenizer's file may be written in
another way, as by a library that saves it again: only the way it cuts a text, and the number of each token, count.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rrfp_jax.data.tokenizer_files import raise_unless_of_library
from rrfp_jax.data.tokens.header import BYTE_TOKENIZER, TOKENIZER, FileDigest, TokenizerName, TokenSetHeader

# Parts of a tokenizer.json that do not decide which tokens a text has.
_NOT_OF_TOKENS = ("version", "truncation", "padding", "post_processor", "decoder")


@dataclass(frozen=True, kw_only=True)
class TokenKind:
    """The tokens that numbers stand for."""

    tokenizer: TokenizerName
    """The tokenizer that made them."""
    ends: tuple[int, ...] = ()
    """Tokens at which a text ends; the first of them closes the documents of a data set."""
    file: Path | None = None
    """The tokenizer.json. None: tokens are bytes."""

    @property
    def is_bytes(self) -> bool:
        """Whether a token is a byte of UTF-8."""
        return self.tokenizer.sha256 is None

    def is_same(self, other: "TokenKind") -> bool:
        """Returns whether numbers stand for the same tokens in both kinds."""
        if self.tokenizer.sha256 == other.tokenizer.sha256:
            return True
        if self.file is None or other.file is None:
            return False
        mine, theirs = _token_parts(self.file), _token_parts(other.file)
        return mine is not None and mine == theirs

    def __str__(self) -> str:
        return "bytes" if self.is_bytes else f"those of the tokenizer {self.file or self.tokenizer.name}"


BYTE_TOKENS = TokenKind(tokenizer=BYTE_TOKENIZER)
"""The kind of tokens that are bytes; none of them ends a text."""


def kind_of_file(file: Path, ends: tuple[int, ...] = ()) -> TokenKind:
    """Returns the kind of a tokenizer.json; raises ValueError, with the remedy, if the file cannot be read."""
    try:
        digest = FileDigest.of_file(file).sha256
    except OSError as error:
        raise ValueError(
            f"tokenizer {file} cannot be read ({error.strerror}): make it readable, or name another"
        ) from None
    return TokenKind(tokenizer=TokenizerName(name=TOKENIZER, sha256=digest), ends=ends, file=file)


def kind_of_set(folder: Path, header: TokenSetHeader) -> TokenKind:
    """Returns the kind of the token set in ``folder``."""
    file = None if header.tokenizer.sha256 is None else folder / TOKENIZER
    return TokenKind(tokenizer=header.tokenizer, ends=(header.end_of_document,), file=file)


@lru_cache(maxsize=8)
def _token_parts(file: Path) -> str | None:
    """Returns the parts that decide tokens, as text that is the same however the file is written.

    Returns None if the file holds no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        # The library reads older forms of the file, such as merges as text, and writes its own form.
        parts = json.loads(Tokenizer.from_str(file.read_text(encoding="utf-8")).to_str())
    except BaseException as error:
        raise_unless_of_library(error)
        return None
    return json.dumps({name: part for name, part in parts.items() if name not in _NOT_OF_TOKENS}, sort_keys=True)
