"""Which layers of a model never change, chosen by patterns of their names.

A chunk none of whose layers change runs its forward, and a backward only if a chunk before it trains; then that passes
the gradient through and does nothing else. In a chunk of which some layers change, the work for the gradients of the
others is left out: what stands before the first layer that changes has no backward, unless the chunk sends a gradient
on. Frozen layers have neither accumulators nor optimizer state.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast

import jax

from rrfp_jax.field_rules import with_type
from rrfp_jax.programs.chunk import Chunk, check_chunks, param_specs, trained_specs


def freeze(chunks: Sequence[Chunk], patterns: Sequence[str]) -> list[Chunk]:
    """The chunks with the layers frozen that some pattern names, beside those that are frozen already.

    A pattern is a layer's name (``projector``), the beginning of a name up to a dot (``vision`` for ``vision.patches``
    and ``vision.layers.3``), or a glob as :mod:`fnmatch` has it (``decoder.layers.[0-7]``, ``*norm``), in which ``*``
    matches dots too.

    Raises ValueError, in one sentence with the remedy, for a pattern that matches no layer, and where nothing would be
    left to train.
    """
    chunks, named = check_chunks(chunks), cast(Any, patterns)
    given = list(named) if isinstance(named, Iterable) else [named]
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(f"the layers to freeze are given as {with_type(patterns)}: give a list of patterns")
    layers = [tuple(param_specs(chunk)) for chunk in chunks]
    names = list(dict.fromkeys(name for own in layers for name in own))
    for pattern in given:
        if not any(matches(pattern, name) for name in names):
            raise ValueError(f"no layer matches {pattern!r}, which is to be frozen: {_nearest(pattern, names)}")
    frozen = [
        replace(chunk, frozen=chunk.frozen.union(name for name in own if any(matches(p, name) for p in given)))
        for chunk, own in zip(chunks, layers, strict=True)
    ]
    if any(chunk.frozen for chunk in frozen):
        check_some_train(frozen)
    return frozen


def check_some_train(chunks: Sequence[Chunk]) -> None:
    """Raise ValueError for chunks all of whose layers are frozen."""
    if all(is_frozen(chunk) for chunk in chunks):
        raise ValueError("every layer of the model is frozen, and nothing is left to train: freeze fewer layers")


def is_frozen(chunk: Chunk) -> bool:
    """Whether none of the chunk's parameters change; so it is with a chunk that has none."""
    return not jax.tree.leaves(trained_specs(chunk))


def matches(pattern: str, name: str) -> bool:
    """Whether a layer of this name is one that the pattern stands for."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """What a pattern may have been meant to be: the layer, or the beginning of names, that is most like it."""
    parts = [name.split(".") for name in names]
    choices = dict.fromkeys(".".join(part[:end]) for part in parts for end in range(1, len(part) + 1))
    nearest = difflib.get_close_matches(pattern, choices, n=1, cutoff=0.0)
    return f"the nearest is {nearest[0]!r}" if nearest else "the model has no layers"
