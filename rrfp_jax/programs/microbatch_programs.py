"""The programs that run microbatches of one bucket through a chunk on its unit: compiled, and called.

F, B or I and W depend on the shapes that the chunk reads alone. So :func:`compile_for_kind` compiles them once for all
chunks of a kind, with parameters by the names that the chunks' function knows, and :class:`MicrobatchPrograms` calls
them with the parameters, numbers and random keys of one chunk.

Buffers that a call takes over
------------------------------
``backward`` consumes its residuals and its accumulators, ``input_gradient`` its residuals and ``weight_gradient`` its
accumulators: the caller forgets the arguments and keeps the results. ``forward`` consumes nothing. The weight-gradient
residuals hold some of the residuals, and the gradients that came and went, by reference: the rest is freed when the
caller drops the residuals.

Accumulators are taken over by the next call that adds to them, and cannot be waited for then. So ``backward`` and
``weight_gradient`` return a *token* too, a scalar that is complete when they are and that nothing takes over.

All calls return as soon as the work is enqueued. Arrays may be JAX arrays on the chunk's devices or NumPy arrays.
``place`` brings batch leaves to the devices ahead of the call that reads them.

Pairs
-----
Two calls for different microbatches, of one chunk or of two of a unit, may run as one program, so that the compiler
hides the collectives of each behind the products of the other (:data:`PAIRED_PROGRAMS`). Each method has a namesake
that ends in ``_call`` and returns the call with its arguments, as a :class:`ProgramCall` that has not run;
:class:`PairProgram` runs two.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.core.events import record
from rrfp_jax.hardware import TPU
from rrfp_jax.programs.chunk import Chunk, Params, counters
from rrfp_jax.programs.chunk_plan import ChunkPlan, Residuals, WeightResiduals
from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.program_text import memory_of
from rrfp_jax.programs.shapes import ChunkShapes, Specs, accumulator_spec, num_bytes, pick
from rrfp_jax.programs.shardings import all_passing, gathered, passing
from rrfp_jax.programs.state import full, zeros
from rrfp_jax.programs.target import current_target
from rrfp_jax.schedules import PipelineGraph

LEAN_FORWARD = "forward_lean"
"""The name of the forward without residuals."""
PAIRED_PROGRAMS = (
    ("backward", "forward"),
    ("input_gradient", "forward"),
    ("weight_gradient", "forward"),
    ("weight_gradient", "input_gradient"),
    ("forward", "forward"),
    ("input_gradient", "weight_gradient"),
)
"""The programs that run in pairs, by name. JAX pairs donated arrays with results of their shape in order: a program
that adds to accumulators comes first, so that no result of the other one takes these over. The last pair is a whole
backward: the weight gradient of the microbatch whose input gradient runs with it."""
WHOLE_BACKWARD = PAIRED_PROGRAMS[-1]
"""The pair whose programs work on one microbatch."""


class ProgramParts(NamedTuple):
    """The parts that one program was compiled from, and a program of two is compiled from once more."""

    function: Callable[..., Any]
    specs: tuple[Specs, ...]
    in_shardings: tuple[Any, ...]
    donate: tuple[int, ...]


class KindPrograms(NamedTuple):
    """The programs for one bucket that all chunks of a kind share on a unit."""

    plan: ChunkPlan
    """The plan, laid out for the arrays that forward and input gradient make where the compiler has put them."""
    compiled: Mapping[str, Compiled]
    """By name: ``forward``, ``forward_lean``, ``backward`` or ``input_gradient`` and ``weight_gradient``.

    A program that would compute nothing is left out: the input gradient of a chunk that sends none, the weight gradient
    of a chunk none of whose parameters train.
    """
    parts: Mapping[str, ProgramParts] = MappingProxyType({})
    """The parts of these programs, by the same names."""


def compile_for_kind(
    plan: ChunkPlan, params: Specs, derived: Specs, boundary: Sharding, chosen: Sharding | None
) -> KindPrograms:
    """Compiles the functions of a plan for one unit.

    Args:
        plan: of the chunks of the kind.
        params: the shapes of parameters, with their shardings.
        derived: the shapes of the derived values that the plan takes, with their shardings.
        boundary: of the unit; see :mod:`rrfp_jax.programs.shardings` for arrays that pass between chunks.
        chosen: for results that stay inside the chunk; None lets the compiler choose.
    """
    compiled, parts = dict[str, Compiled](), dict[str, ProgramParts]()

    def whole(leaf: Any, spec: Any) -> Any:
        at = gathered(spec.sharding)
        return leaf if at is spec.sharding else jax.lax.with_sharding_constraint(leaf, at)

    def compile_one(
        name: str, function: Any, *specs: Specs, results: Any, donate: tuple[int, ...] = (0,), token: bool = False
    ) -> Compiled:
        # arguments lie as their specs say; where they say nothing, as arrays that pass between chunks
        at = next(place for place, spec in enumerate(specs) if spec is params)

        def program(*arguments: Any) -> Any:
            # a chunk computes with parameters and derived values that are no more cut over ``fsdp``
            held = jax.tree.map(whole, arguments[at : at + 2], (params, derived))
            returned = function(*arguments[:at], *held, *arguments[at + 2 :])
            # the results of a program are complete together, so a token that nothing takes over tells when
            return (returned, jnp.zeros((), jnp.int32)) if token else returned

        inputs = jax.tree.map(lambda s: passing(boundary, s) if s.sharding is None else s.sharding, specs)
        places = (results, boundary) if token else results
        made = compile_program(name, program, *specs, in_shardings=inputs, out_shardings=places, donate=donate)
        parts[name] = ProgramParts(program, specs, inputs, donate)
        return compiled.setdefault(name, made)

    outputs, input_grads = all_passing(boundary, plan.outputs), all_passing(boundary, plan.input_grads)
    specs: tuple[Specs, ...] = (params, derived, plan.operands)
    forward = compile_one("forward", plan.forward, *specs, results=(outputs, chosen), donate=())
    if plan.has_lean_forward:
        compile_one(LEAN_FORWARD, lambda *args: plan.forward(*args)[0], *specs, results=outputs, donate=())
    # where a program's results lie decides how the next ones are laid out
    plan = plan.laid_out(boundary, forward.output_shardings[1])
    if not plan.has_backward:
        return KindPrograms(plan, compiled, parts)
    trained, residuals = pick(params, plan.trained), plan.residuals.specs
    sums, at_sums = accumulator_spec(trained), jax.tree.map(lambda spec: spec.sharding, trained)
    rest = (params, derived, (residuals.saved, residuals.aliased), plan.output_grads)
    if not plan.is_split:
        specs = ((sums, residuals.donated), *rest)
        compile_one("backward", plan.backward, *specs, results=(at_sums, input_grads), token=True)
        return KindPrograms(plan, compiled, parts)
    made: Any = ()
    if jax.tree.leaves((plan.input_grads, plan.made)):
        specs = (residuals.donated, *rest)
        made = compile_one("input_gradient", plan.input_gradient, *specs, results=(chosen, input_grads))
        made = made.output_shardings[0]
    plan = plan.with_weight_residuals(boundary, made)
    if jax.tree.leaves(trained):
        specs = (sums, params, derived, plan.weight_residuals.specs)
        compile_one("weight_gradient", plan.weight_gradient, *specs, results=at_sums, token=True)
    return KindPrograms(plan, compiled, parts)


class ProgramCall(NamedTuple):
    """A call that has its arguments, and may run alone or together with another one."""

    program: Compiled | None
    """The program to run; None where there is nothing to compute."""
    arguments: tuple[Any, ...]
    finish: Callable[[Any, tuple[Any, ...]], Any]
    """Makes the results of the call from those of the program (None without one) and the arguments."""

    def run(self) -> Any:
        """Runs the program alone; returns the results of the call."""
        program, arguments, finish = self
        return finish(None if program is None else program(*arguments), arguments)


class PairProgram(NamedTuple):
    """A program that does the work of two, in the order of :data:`PAIRED_PROGRAMS`."""

    compiled: Compiled
    temporaries: int
    """Bytes that it needs while it runs beside its arguments and results; 0 where the backend does not say."""

    def run(self, first: ProgramCall, second: ProgramCall) -> tuple[Any, Any]:
        """Runs both calls; returns the results of each."""
        made = self.compiled(*first.arguments, *second.arguments)
        return first.finish(made[0], first.arguments), second.finish(made[1], second.arguments)


_ON_TPUS = {
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_jf_crs_combiner_threshold_in_bytes": "0",
}
"""Options by which the compiler for TPUs lets sums and products overlap. Without them it waits for each sum, and merges
those of both programs."""


def compile_pair(first: KindPrograms, name: str, second: KindPrograms, other: str) -> PairProgram:
    """Compiles two programs of a unit as one, which takes and returns arrays that lie as those of each alone do."""
    parts, num_first = (first.parts[name], second.parts[other]), len(first.parts[name].specs)

    def pair(*arguments: Any) -> Any:
        return parts[0].function(*arguments[:num_first]), parts[1].function(*arguments[num_first:])

    compiled = compile_program(
        f"{name}_with_{other}",
        pair,
        *parts[0].specs,
        *parts[1].specs,
        in_shardings=(*parts[0].in_shardings, *parts[1].in_shardings),
        # The compiler chose some of these, and those who take the results count on its choice.
        out_shardings=(first.compiled[name].output_shardings, second.compiled[other].output_shardings),
        donate=(*parts[0].donate, *(num_first + position for position in parts[1].donate)),
        options=_ON_TPUS if current_target().platform == TPU else {},
    )
    memory = memory_of(compiled)
    return PairProgram(compiled, 0 if memory is None else memory.temporaries)


def compile_whole_backward(programs: KindPrograms) -> PairProgram:
    """Compiles both halves of a split backward as one program, with the arguments and results of ``backward``."""
    (first, second), plan = (programs.parts[name] for name in WHOLE_BACKWARD), programs.plan
    at_first, at_second = (programs.compiled[name].output_shardings for name in WHOLE_BACKWARD)

    def backward(owned: Any, params: Any, derived: Any, rest: Any, output_grads: Any) -> Any:
        made, input_grads = first.function(owned[1], params, derived, rest, output_grads)
        at_hand = jax.tree.leaves((rest, output_grads, input_grads, made))
        weight_residuals = tuple([at_hand[place] for place in plan.weight_residuals.leaves])
        sums, token = second.function(owned[0], params, derived, weight_residuals)
        return (sums, input_grads), token

    compiled = compile_program(
        "backward",
        backward,
        (second.specs[0], first.specs[0]),
        *first.specs[1:],
        in_shardings=((second.in_shardings[0], first.in_shardings[0]), *first.in_shardings[1:]),
        out_shardings=((at_second[0], at_first[1]), at_second[1]),
        donate=(0,),
    )
    memory = memory_of(compiled)
    return PairProgram(compiled, 0 if memory is None else memory.temporaries)


class Constants(NamedTuple):
    """Arrays that all microbatches of a bucket share."""

    inputs: tuple[Any, ...] | None
    """Zeros in place of the outputs of predecessors that a microbatch skips; None where it can skip none."""
    grads: tuple[Any, ...] | None
    """Zeros in place of the gradients of successors that a microbatch skips; None where it can skip none."""
    loss_grads: Any
    """The gradient of the summed loss with respect to itself, for a chunk that computes the loss."""


class MicrobatchPrograms:
    """The calls that run microbatches of one bucket; made by :class:`rrfp_jax.programs.compiled.CompiledChunk`.

    Args:
        shapes: of the chunk in this bucket.
        programs: compiled for these shapes, for all chunks of the kind.
        sharding: the unit's boundary.
        seed: of the run's random keys.
        prepare: derives values from parameters, where a call is not given any.
        derived: the positions, among these values, of those that the programs take, in order.
    """

    def __init__(
        self,
        index: int,
        chunk: Chunk,
        graph: PipelineGraph,
        shapes: ChunkShapes,
        programs: KindPrograms,
        *,
        sharding: Sharding,
        seed: int,
        prepare: Callable[[Params], tuple[Any, ...]],
        derived: Sequence[int],
    ) -> None:
        self.shapes, self.plan, self.kind_programs = shapes, programs.plan, programs
        self.leaves = tuple(shapes.leaves)
        """The batch leaves that such a microbatch has and the chunk reads."""
        self._index, self._chunk, self._own = index, chunk, chunk.own
        self._compiled, self._seed = programs.compiled, seed
        self.whole_backward: PairProgram | None = None
        """For a split backward, the program that runs both halves for one microbatch; see :meth:`join_backward`."""
        self.prepare, self._derived_places = prepare, tuple(derived)
        self._is_in_order = self._derived_places == tuple(range(len(derived)))
        self._passing = {name: passing(sharding, spec) for name, spec in shapes.leaves.items()}
        cut = {name: at for name, at in self._passing.items() if at is not sharding}
        self._at_leaves = {name: at for name, at in cut.items() if not at.is_fully_addressable}
        """The shardings of leaves that are cut over several processes, each of which puts its parts; programs place
        the others."""
        self._gives_loss, num_grads = graph.gives_loss(index), len(graph.gradient_successors(index))
        self._sharding = sharding
        # Which neighbours a microbatch skips can change every step. Zeros stand for all that it may skip: not for an
        # only predecessor or successor, which runs whatever the chunk runs, nor for an optional predecessor, of which
        # the chunk expects nothing where it does not run.
        absent: Any = None
        required = graph.required_predecessors(index)
        if len(required) > 1:
            pairs = zip(graph.predecessors(index), shapes.inputs, strict=True)
            absent = tuple(spec if p in required else None for p, spec in pairs)
        self._absent_inputs: tuple[Specs, ...] | None = absent
        self.from_successors = self.plan.output_grads[:num_grads]
        """The shapes of the gradients that successors return."""
        grads = self.from_successors if len(graph.successors(index)) > 1 else ()
        self._absent_grads: tuple[Specs, ...] | None = grads or None
        self.zeros_bytes = num_bytes((absent, list(_by_shape(grads).values())))
        """Bytes of the zeros that stand for skipped inputs and gradients."""

    @cached_property
    def constants(self) -> Constants:
        """The arrays that calls pass beside their arguments.

        They are made when they are first read, since a unit that is not here cannot hold arrays. The runtime reads
        them before the first step, so that no step compiles the programs that make them.
        """

        def zeros_like(spec: Specs) -> Any:
            return zeros(spec, all_passing(self._sharding, spec))

        inputs, grads = self._absent_inputs, self._absent_grads or ()
        zero_grads = {shape: zeros_like(spec) for shape, spec in _by_shape(grads).items()}
        return Constants(
            inputs=None if inputs is None else tuple(None if s is None else zeros_like(s) for s in inputs),
            grads=tuple(zero_grads[_shape(spec)] for spec in grads) or None,
            loss_grads=full(self.plan.output_grads[len(self.from_successors) :], self._sharding, 1)
            if self._gives_loss
            else (),
        )

    def join_backward(self, program: PairProgram) -> None:
        """Takes a program for both halves of a split backward, which :meth:`backward` runs from now on."""
        self.whole_backward, self._compiled = program, {**self._compiled, "backward": program.compiled}

    def _derived(self, params: Params, derived: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """Returns the derived values that these programs take."""
        values = self.prepare(params) if derived is None else derived
        if self._is_in_order and len(values) == len(self._derived_places):
            return values
        return tuple([values[place] for place in self._derived_places])

    def forward(
        self,
        params: Params,
        inputs: tuple[Any, ...],
        leaves: dict[str, Any],
        step: int = 0,
        microbatch: int = 0,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[Any, Residuals]:
        """Runs one microbatch forward.

        ``inputs`` has the output of every predecessor, ascending, and None for one that the microbatch skips;
        ``leaves`` exactly those of ``self.leaves``; ``microbatch`` counts over the whole step. Returns the output and
        the residuals.
        """
        return self.forward_call(params, inputs, leaves, step, microbatch, derived=derived).run()

    def forward_call(
        self,
        params: Params,
        inputs: tuple[Any, ...],
        leaves: dict[str, Any],
        step: int = 0,
        microbatch: int = 0,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> ProgramCall:
        """Returns the call of :meth:`forward` with its arguments."""
        operands, own = self._operands(inputs, leaves, step, microbatch), self._own.to_own(params)
        arguments = own, self._derived(params, derived), operands
        return record(ProgramCall, (self._compiled["forward"], arguments, self._finish_forward))

    def _finish_forward(self, returned: Any, arguments: tuple[Any, ...]) -> tuple[Any, Residuals]:
        (outputs, made), layout = returned, self.plan.residuals
        donated = tuple([made[place] for place in layout.donated])
        saved = tuple([made[place] for place in layout.saved])
        if not layout.aliased:
            return outputs, Residuals(donated, saved)
        at_hand = jax.tree.leaves((arguments[2], outputs))
        return outputs, Residuals(donated, saved, tuple([at_hand[place] for place in layout.aliased]))

    def outputs(
        self,
        params: Params,
        inputs: tuple[Any, ...],
        leaves: dict[str, Any],
        step: int = 0,
        microbatch: int = 0,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> Any:
        """Runs one microbatch forward for the output alone; a later ``forward`` makes the residuals."""
        lean = self._compiled.get(LEAN_FORWARD)
        if lean is None:
            return self.forward(params, inputs, leaves, step, microbatch, derived=derived)[0]
        operands, own = self._operands(inputs, leaves, step, microbatch), self._own.to_own(params)
        return lean(own, self._derived(params, derived), operands)

    def place(self, leaves: dict[str, Any]) -> dict[str, jax.Array]:
        """Begins to copy the leaves of a microbatch to the devices; returns them as ``forward`` takes them too."""
        return {
            name: jax.device_put(leaves[name], at) if at.is_fully_addressable else _spread(leaves[name], at)
            for name, at in self._passing.items()
        }

    def _operands(self, inputs: tuple[Any, ...], leaves: dict[str, Any], step: int, microbatch: int) -> Any:
        if (absent := self.constants.inputs) is not None:
            inputs = _fill(inputs, absent)
        if self._at_leaves:
            leaves = leaves | {
                name: _spread(leaves[name], at)
                for name, at in self._at_leaves.items()
                if not isinstance(leaves[name], jax.Array)
            }
        counted = counters(self._seed, step, microbatch) if self._chunk.uses_key else ()
        return inputs, leaves, (counted, self._own.numbers)

    def backward(
        self,
        params: Params,
        residuals: Residuals,
        output_grads: tuple[Any, ...],
        accumulators: Any,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[tuple[Any, ...], Any, Any]:
        """Runs one microbatch backward, with the parameters that its forward had.

        ``output_grads`` has one entry per gradient successor, ascending, None for one that the microbatch skips, and is
        empty for a chunk that computes a loss. Returns one gradient per gradient predecessor, ascending, with None in
        place of leaves that have no gradient, the accumulators with this microbatch's gradient of the summed loss, and
        the token. Only for a chunk whose backward is not split.
        """
        return self.backward_call(params, residuals, output_grads, accumulators, derived=derived).run()

    def backward_call(
        self,
        params: Params,
        residuals: Residuals,
        output_grads: tuple[Any, ...],
        accumulators: Any,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> ProgramCall:
        """Returns the call of :meth:`backward` with its arguments."""
        backward, own = self._compiled.get("backward"), self._own.to_own
        if backward is None:
            raise self._refusal()
        derived = self._derived(params, derived)
        owned, rest = (own(accumulators), residuals.donated), (residuals.saved, residuals.aliased)
        arguments = owned, own(params), derived, rest, self._complete(output_grads)
        return record(ProgramCall, (backward, arguments, self._finish_backward))

    def _finish_backward(self, returned: Any, _: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, Any]:
        (sums, input_grads), token = returned
        return input_grads, self._own.to_model(sums), token

    def input_gradient(
        self,
        params: Params,
        residuals: Residuals,
        output_grads: tuple[Any, ...],
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[tuple[Any, ...], WeightResiduals]:
        """Runs the first half of a split backward: as ``backward``, but returns the weight-gradient residuals instead
        of accumulating."""
        return self.input_gradient_call(params, residuals, output_grads, derived=derived).run()

    def input_gradient_call(
        self,
        params: Params,
        residuals: Residuals,
        output_grads: tuple[Any, ...],
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> ProgramCall:
        """Returns the call of :meth:`input_gradient` with its arguments."""
        if not self.plan.is_split:
            raise self._refusal()
        derived, rest = self._derived(params, derived), (residuals.saved, residuals.aliased)
        arguments = residuals.donated, self._own.to_own(params), derived, rest, self._complete(output_grads)
        return record(ProgramCall, (self._compiled.get("input_gradient"), arguments, self._finish_input_gradient))

    def _finish_input_gradient(
        self, returned: Any, arguments: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], WeightResiduals]:
        made, input_grads = ((), (None,) * len(self.plan.input_grads)) if returned is None else returned
        at_hand = jax.tree.leaves((*arguments[3:], input_grads, made))
        return input_grads, tuple([at_hand[place] for place in self.plan.weight_residuals.leaves])

    def weight_gradient(
        self,
        params: Params,
        weight_residuals: WeightResiduals,
        accumulators: Any,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[Any, Any]:
        """Runs the second half of a split backward.

        Returns the accumulators with this microbatch's gradient of the summed loss, and the token, which is empty where
        there is no program.
        """
        return self.weight_gradient_call(params, weight_residuals, accumulators, derived=derived).run()

    def weight_gradient_call(
        self,
        params: Params,
        weight_residuals: WeightResiduals,
        accumulators: Any,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> ProgramCall:
        """Returns the call of :meth:`weight_gradient` with its arguments."""
        if not self.plan.is_split:
            raise self._refusal()
        program, own = self._compiled.get("weight_gradient"), self._own.to_own
        if program is None:
            return ProgramCall(None, (accumulators,), lambda _, arguments: (*arguments, ()))
        arguments = own(accumulators), own(params), self._derived(params, derived), weight_residuals
        return record(ProgramCall, (program, arguments, self._finish_weight_gradient))

    def _finish_weight_gradient(self, returned: Any, _: tuple[Any, ...]) -> tuple[Any, Any]:
        sums, token = returned
        return self._own.to_model(sums), token

    def _complete(self, output_grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if (absent := self.constants.grads) is not None:
            output_grads = _fill(output_grads, absent)
        return (*output_grads, *self.constants.loss_grads) if self._gives_loss else output_grads

    def _refusal(self) -> ValueError:
        if not self.plan.has_backward:
            return ValueError(f"no gradient reaches chunk {self._index}: it has no backward")
        split = "split: call input_gradient and weight_gradient"
        return ValueError(
            f"the backward of chunk {self._index} is {split if self.plan.is_split else 'in one piece: call backward'}"
        )


def _spread(leaf: Any, at: Sharding) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, at, leaf.__getitem__)


def _shape(spec: Specs) -> Hashable:
    return (*jax.tree.leaves(spec), jax.tree.structure(spec))


def _by_shape(specs: Sequence[Specs]) -> dict[Hashable, Specs]:
    """Returns the shapes without those that stand before them already."""
    return {_shape(spec): spec for spec in specs}


def _fill(values: tuple[Any, ...], zeros: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([zero if value is None else value for value, zero in zip(values, zeros, strict=True)])
