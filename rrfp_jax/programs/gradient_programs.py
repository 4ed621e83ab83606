"""The compiled forward and backward of one chunk, and the little that happens on the host around them."""

from typing import Any

import jax
from jax.stages import Compiled

from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.gradients import GradientPlan
from rrfp_jax.programs.handover import Owed, Stash
from rrfp_jax.programs.specs import Specs, accumulator_spec


class GradientPrograms:
    """Compiles what a plan holds: forward; backward, or input gradient and weight gradient; preparation.

    A program that would compute nothing is left out: the input gradient of a chunk that sends none, the weight gradient
    of a chunk without parameters, the preparation where nothing is derived from parameters.
    """

    def __init__(self, plan: GradientPlan, params: Specs, *, sharding: jax.sharding.Sharding) -> None:
        self.plan = plan
        self.derived: Specs = jax.eval_shape(plan.prepare, params)
        """What ``prepare`` returns."""
        self.compiled: dict[str, Compiled] = {}
        stash, derived = plan.stash.specs, self.derived
        rest = (stash.saved, stash.kept)

        def compile_one(name: str, function: Any, *specs: Any, donate: tuple[int, ...] = (0,)) -> Compiled:
            self.compiled[name] = compile_program(name, function, *specs, sharding=sharding, donate=donate)
            return self.compiled[name]

        self._prepare: Compiled | None = None
        self._backward: Compiled | None = None
        self._input_gradient: Compiled | None = None
        self._weight_gradient: Compiled | None = None
        if derived:
            self._prepare = compile_one("prepare", plan.prepare, params, donate=())
        self._forward = compile_one("forward", plan.forward, params, derived, plan.operands, donate=())
        sums = accumulator_spec(params)
        if plan.split is None:
            return
        if not plan.is_split:
            owned = (sums, stash.donated)
            self._backward = compile_one("backward", plan.backward, owned, params, derived, rest, plan.output_grads)
            return
        if jax.tree.leaves((plan.input_grads, plan.owed.made)):
            specs = (stash.donated, params, derived, rest, plan.output_grads)
            self._input_gradient = compile_one("input_gradient", plan.input_gradient, *specs)
        if jax.tree.leaves(params):
            owed = plan.owed.specs
            self._weight_gradient = compile_one("weight_gradient", plan.weight_gradient, sums, params, derived, owed)

    def prepare(self, params: Any) -> tuple[Any, ...]:
        return self._prepare(params) if self._prepare is not None else ()

    def forward(self, params: Any, derived: Any, operands: Any) -> tuple[Any, Stash]:
        outputs, donated, saved = self._forward(params, derived, operands)
        kept = self.plan.stash.kept
        if not kept:
            return outputs, Stash(donated, saved)
        at_hand = jax.tree.leaves((operands, outputs))
        return outputs, Stash(donated, saved, tuple([at_hand[place] for place in kept]))

    def backward(
        self, params: Any, derived: Any, stash: Stash, output_grads: Any, accumulators: Any
    ) -> tuple[tuple[Any, ...], Any]:
        assert self._backward is not None
        donated, saved, kept = stash
        accumulators, input_grads = self._backward(
            (accumulators, donated), params, derived, (saved, kept), output_grads
        )
        return input_grads, accumulators

    def input_gradient(
        self, params: Any, derived: Any, stash: Stash, output_grads: Any
    ) -> tuple[tuple[Any, ...], Owed]:
        donated, saved, kept = stash
        input_grads: tuple[Any, ...] = ()
        made: tuple[Any, ...] = ()
        if self._input_gradient is not None:
            input_grads, made = self._input_gradient(donated, params, derived, (saved, kept), output_grads)
        at_hand = jax.tree.leaves((saved, kept, output_grads, input_grads, made))
        return input_grads, tuple([at_hand[place] for place in self.plan.owed.leaves])

    def weight_gradient(self, params: Any, derived: Any, owed: Owed, accumulators: Any) -> Any:
        if self._weight_gradient is None:
            return accumulators
        return self._weight_gradient(accumulators, params, derived, owed)
