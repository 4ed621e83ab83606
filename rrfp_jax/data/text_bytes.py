"""Bytes of text in fixed windows, shuffled anew every epoch, any step's batch computed from its number.

The text comes from one file, or from the files of a folder in the order of their relative paths, so that the same
folder gives the same text on every machine; every file is followed by one zero byte, the end of a document. The text is
cut into windows of ``length`` tokens, one after the other; an epoch visits every window once, in an order that depends
on (seed, epoch) alone (:mod:`rrfp_jax.data.sample_order`).
"""

import hashlib
import os
import sysconfig
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data._sources import check_inside, paths_below, refuse_unreadable
from rrfp_jax.data.config import TextConfig
from rrfp_jax.data.dataset import Batch, Reads
from rrfp_jax.data.sample_order import (
    HELD_OUT,
    TRAIN,
    Part,
    items_of,
    num_trained,
    places_of_step,
    refuse_nothing_held_out,
)
from rrfp_jax.data.tokenizer_files import BYTE_TOKENS

VOCAB_SIZE = 256
"""Number of different tokens: one per byte value."""
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
"""Folders below the standard library that hold its tests or packages installed beside it."""


class TextBytes:
    """A deterministic data set of byte sequences; see the module's text for the order.

    Args:
        part: the windows that are trained on, or those that are held out.

    Attributes: ``config``; ``num_bytes`` of text that was read; ``num_windows`` of the part (sequences per epoch);
    ``vocab_size``; ``counts_once``, whether a window that has come in an earlier place has no weight, as in
    evaluations; ``buckets``, None, since all microbatches have one shape.
    Raises ValueError, with the remedy, when the text cannot be read, or does not fill one batch to train on, or a
    window that is held out.
    """

    vocab_size = VOCAB_SIZE
    bytes_per_token = 1.0
    token_kind = BYTE_TOKENS
    counts_once = False
    buckets = None

    def __init__(self, config: TextConfig, part: Part = TRAIN) -> None:
        refuse_nothing_held_out(part, config.held_out)
        self.config = config
        self._text = read_corpus(config.path, suffixes=config.suffixes, max_bytes=config.max_bytes)
        self.num_bytes = len(self._text)
        # The last token of the last window still needs a target.
        num_windows = max(0, self.num_bytes - 1) // config.length
        self.num_windows = num_trained(num_windows, config.held_out)
        self._first = 0
        if part == HELD_OUT:
            # The byte before is the target of the last window that is trained on.
            self._first = self.num_windows * config.length + 1
            self.num_windows = max(0, self.num_bytes - self._first - 1) // config.length
            if not self.num_windows:
                raise ValueError(
                    f"{self.num_bytes} bytes of text with held_out {config.held_out} hold back not one sequence of "
                    f"length {config.length}: give more text, a larger held_out, or a smaller length"
                )
        elif self.num_windows < config.batch_size:
            raise ValueError(
                f"{self.num_bytes} bytes of text hold {self.num_windows} sequences of length {config.length} to train "
                f"on, fewer than batch_size {config.batch_size}: give at least {config.batch_size * config.length + 1} "
                "bytes of text (more files, a larger max_bytes), or a smaller length or batch_size"
            )

    @cached_property
    def fingerprint(self) -> str:
        """The text in a few words, the same wherever the text is: its size and a digest."""
        return f"{self.num_bytes} bytes, SHA-256 {hashlib.sha256(self._text.data).hexdigest()[:16]}"

    def batch(self, step: int, reads: Reads | None = None) -> Batch:  # noqa: ARG002 - all is in memory anyway
        """Returns the batch of ``step`` (0, 1, ...): ``tokens``, ``targets`` (int32) and ``weights`` (float32).

        Each is ``[num_microbatches, microbatch_size, length]``, whatever is read of it. Safe to call from any thread.
        """
        config = self.config
        items = items_of(step, batch_size=config.batch_size, num=self.num_windows, seed=config.seed)
        starts = self._first + items * config.length
        windows = self._text[starts[:, None] + np.arange(config.length + 1)]
        weights = np.ones((config.batch_size, config.length), np.float32)
        if self.counts_once:
            weights[places_of_step(step, config.batch_size) >= self.num_windows] = 0
        # The target of a position is the token after it.
        leaves = {
            "tokens": windows[:, :-1].astype(np.int32),
            "targets": windows[:, 1:].astype(np.int32),
            "weights": weights,
        }
        shape = (config.num_microbatches, config.microbatch_size, config.length)
        return {name: leaf.reshape(shape) for name, leaf in leaves.items()}


def read_corpus(path: str | None, *, suffixes: tuple[str, ...], max_bytes: int) -> NDArray[np.uint8]:
    """Returns at most ``max_bytes`` bytes of text, uint8 ``[num_bytes]``; arguments as in ``TextConfig``.

    Raises ValueError, with the remedy, when there is nothing to read or a file cannot be read.
    """
    parts: list[bytes] = []
    num_bytes = 0
    for file in corpus_files(path, suffixes):
        try:
            with file.open("rb") as stream:
                # A read of a given size takes that much memory, so it is never more than the file has.
                parts.append(stream.read(min(max_bytes - num_bytes, os.fstat(stream.fileno()).st_size)) + b"\0")
        except OSError as error:
            refuse_unreadable(error)
        num_bytes += len(parts[-1])
        if num_bytes >= max_bytes:
            break
    return np.frombuffer(b"".join(parts), dtype=np.uint8)[:max_bytes]


def corpus_files(path: str | None, suffixes: tuple[str, ...]) -> list[Path]:
    """Returns the files that make up a corpus, in order.

    A single file is taken whatever its suffix. Hidden folders are skipped, links to folders are not followed. Raises
    ValueError, with the remedy, if there is no file, or if one is a link out of the folder.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else Path(path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(
            f"data folder {root} does not exist: give an existing file or folder, or none for the standard library"
        )
    below = paths_below(root, _NOT_LIBRARY if path is None else frozenset())
    files = [file for file in below if file.name.endswith(suffixes) and file.is_file()]
    for file in files if path is not None else ():
        if file.is_symlink():
            check_inside(file, root)
    if not files:
        raise ValueError(
            f"data folder {root} holds no file ending in {', '.join(suffixes)}: give another folder or other suffixes"
        )
    return files
