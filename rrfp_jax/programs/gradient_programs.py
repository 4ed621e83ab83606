"""The compiled forward and backward of one chunk, and the little that happens on the host around them."""

from typing import Any

import jax
from jax.stages import Compiled

from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.gradients import GradientPlan
from rrfp_jax.programs.handover import Owed, Stash
from rrfp_jax.programs.shardings import UnitShardings, spread
from rrfp_jax.programs.specs import Specs, accumulator_spec


class GradientPrograms:
    """Compiles what a plan holds: forward; backward, or input gradient and weight gradient; preparation.

    A program that would compute nothing is left out: the input gradient of a chunk that sends none, the weight gradient
    of a chunk without parameters, the preparation where nothing is derived from parameters.
    """

    def __init__(self, plan: GradientPlan, params: Specs, shardings: UnitShardings) -> None:
        self.compiled: dict[str, Compiled] = {}
        """The compiled programs by name."""
        self._shardings, self._params = shardings, spread(params, shardings.params)
        self.derived: Specs = jax.eval_shape(plan.prepare, params)
        """What ``prepare`` returns, as specs with shardings."""
        self._prepare = self._compile_prepare(plan) if self.derived else None
        self._forward = self._compile_forward(plan)
        self.plan = plan = plan.laid_out(shardings.boundary, self._forward.output_shardings[1])
        """As it was given, laid out for what the forward and the input gradient make where it lies."""
        self._backward: Compiled | None = None
        self._input_gradient: Compiled | None = None
        self._weight_gradient: Compiled | None = None
        if plan.split is not None and not plan.is_split:
            self._backward = self._compile_backward(plan)
        elif plan.split is not None:
            made: Any = ()
            if jax.tree.leaves((plan.input_grads, plan.made)):
                self._input_gradient = self._compile_input_gradient(plan)
                made = self._input_gradient.output_shardings[1]
            self.plan = plan = plan.owing(shardings.boundary, made)
            if jax.tree.leaves(params):
                self._weight_gradient = self._compile_weight_gradient(plan)

    def _compile(self, name: str, function: Any, *specs: Specs, results: Any, donate: tuple[int, ...] = (0,)) -> Any:
        """Arguments lie as their specs say, at the boundary where they say nothing."""
        boundary = self._shardings.boundary
        inputs = jax.tree.map(lambda spec: boundary if spec.sharding is None else spec.sharding, specs)
        self.compiled[name] = compile_program(
            name, function, *specs, in_shardings=inputs, out_shardings=results, donate=donate
        )
        return self.compiled[name]

    def _compile_prepare(self, plan: GradientPlan) -> Compiled:
        program = self._compile("prepare", plan.prepare, self._params, results=self._shardings.chosen, donate=())
        self.derived = spread(self.derived, program.output_shardings)
        return program

    def _compile_forward(self, plan: GradientPlan) -> Compiled:
        results = (self._shardings.boundary, self._shardings.chosen)
        specs = (self._params, self.derived, plan.operands)
        return self._compile("forward", plan.forward, *specs, results=results, donate=())

    def _compile_backward(self, plan: GradientPlan) -> Compiled:
        stash, params = plan.stash.specs, self._params
        owned = (accumulator_spec(params), stash.donated)
        specs = (owned, params, self.derived, (stash.saved, stash.kept), plan.output_grads)
        results = (self._shardings.params, self._shardings.boundary)
        return self._compile("backward", plan.backward, *specs, results=results)

    def _compile_input_gradient(self, plan: GradientPlan) -> Compiled:
        stash = plan.stash.specs
        specs = (stash.donated, self._params, self.derived, (stash.saved, stash.kept), plan.output_grads)
        results = (self._shardings.boundary, self._shardings.chosen)
        return self._compile("input_gradient", plan.input_gradient, *specs, results=results)

    def _compile_weight_gradient(self, plan: GradientPlan) -> Compiled:
        specs = (accumulator_spec(self._params), self._params, self.derived, plan.owed.specs)
        return self._compile("weight_gradient", plan.weight_gradient, *specs, results=self._shardings.params)

    def prepare(self, params: Any) -> tuple[Any, ...]:
        return self._prepare(params) if self._prepare is not None else ()

    def forward(self, params: Any, derived: Any, operands: Any) -> tuple[Any, Stash]:
        outputs, made = self._forward(params, derived, operands)
        plan = self.plan.stash
        donated = tuple([made[place] for place in plan.donated])
        saved = tuple([made[place] for place in plan.saved])
        if not plan.kept:
            return outputs, Stash(donated, saved)
        at_hand = jax.tree.leaves((operands, outputs))
        return outputs, Stash(donated, saved, tuple([at_hand[place] for place in plan.kept]))

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
