"""What layers do, from what the programs of chunks of one type of layers do: by differences.

A chunk's operations and bytes are the sum of its layers', and some more that are there once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("F", "I", "W", "B", "U")
"""Tasks of a microbatch, B being the whole backward; and U, with R, once per step."""


class Work(NamedTuple):
    """On one device."""

    flops: float = 0.0
    moved_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """What the tasks of a chunk of layers of one type do."""

    layer: str
    count: int
    work: Mapping[str, Work] = field(default_factory=dict)
    """By kind; kinds that run no program are missing."""


def fit_work(chunks: Sequence[ChunkWork]) -> dict[str, dict[str, Work]]:
    """By type and kind what a layer does; a type with one number of layers gets what its chunk has once, too."""
    by_type: dict[str, list[ChunkWork]] = {}
    for chunk in chunks:
        by_type.setdefault(chunk.layer, []).append(chunk)
    return {name: {kind: _layer(some, kind) for kind in KINDS} for name, some in by_type.items()}


def _layer(some: Sequence[ChunkWork], kind: str) -> Work:
    seen = sorted((chunk.count, chunk.work[kind]) for chunk in some if kind in chunk.work)
    if not seen:
        return Work()
    (few, least), (many, most) = seen[0], seen[-1]
    if few == many:
        return Work(*(max(values) / few for values in zip(least, most, strict=True)))
    return Work(*(max(0.0, (b - a) / (many - few)) for a, b in zip(least, most, strict=True)))
