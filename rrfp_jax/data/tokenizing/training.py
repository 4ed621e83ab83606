"""A byte-level BPE tokenizer made on the spot, from the texts that it is to tokenise.

The same texts give the same file, whatever the number of threads.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rrfp_jax.data.tokenizing.documents import parts_in
from rrfp_jax.data.tokenizing.options import TokenizeOptions
from rrfp_jax.data.tokenizing.pieces import Piece
from rrfp_jax.data.tokenizing.progress import TRAINING, Counter, Progress
from rrfp_jax.data.tokenizing.tokenizer import threads_of_tokenizers
from rrfp_jax.observe.output_files import replacing

END = "<|endoftext|>"
"""The token that closes documents, and the only special one."""


def kept_tokenizer(pieces: Sequence[Piece], options: TokenizeOptions, folder: Path, tell: Progress) -> bytes:
    """tokenizer.json made of these pieces, or the one that was made of them before and is kept in ``folder``."""
    keys = [piece.key for piece in _chosen(pieces, options.train_bytes)]
    made_of = json.dumps([keys, options.column, options.trained_vocab_size]).encode()
    kept = folder / f"tokenizer-{hashlib.sha256(made_of).hexdigest()[:32]}.json"
    if not kept.exists():
        with replacing(kept) as temporary:
            temporary.write_bytes(train_tokenizer(pieces, options, tell))
    return kept.read_bytes()


def train_tokenizer(pieces: Sequence[Piece], options: TokenizeOptions, tell: Progress) -> bytes:
    """tokenizer.json of a byte-level BPE made of pieces spread evenly over all, of at most the size that is asked for;
    it has fewer tokens where the texts do not give as many."""
    chosen = _chosen(pieces, options.train_bytes)
    counter = Counter(tell, TRAINING, sum(piece.num_bytes for piece in chosen))
    with threads_of_tokenizers(True):
        return _train(_texts(chosen, options.column, counter.add), options.trained_vocab_size)


def _chosen(pieces: Sequence[Piece], num_bytes: int) -> list[Piece]:
    """Of about so many bytes of text; at least one."""
    total = sum(piece.num_bytes for piece in pieces)
    num = max(1, min(len(pieces), len(pieces) * num_bytes // max(total, 1)))
    return [pieces[number * len(pieces) // num] for number in range(num)]


def _train(texts: Iterator[str], vocab_size: int) -> bytes:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode()


def _texts(pieces: Sequence[Piece], column: str, told: Callable[[int], None]) -> Iterator[str]:
    for piece in pieces:
        for span in piece.spans:
            yield from (part.text for part in parts_in(span, column) if part.text)
        told(piece.num_bytes)
