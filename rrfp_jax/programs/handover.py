"""Which arrays of one microbatch pass from program to program of a chunk, and who holds them.

From forward to backward goes the :class:`Stash`. Inputs, batch leaves and outputs in it are the caller's own arrays, by
reference. So are, in what a split backward owes to its weight gradient, the arrays of the stash and the gradients that
come and go. Programs return only what they make, since they would copy anything else.

Layouts are places in flat lists, fixed once the chunk has been traced.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from rrfp_jax.programs.shardings import passing
from rrfp_jax.programs.specs import Specs, num_bytes
from rrfp_jax.programs.split import SplitBackward


class Stash(NamedTuple):
    """What the backward of one microbatch needs. Handed to one backward, once: it takes over ``donated``."""

    donated: tuple[Any, ...] = ()
    """Values whose memory the results of the backward take over."""
    saved: tuple[Any, ...] = ()
    """The other values that only this stash holds."""
    kept: tuple[Any, ...] = ()
    """Inputs, batch leaves and outputs that the backward reads again; others may hold them too."""


Owed = tuple[Any, ...]
"""What the weight gradient of one microbatch needs, after its input gradient."""


@dataclass(frozen=True, kw_only=True)
class OwedBytes:
    """Bytes of what is owed between input gradient and weight gradient, by who holds it."""

    stash: int = 0
    """Of what only the stash held."""
    kept: int = 0
    """Inputs, batch leaves and outputs that the stash kept alive."""
    gradients: int = 0
    """Gradients as they came from a successor or go to a predecessor."""
    made: int = 0
    """What the input gradient's program makes for it."""

    @property
    def total(self) -> int:
        return self.stash + self.kept + self.gradients + self.made


@dataclass(frozen=True, kw_only=True)
class StashLayout:
    """How a stash is put together and taken apart."""

    kept: tuple[int, ...] = ()
    """Leaves of ``(operands, outputs)`` that become ``Stash.kept``."""
    donated: tuple[int, ...] = ()
    """Which of the arrays that the forward makes become ``Stash.donated``."""
    saved: tuple[int, ...] = ()
    """Which of them become ``Stash.saved``."""
    order: tuple[int, ...] = ()
    """For each array of the split's stash its place in ``(*donated, *saved, *kept)``."""
    specs: Stash = field(default_factory=Stash)
    """Shapes, dtypes and shardings."""

    def arrays(self, donated: Sequence[Any], saved: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        """The stash as the split's functions take it."""
        parts = (*donated, *saved, *kept)
        return [parts[place] for place in self.order]


@dataclass(frozen=True, kw_only=True)
class OwedLayout:
    """How what is owed is put together."""

    sums: tuple[int, ...] = ()
    """Leaves of the sum of several successors' gradients that the input gradient's program makes for W."""
    leaves: tuple[int, ...] = ()
    """Leaves of ``(saved, kept, output_grads, input_grads, made)`` that W gets."""
    specs: Owed = ()
    """Shapes, dtypes and shardings of all that is owed."""
    num_bytes: OwedBytes = field(default_factory=OwedBytes)


def lay_out_stash(
    split: SplitBackward,
    operands: Specs,
    *,
    results: Sequence[Any],
    owed: Collection[int],
    boundary: Sharding | None = None,
    made_shardings: Sequence[Sharding] | None = None,
) -> StashLayout:
    """Lay out the stash of a forward that makes arrays of these shardings (None: at the boundary, as all else lies).

    ``results`` are specs of what the backward returns at the boundary, ``owed`` the arrays of the stash that outlive
    it.
    """
    places = split.stash_places
    made = [p for p, place in enumerate(places) if place.origin == "made"]
    kept = [p for p, place in enumerate(places) if place.origin != "made"]
    shardings = [
        _passing(boundary, spec) if made_shardings is None or place.origin != "made" else made_shardings[place.position]
        for place, spec in zip(places, split.stash_specs, strict=True)
    ]
    specs = [_lying(spec, sharding) for spec, sharding in zip(split.stash_specs, shardings, strict=True)]
    # JAX pairs donated arrays with results of their shape in order, and a backward begins with the last layer: a result
    # that takes over what the first layer still has to read costs a copy of it
    candidates = [p for p in reversed(made) if p not in owed and _passes_so(boundary, specs[p])]
    donated = _donatable(specs, candidates, results)
    saved = [p for p in made if p not in donated]
    order = [*donated, *saved, *kept]
    offsets = {"input": 0, "output": len(jax.tree.leaves(operands))}
    return StashLayout(
        kept=tuple(offsets[places[p].origin] + places[p].position for p in kept),
        donated=tuple(places[p].position for p in donated),
        saved=tuple(places[p].position for p in saved),
        order=tuple(order.index(position) for position in range(len(order))),
        specs=Stash(*(tuple(specs[p] for p in part) for part in (donated, saved, kept))),
    )


def lay_out_owed(
    split: SplitBackward,
    stash: StashLayout,
    output_grads: Specs,
    input_grads: Specs,
    *,
    boundary: Sharding | None = None,
    made_shardings: Sequence[Sharding] | None = None,
) -> OwedLayout:
    """Lay out what an input gradient owes whose program makes arrays of these shardings (None: at the boundary).

    ``output_grads`` has one entry per gradient that the backward gets, ``input_grads`` one per gradient it sends; they
    lie at the boundary.
    """
    num_saved, num_kept = len(stash.specs.saved), len(stash.specs.kept)
    after_grads = num_saved + num_kept + len(jax.tree.leaves(output_grads))
    after_all = after_grads + len(jax.tree.leaves(input_grads))
    sums, made = sums_owed(split, output_grads), made_specs(split, output_grads)

    def leaf(origin: str, index: int) -> tuple[int, str]:
        """The place of an array, and who holds it."""
        if origin == "stash":
            place = stash.order[index] - len(stash.specs.donated)
            return place, "stash" if place < num_saved else "kept"
        if origin == "input gradient":
            return after_grads + index, "gradients"
        if origin == "made":
            return after_all + index, "made"
        if sums:
            return after_all + len(made) - len(sums) + sums.index(index), "made"
        return num_saved + num_kept + index, "gradients"

    leaves = [leaf(*place) for place in split.owed_places]
    at_stash = [spec.sharding for spec in (*stash.specs.saved, *stash.specs.kept)]
    at_made = [_passing(boundary, spec) for spec in made] if made_shardings is None else made_shardings
    at_grads = [_passing(boundary, spec) for spec in jax.tree.leaves((output_grads, input_grads))]
    shardings = [*at_stash, *at_grads, *at_made]
    specs = tuple(_lying(spec, shardings[place]) for spec, (place, _) in zip(split.owed_specs, leaves, strict=True))
    bytes_by_holder: Counter[str] = Counter()
    for (_, holder), spec in zip(leaves, specs, strict=True):
        bytes_by_holder[holder] += num_bytes(spec)
    return OwedLayout(
        sums=sums,
        leaves=tuple(place for place, _ in leaves),
        specs=specs,
        num_bytes=OwedBytes(**bytes_by_holder),
    )


def sums_owed(split: SplitBackward, output_grads: Specs) -> tuple[int, ...]:
    """Which leaves of the output gradient are owed, where that is a sum that nobody holds."""
    if len(output_grads) < 2:
        return ()
    return tuple(place.position for place in split.owed_places if place.origin == "output gradient")


def made_specs(split: SplitBackward, output_grads: Specs) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of what an input gradient's program makes for W."""
    own = [s for s, p in zip(split.owed_specs, split.owed_places, strict=True) if p.origin == "made"]
    return (*own, *(jax.tree.leaves(output_grads[0])[leaf] for leaf in sums_owed(split, output_grads)))


def _lying(spec: jax.ShapeDtypeStruct, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)


def _passing(boundary: Sharding | None, spec: Any) -> Sharding | None:
    return None if boundary is None else passing(boundary, spec)


def _passes_so(boundary: Sharding | None, spec: jax.ShapeDtypeStruct) -> bool:
    """Whether an array lies as one of its shape would that passes between chunks."""
    sharding, wanted = spec.sharding, _passing(boundary, spec)
    if sharding is None or wanted is None:
        return sharding is wanted
    return bool(sharding.is_equivalent_to(wanted, len(spec.shape)))


def _donatable(
    specs: Sequence[jax.ShapeDtypeStruct], candidates: Sequence[int], results: Sequence[jax.ShapeDtypeStruct]
) -> list[int]:
    """The candidates whose memory a result of the same shape can take over.

    Only results that match in shape and dtype can take a buffer over; donating more has no effect but a warning.
    """
    wanted = Counter((spec.shape, spec.dtype) for spec in results)
    donated = []
    for place in candidates:
        kind = (specs[place].shape, specs[place].dtype)
        if wanted[kind] > 0:
            wanted[kind] -= 1
            donated.append(place)
    return donated
