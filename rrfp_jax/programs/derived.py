"""What costs work and depends on a chunk's parameters alone, computed once per update for the programs of all buckets.

Weights cast to bfloat16 are an example. Each bucket's programs take the values that they were traced with; a value that
several of them need is the same if it is computed in the same way, and is then derived once.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.programs.chunk_plan import ChunkPlan
from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.shardings import spread
from rrfp_jax.programs.specs import Specs


class DerivedValues:
    """The program that derives them, where there are any.

    Args:
        plans: of the chunk, one for each set of programs.
        params: the shapes of parameters, with their shardings, by the names that the plans know.
        chosen: where the values lie; None lets the compiler choose.
    """

    def __init__(self, plans: Sequence[ChunkPlan], params: Specs, chosen: Sharding | None) -> None:
        self.places, mentions = _united(plans)
        """For each plan the values that it takes, by their place among all."""
        self.specs: tuple[Specs, ...] = ()
        """The shapes of all values, with shardings."""
        self.program: Compiled | None = None
        """Takes the parameters."""
        if not mentions:
            return

        def prepare(params: Any) -> tuple[Any, ...]:
            values = [plan.prepare(params) for plan in plans]
            return tuple(values[plan][place] for plan, place in mentions)

        at_params = jax.tree.map(lambda spec: spec.sharding, params)
        self.program = compile_program("prepare", prepare, params, in_shardings=(at_params,), out_shardings=chosen)
        specs = jax.eval_shape(prepare, spread(params, None))
        self.specs = spread(specs, self.program.output_shardings)


def _united(plans: Sequence[ChunkPlan]) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """For each plan the places of its values among all, and of each of all a plan that has it, with its place there."""
    if len(plans) == 1:
        own = range(plans[0].num_derived)
        return [tuple(own)], [(0, place) for place in own]
    places: dict[Hashable, int] = {}
    mentions: list[tuple[int, int]] = []
    taken = []
    for number, plan in enumerate(plans):
        for place, derivation in enumerate(plan.derivations):
            if places.setdefault(derivation, len(mentions)) == len(mentions):
                mentions.append((number, place))
        taken.append(tuple(places[derivation] for derivation in plan.derivations))
    return taken, mentions
