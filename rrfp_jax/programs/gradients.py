"""The programs of a chunk that run microbatches, compiled for one unit: the same for all chunks of a kind there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.programs.chunk_plan import ChunkPlan
from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.shardings import all_passing, gathered, passing
from rrfp_jax.programs.specs import Specs, accumulator_spec, pick

LEAN_FORWARD = "forward_lean"
"""The name of the forward without stash."""


class GradientPrograms:
    """F, B or I and W for one bucket; parameters go by the names that the chunks' function knows.

    A program that would compute nothing is left out: the input gradient of a chunk that sends none, the weight gradient
    of a chunk none of whose parameters train.

    Args:
        plan: of the chunks of the kind.
        params: the shapes of parameters, with their shardings.
        derived: those of what is derived from parameters and the plan takes, likewise.
        boundary: of the unit; see :mod:`rrfp_jax.programs.shardings` for what passes between chunks.
        chosen: for results that stay inside the chunk; None lets the compiler choose.
    """

    def __init__(
        self, plan: ChunkPlan, params: Specs, derived: Specs, boundary: Sharding, chosen: Sharding | None
    ) -> None:
        self.compiled: dict[str, Compiled] = {}
        """The compiled programs by name."""
        self._params, self._derived = params, derived
        self._boundary, self._chosen = boundary, chosen
        self.lean_forward: Compiled | None = None
        """The forward without stash, where the plan has one."""
        self.backward: Compiled | None = None
        self.input_gradient: Compiled | None = None
        self.weight_gradient: Compiled | None = None
        self.plan = self._compile_all(plan)
        """As it was given, laid out for what the forward and the input gradient make where it lies."""

    def _compile(self, name: str, function: Any, *specs: Specs, results: Any, donate: tuple[int, ...] = (0,)) -> Any:
        """Arguments lie as their specs say; where they say nothing, as what passes between chunks."""
        at = next(place for place, spec in enumerate(specs) if spec is self._params)

        def program(*arguments: Any) -> Any:
            whole = self._gathered(arguments[at : at + 2])
            return function(*arguments[:at], *whole, *arguments[at + 2 :])

        inputs = jax.tree.map(lambda s: passing(self._boundary, s) if s.sharding is None else s.sharding, specs)
        self.compiled[name] = compile_program(
            name, program, *specs, in_shardings=inputs, out_shardings=results, donate=donate
        )
        return self.compiled[name]

    def _gathered(self, held: Any) -> Any:
        """Parameters and what is derived from them as the chunk computes with them: no more cut over ``fsdp``."""
        return jax.tree.map(
            lambda leaf, spec: (
                leaf
                if (whole := gathered(spec.sharding)) is spec.sharding
                else jax.lax.with_sharding_constraint(leaf, whole)
            ),
            held,
            (self._params, self._derived),
        )

    def _compile_all(self, plan: ChunkPlan) -> ChunkPlan:
        """Compile the plan's functions; where a program's results lie decides how the next ones are laid out."""
        params, derived, boundary, chosen = self._params, self._derived, self._boundary, self._chosen
        at_params = jax.tree.map(lambda spec: spec.sharding, params)
        outputs, input_grads = all_passing(boundary, plan.outputs), all_passing(boundary, plan.input_grads)
        specs: tuple[Specs, ...] = (params, derived, plan.operands)
        self.forward = self._compile("forward", plan.forward, *specs, results=(outputs, chosen), donate=())
        if plan.has_lean_forward:
            self.lean_forward = self._compile(LEAN_FORWARD, plan.lean_forward, *specs, results=outputs, donate=())
        plan = plan.laid_out(boundary, self.forward.output_shardings[1])
        trained = pick(params, plan.trained)
        stash, sums, at_sums = plan.stash.specs, accumulator_spec(trained), pick(at_params, plan.trained)
        rest = (params, derived, (stash.saved, stash.kept), plan.output_grads)
        if not plan.has_backward:
            return plan
        if not plan.is_split:
            specs = ((sums, stash.donated), *rest)
            at_both = ((at_sums, input_grads), boundary)
            self.backward = self._compile("backward", _with_token(plan.backward), *specs, results=at_both)
            return plan
        made: Any = ()
        if jax.tree.leaves((plan.input_grads, plan.made)):
            results = (chosen, input_grads)
            program = self._compile("input_gradient", plan.input_gradient, stash.donated, *rest, results=results)
            self.input_gradient, made = program, program.output_shardings[0]
        plan = plan.owing(boundary, made)
        if jax.tree.leaves(trained):
            specs = (sums, params, derived, plan.owed.specs)
            at = (at_sums, boundary)
            program = self._compile("weight_gradient", _with_token(plan.weight_gradient), *specs, results=at)
            self.weight_gradient = program
        return plan


def _with_token(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The same, with a token as a second result: the results of a program are complete together."""

    def program(*arguments: Any) -> tuple[Any, Any]:
        return function(*arguments), jnp.zeros((), jnp.int32)

    return program
