"""Token sets of random documents, for tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rrfp_jax.data.tokens import (
    BYTE_TOKENIZER,
    HEADER,
    FileDigest,
    TokenSet,
    TokenSetHeader,
    _header_bytes,
    write_token_set,
)

VOCAB = 90


def token_set(path: Path, lengths: Sequence[int], seed: int = 0) -> TokenSet:
    """Documents of so many tokens from 1 to 89, each closed by 0."""
    rng = np.random.default_rng(seed)
    write_token_set(path, [rng.integers(1, VOCAB, size=length) for length in lengths], vocab_size=VOCAB)
    return TokenSet(path)


def sparse_set(path: Path, num_tokens: int, num_documents: int) -> None:
    """Equally long documents of zeros that take no room on the disk; the digests are none."""
    path.mkdir()
    with (path / "tokens.bin").open("wb") as file:
        file.truncate(2 * num_tokens)
    ends = np.arange(1, num_documents + 1, dtype="<u8") * (num_tokens // num_documents)
    ends.tofile(path / "documents.bin")
    header = TokenSetHeader(
        dtype="uint16",
        num_tokens=num_tokens,
        num_documents=num_documents,
        vocab_size=256,
        end_of_document=0,
        tokenizer=BYTE_TOKENIZER,
        tokens=FileDigest(2 * num_tokens, "0" * 64),
        documents=FileDigest(8 * num_documents, "0" * 64),
        sources=None,
        text_column=None,
    )
    (path / HEADER).write_bytes(_header_bytes(header))
