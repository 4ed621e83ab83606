"""What there is to tokenise: every source read once for its digest, and all of them cut into pieces of some megabytes.

Where pieces begin depends on the sources alone, and the tokens of a token set do not depend on the pieces: they only
say what one process does at a time, and what is kept when all are killed.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rrfp_jax.data.tokenizing.cutting import SEGMENT_BYTES
from rrfp_jax.data.tokenizing.documents import Span
from rrfp_jax.data.tokenizing.rows import count_rows
from rrfp_jax.data.tokenizing.sources import ROWS, Source
from rrfp_jax.data.tokenizing.streams import decompressed_blocks, unreadable
from rrfp_jax.data.tokens.header import FileDigest

PIECE_BYTES = 4 * SEGMENT_BYTES
_MOST_ROWS = 1 << 14
"""Of a piece; a column that repeats itself is larger than its file says."""

Told = Callable[[int], None]
"""Is told of so many more bytes that were read."""


class Surveyed(NamedTuple):
    """A source, and what was found in it."""

    source: Source
    digest: FileDigest
    length: int
    """Bytes of text, decompressed, or rows."""
    num_bytes: int
    """About how much text it has."""
    stamp: tuple[int, int]
    """That of the file before it was read."""


class Piece(NamedTuple):
    """What one process tokenises at a time: spans of one or more sources."""

    spans: tuple[Span, ...]
    numbers: tuple[int, ...]
    """Those of the sources that the spans are of."""
    num_bytes: int
    """About how much text it has."""
    key: str
    """What it holds, in a few characters: equal keys are equal texts."""


class Corpus(NamedTuple):
    """All that there is to tokenise."""

    surveyed: list[Surveyed]
    pieces: list[Piece]


def survey(sources: Sequence[Source], column: str, num_threads: int, told: Told) -> list[Surveyed]:
    """Read all sources; raises ValueError, with the remedy, for the first that cannot be read or has no such column."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="survey") as executor:
        results = executor.map(lambda source: _survey(source, column, told), sources)
        try:
            return list(results)
        except BaseException:
            executor.shutdown(wait=True, cancel_futures=True)
            raise


def _survey(source: Source, column: str, told: Told) -> Surveyed:
    stamp = stamp_of(source.path)
    digest = _digest(source.path, told)
    length = num_bytes = digest.num_bytes
    if source.kind == ROWS:
        length, num_bytes = count_rows(source.path, column)
    elif source.compression is not None:
        length = num_bytes = sum(map(len, decompressed_blocks(source.path, source.compression)))
    return Surveyed(source, digest, length, num_bytes, stamp)


def stamp_of(path: str) -> tuple[int, int]:
    """Size and time of change of a file."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return status.st_size, status.st_mtime_ns


def _digest(path: str, told: Told) -> FileDigest:
    try:
        return FileDigest.of_file(Path(path), told)
    except OSError as error:
        raise unreadable(path, error) from error


def cut_into_pieces(surveyed: Sequence[Surveyed]) -> list[Piece]:
    """All that the sources hold, in order; small sources share a piece."""
    pieces: list[Piece] = []
    waiting: list[tuple[Span, int, int]] = []
    num_waiting_bytes = 0
    for number, each in enumerate(surveyed):
        for span, num_bytes in _spans(each):
            if waiting and num_waiting_bytes + num_bytes > PIECE_BYTES:
                pieces.append(_piece(waiting, surveyed))
                waiting, num_waiting_bytes = [], 0
            waiting.append((span, number, num_bytes))
            num_waiting_bytes += num_bytes
    return [*pieces, _piece(waiting, surveyed)] if waiting else pieces


def _spans(surveyed: Surveyed) -> Iterator[tuple[Span, int]]:
    """The spans of a source, and about how many bytes of text each has."""
    source, _, length, num_bytes, _ = surveyed
    size = PIECE_BYTES
    if source.kind == ROWS:
        size = max(1, min(_MOST_ROWS, PIECE_BYTES * length // max(num_bytes, 1)))
    for start in range(0, max(length, 1), size):
        stop = min(start + size, length)
        yield Span(source, start, stop, length), num_bytes * (stop - start) // max(length, 1)


def _piece(spans: Sequence[tuple[Span, int, int]], surveyed: Sequence[Surveyed]) -> Piece:
    told = [
        (surveyed[number].digest.sha256, span.source.kind, span.source.compression, span.start, span.stop)
        for span, number, _ in spans
    ]
    key = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]
    every_span, numbers, sizes = zip(*spans, strict=True)
    return Piece(every_span, numbers, sum(sizes), key)
