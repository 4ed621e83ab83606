"""Bytes of text in fixed windows, shuffled anew every epoch, any step's batch computed from its number.

The text comes from one file, or from the files of a folder in the order of their relative paths, so that the same
folder gives the same text on every machine; every file is followed by one zero byte, the end of a document. The text is
cut into windows of ``length`` tokens, one after the other; an epoch visits every window once, in an order that depends
on (seed, epoch) alone (:mod:`rrfp_jax.data.sample_order`).
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Never

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data._files import check_inside
from rrfp_jax.data.dataset import Batch, Reads
from rrfp_jax.data.held_out import A_FRACTION, HELD_OUT, TRAIN, Part, num_trained, refuse_nothing_held_out
from rrfp_jax.data.sample_order import comes_again, items_of
from rrfp_jax.data.token_kind import BYTE_TOKENS
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, check_fields

VOCAB_SIZE = 256
"""Number of different tokens: one per byte value."""


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """A byte-level text data set.

    Raises ValueError, with the remedy, for values that do not describe one.
    """

    path: str | None = None
    """A text file, or a folder that is searched recursively. None: the running Python's own standard library."""
    suffixes: tuple[str, ...] = (".py", ".txt", ".md", ".rst")
    """Endings of the files that are read from a folder."""
    max_bytes: int = 64 * 2**20
    """How much text is read at most, in bytes: the files in order of their names, the last one in part."""
    length: int
    """Tokens per sequence; a token is a byte."""
    batch_size: int
    """Sequences per step, over all microbatches."""
    num_microbatches: int
    """Equal parts into which a step's sequences are cut; divides ``batch_size``."""
    held_out: float = 0.0
    """Fraction of the text, at its end, that is never trained on but kept for evaluation."""
    seed: int = 0
    """Decides the order of the sequences."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "max_bytes", "length", "batch_size", "num_microbatches")
        check_fields(self, NOT_NEGATIVE, "seed")
        check_fields(self, A_FRACTION, "held_out")
        if not self.suffixes:
            raise ValueError("suffixes is empty, so no file would be read: give at least one, for example '.txt'")
        if self.batch_size % self.num_microbatches:
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            larger = self.batch_size + -self.batch_size % self.num_microbatches
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {self.num_microbatches} microbatches: "
                f"give num_microbatches out of {divisors}, or batch_size {larger}"
            )

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        return self.batch_size // self.num_microbatches


class TextBytes:
    """A deterministic data set of byte sequences; see the module's text for the order.

    Args:
        part: the windows that are trained on, or those that are held out.

    Attributes: ``config``; ``num_bytes`` of text that was read; ``num_windows`` of the part (sequences per epoch);
    ``vocab_size``.
    Raises ValueError, with the remedy, when the text cannot be read, or does not fill one batch to train on, or a
    window that is held out.
    """

    vocab_size = VOCAB_SIZE
    bytes_per_token = 1.0
    token_kind = BYTE_TOKENS
    counts_once = False
    """Whether a window that has come in an earlier place has no weight, as in evaluations."""

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

    buckets = None
    """All microbatches are of one shape."""

    def batch(self, step: int, reads: Reads | None = None) -> Batch:  # noqa: ARG002 - all is in memory anyway
        """The batch of ``step`` (0, 1, ...): ``tokens``, ``targets`` (int32) and ``weights`` (float32).

        Each is ``[num_microbatches, microbatch_size, length]``, whatever is read of it. Safe to call from any thread.
        """
        length, seed = self.config.length, self.config.seed
        items = items_of(step, batch_size=self.config.batch_size, num=self.num_windows, seed=seed)
        starts = self._first + items * length
        leaves = _token_leaves(self._text[starts[:, None] + np.arange(length + 1)], self.config.num_microbatches)
        if self.counts_once:
            leaves["weights"].reshape(len(items), length)[comes_again(step, len(items), self.num_windows)] = 0
        return leaves


def _token_leaves(windows: NDArray[np.uint8], num_microbatches: int) -> Batch:
    """Next-token prediction on ``windows``, uint8 ``[sequences, length + 1]``.

    Returns ``tokens`` and ``targets``, int32, and ``weights``, float32 ones, each ``[num_microbatches, sequences /
    num_microbatches, length]``; the target of a position is the token after it.
    """
    sequences, length = windows.shape[0], windows.shape[1] - 1
    shape = (num_microbatches, sequences // num_microbatches, length)
    return {
        "tokens": windows[:, :-1].astype(np.int32).reshape(shape),
        "targets": windows[:, 1:].astype(np.int32).reshape(shape),
        "weights": np.ones(shape, np.float32),
    }


_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
"""Folders below the standard library that hold its tests or packages installed beside it."""


def read_corpus(path: str | None, *, suffixes: tuple[str, ...], max_bytes: int) -> NDArray[np.uint8]:
    """Read at most ``max_bytes`` bytes of text, uint8 ``[num_bytes]``; arguments as in ``TextConfig``.

    Raises ValueError, with the remedy, when there is nothing to read or a file cannot be read.
    """
    parts: list[bytes] = []
    num_bytes = 0
    for file in corpus_files(path, suffixes):
        part = _read(file, max_bytes - num_bytes) + b"\0"
        parts.append(part)
        num_bytes += len(part)
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
    skipped = _NOT_LIBRARY if path is None else frozenset()
    files = [file for file in _walk(root, skipped) if file.name.endswith(suffixes) and file.is_file()]
    for file in files if path is not None else ():
        if file.is_symlink():
            check_inside(file, root)
    if not files:
        raise ValueError(
            f"data folder {root} holds no file ending in {', '.join(suffixes)}: give another folder or other suffixes"
        )
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        yield from (Path(folder, name) for name in names)


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(min(max_bytes, os.fstat(stream.fileno()).st_size))
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> Never:
    raise ValueError(
        f"cannot read {error.filename} ({error.strerror}): make it readable, or move it out of the data folder"
    ) from error
