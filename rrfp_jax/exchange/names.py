"""Which tensors of theirs are which array of ours, as a family's table says.

A table goes from the dotted way to an array of ours to the name of their tensor. ``N`` stands for the number of a layer
and ``E`` for that of an expert, on both sides::

    "layers.N.attention.query.kernel": (TURNED, "model.layers.N.self_attn.q_proj.weight")
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from rrfp_jax.exchange.transforms import Shape, Transform

Table = Mapping[str, tuple[Transform, str]]
"""From our way to the transform and their name."""
_NUMBER = re.compile(r"(?<=\blayers\.)\d+")


class Match(NamedTuple):
    """An array of ours, and what it is there."""

    ours: tuple[str, ...]
    """The layer, then the way inside it."""
    shape: Shape
    transform: Transform
    theirs: tuple[str, ...]
    """Names of tensors: one, or one for each expert."""

    @property
    def their_shapes(self) -> list[Shape]:
        """In the order of the names."""
        return self.transform.their_shapes(self.shape)


def matches(table: Table, shapes: Mapping[tuple[str, ...], Shape]) -> list[Match]:
    """Every array of a model with its tensors, in the order of ``shapes``, whose keys begin with the layer.

    Raises ValueError for an array that the family has no tensor for.
    """
    return [_match(table, ours, shape) for ours, shape in shapes.items()]


def prefixed(table: Table, ours: str, theirs: str) -> dict[str, tuple[Transform, str]]:
    """A table for a model that is part of a larger one, whose names begin with these."""
    return {ours + way: (transform, theirs + name) for way, (transform, name) in table.items()}


def older(name: str, newer: Iterable[tuple[str, str]]) -> str:
    """The name that a tensor has in the older order; ``newer`` goes from the beginning of newer names to the older."""
    for beginning, instead in newer:
        if name.startswith(beginning):
            return instead + name.removeprefix(beginning)
    return name


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, in which ``*`` stands for anything, is that of a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _match(table: Table, ours: tuple[str, ...], shape: Shape) -> Match:
    way = ".".join(ours)
    number = _NUMBER.search(way)
    rule = table.get(_NUMBER.sub("N", way))
    if rule is None:
        raise ValueError(f"{'/'.join(ours)} has no place in this family: export the model in another one")
    transform, pattern = rule
    name = pattern if number is None else pattern.replace(".N.", f".{number[0]}.")
    count = len(transform.their_shapes(shape))
    names = tuple(name.replace(".E.", f".{expert}.") for expert in range(count)) if ".E." in name else (name,)
    return Match(ours, shape, transform, names)
