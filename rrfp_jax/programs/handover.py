"""Which arrays of one microbatch pass from program to program of a chunk, and who holds them.

From forward to backward goes the :class:`Stash`. Inputs, batch leaves and outputs in it are the caller's own arrays,
by reference; so are, in what a split backward owes to its weight gradient, the arrays of the stash and the gradients
that came and went. Programs return only what they make, since they would copy anything else.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from rrfp_jax.programs.specs import Specs, gradient_spec, num_bytes
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
"""What the weight gradient of one microbatch needs."""


@dataclass(frozen=True, kw_only=True)
class OwedBytes:
    """Bytes that stay alive between input gradient and weight gradient; the four parts add up to the whole."""

    from_stash: int = 0
    """Of what only the stash held."""
    from_kept: int = 0
    """Inputs, batch leaves and outputs."""
    from_gradients: int = 0
    """Gradients that came from successors, or that go to predecessors, by reference."""
    made: int = 0
    """What the input gradient's program makes for it."""

    @property
    def total(self) -> int:
        return self.from_stash + self.from_kept + self.from_gradients + self.made


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Places of arrays in flat lists; fixed once a chunk has been traced."""

    kept: tuple[int, ...] = ()
    """Leaves of ``(operands, outputs)`` that become ``Stash.kept``."""
    donated: tuple[int, ...] = ()
    """Which of the arrays that the forward makes become ``Stash.donated``."""
    saved: tuple[int, ...] = ()
    """Which of them become ``Stash.saved``."""
    stash: tuple[int, ...] = ()
    """For each array of the split's stash its place in ``(*donated, *saved, *kept)``."""
    sums: tuple[int, ...] = ()
    """Leaves of the sum of several successors' gradients that the input gradient's program makes for W."""
    owed: tuple[int, ...] = ()
    """Leaves of ``(saved, kept, output_grads, input_grads, made)`` that W gets."""
    stash_specs: Stash = Stash()
    owed_specs: Owed = ()
    owed_bytes: OwedBytes = OwedBytes()


def plan_handover(
    split: SplitBackward, operands: Specs, outputs: Specs, *, num_gradients: int, is_split: bool
) -> Handover:
    """Lay out the stash of a chunk and, for a split backward, what is owed.

    ``num_gradients`` is the number of output gradients that its backward gets, each like ``outputs``.
    """
    num_operands = len(jax.tree.leaves(operands))
    positions = {origin: [p for p, place in enumerate(split.stash_places) if place.origin == origin] for origin in _AT}
    kept_positions = [*positions["input"], *positions["output"]]
    offsets = {"input": 0, "output": num_operands}
    kept = [offsets[split.stash_places[p].origin] + split.stash_places[p].index for p in kept_positions]

    owed_places = split.owed_places if is_split else ()
    needed_later = {place.index for place in owed_places if place.origin == "stash"}
    made_for_owed = [s for s, place in zip(split.owed_specs, owed_places, strict=True) if place.origin == "made"] if is_split else []
    results = [*split.input_gradient_specs, *made_for_owed]
    donated, saved = _donatable(split.stash_specs, positions["made"], needed_later, results)
    order = [*donated, *saved, *kept_positions]
    base = Handover(
        kept=tuple(kept),
        donated=tuple(split.stash_places[p].index for p in donated),
        saved=tuple(split.stash_places[p].index for p in saved),
        stash=tuple(order.index(position) for position in range(len(order))),
    )
    return base
