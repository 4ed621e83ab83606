"""How texts become tokens, as a user says it."""

from dataclasses import dataclass

from rrfp_jax.data.tokenizing.sources import TEXT_SUFFIXES
from rrfp_jax.field_rules import AT_LEAST_1, check_fields

TRAIN, PLAIN_BYTES = "train", "bytes"
"""Instead of a file: a tokenizer that is made of the texts, and none."""
_VOCAB_SIZE = 8192
_LEAST_VOCAB_SIZE = 257
"""All bytes, and the end of a document."""


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """How texts become tokens; raises ValueError, with the remedy, for options that do not fit each other."""

    tokenizer: str = PLAIN_BYTES
    """A tokenizer.json or a folder that has one; ``train`` makes a byte-level BPE of the texts; ``bytes``: none."""
    vocab_size: int | None = None
    """Tokens of a tokenizer that is made of the texts. None: 8192."""
    end_of_document: str | None = None
    """The token of the tokenizer's file that closes documents. None: what its folder's tokenizer_config.json says, or
    a usual one."""
    column: str = "text"
    """The field of JSON lines and Parquet rows that holds the text."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """Endings of files of plain text."""
    reads_special: bool = False
    """Whether what looks like a special token in a text is one."""
    train_bytes: int = 512 * 2**20
    """Of how much text a tokenizer is made at most, spread evenly over all, in bytes."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "train_bytes")
        if not self.suffixes:
            raise ValueError("suffixes is empty: give at least one, for example .txt")
        if self.tokenizer != TRAIN and self.vocab_size is not None:
            raise ValueError("vocab_size is that of a tokenizer that is made: leave it out, or take tokenizer train")
        if self.vocab_size is not None and self.vocab_size < _LEAST_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size is {self.vocab_size}: give at least {_LEAST_VOCAB_SIZE}, all bytes and one more"
            )
        if self.tokenizer in (TRAIN, PLAIN_BYTES):
            if self.end_of_document is not None:
                raise ValueError(f"end_of_document is a token of a file: leave it out with tokenizer {self.tokenizer}")
            if self.reads_special:
                raise ValueError(f"tokenizer {self.tokenizer} reads no special tokens: name a tokenizer's file")

    @property
    def trained_vocab_size(self) -> int:
        """Tokens of a tokenizer that is made."""
        return self.vocab_size or _VOCAB_SIZE
