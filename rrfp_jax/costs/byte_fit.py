"""The bytes of layers, from differences between chunks of one type of layers, and never less than was seen.

Most bytes of a chunk are the sum of its layers'. Two things are not. A chunk that computes its forward again keeps
its input, once, however many layers follow. And programs reuse room from layer to layer, so that temporaries are some
bytes and some more for each layer.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

_HALVES = {"input_gradient", "weight_gradient"}


@dataclass(frozen=True, kw_only=True)
class ChunkParts:
    """The bytes of a chunk of layers of one type."""

    layer: str
    """The type of the layers."""
    count: int
    fixed: int
    """Parameters, accumulators, optimizer state and the like."""
    gradient: int
    stash: int
    """Per microbatch from F to B or I, inputs that are kept included."""
    kept_inputs: int
    """The inputs among these."""
    owed: int
    """Per microbatch from I to W; 0 where the backward is whole."""
    outputs: int
    temporaries: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each program while it runs."""


def fit_bytes(chunks: Sequence[ChunkParts]) -> dict[str, dict[str, int]]:
    """Returns for each type the fields of :class:`rrfp_jax.costs.LayerCosts` that are bytes."""
    alike: dict[tuple[str, int], list[ChunkParts]] = {}
    for chunk in chunks:
        alike.setdefault((chunk.layer, chunk.count), []).append(chunk)
    by_type: dict[str, list[ChunkParts]] = {}
    for (name, _), some in alike.items():
        by_type.setdefault(name, []).append(_merged(some))
    stashes = {name: _stash(some) for name, some in by_type.items()}
    keeps_input = any(kept for _, kept in stashes.values())
    return {
        name: {
            "fixed_bytes": _most(some, "fixed"),
            "gradient_bytes": _most(some, "gradient"),
            "owed_bytes": _most(some, "owed"),
            "output_bytes": max(each.outputs for each in some),
            **_stash_fields(some, *stashes[name], keeps_input=keeps_input),
            **_temporaries(some),
        }
        for name, some in by_type.items()
    }


def _merged(some: Sequence[ChunkParts]) -> ChunkParts:
    """Returns the most bytes of every part that were seen, with split and with whole backwards."""
    sizes = {each.name: max(getattr(one, each.name) for one in some) for each in fields(ChunkParts) if each.type is int}
    names = dict.fromkeys(name for one in some for name in one.temporaries)
    temporaries = {name: max(one.temporaries.get(name, 0) for one in some) for name in names}
    return ChunkParts(layer=some[0].layer, temporaries=temporaries, **sizes)


def _most(some: Sequence[ChunkParts], part: str) -> int:
    """Returns a layer's share of a part in which layers add up, rounded up; it has a share of the bytes that a chunk
    has once."""
    return max(-(-int(getattr(each, part)) // each.count) for each in some)


def _ends(some: Sequence[ChunkParts]) -> tuple[ChunkParts, ChunkParts]:
    ordered = sorted(some, key=lambda each: each.count)
    return ordered[0], ordered[-1]


def _stash(some: Sequence[ChunkParts]) -> tuple[int, int]:
    """Returns the stash of a layer, and of a chunk beside its layers."""
    few, many = _ends(some)
    if few.count == many.count:
        return _most(some, "stash"), 0
    more = max(0, -(-(many.stash - few.stash) // (many.count - few.count)))
    return more, max([0, *(each.stash - each.count * more for each in some)])


def _stash_fields(some: Sequence[ChunkParts], stash: int, kept: int, *, keeps_input: bool) -> dict[str, int]:
    """Returns the fields of the stash. Where chunks of other types keep their input once, one of a single layer does so
    too."""
    few, many = _ends(some)
    if keeps_input and few.count == many.count:
        kept = max(each.kept_inputs for each in some)
        stash = max(0, stash - kept // few.count)
    return {"stash_bytes": stash, "kept_bytes": kept}


def _temporaries(some: Sequence[ChunkParts]) -> dict[str, int]:
    """Returns the temporaries of the largest program, and those that each layer adds, with whole and with split
    backwards; an upper bound of every program."""
    names = {name for each in some for name in each.temporaries}
    whole, split = names - _HALVES if "backward" in names else names, names - {"backward"}
    more, split_more = _grown(some, whole), _grown(some, split)
    base = max(_base(some, whole, more), _base(some, split, split_more))
    found = {"temporaries_bytes": base, "more_temporaries_bytes": more}
    return found if split_more == more else found | {"split_temporaries_bytes": split_more}


def _grown(some: Sequence[ChunkParts], names: Collection[str]) -> int:
    """Returns the bytes that these programs need more for each layer."""
    few, many = _ends(some)
    if few.count == many.count:
        return 0
    grown = [many.temporaries.get(name, 0) - few.temporaries.get(name, 0) for name in names]
    return max([0, *(-(-each // (many.count - few.count)) for each in grown)])


def _base(some: Sequence[ChunkParts], names: Collection[str], more: int) -> int:
    return max([0, *(each.temporaries.get(name, 0) - each.count * more for each in some for name in names)])
