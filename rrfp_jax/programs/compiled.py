"""All that is compiled for one chunk on its unit, behind the calls that a stage makes.

Which buffers a call takes over
-------------------------------
``backward`` consumes its stash and its accumulators, ``input_gradient`` its stash and ``weight_gradient`` its
accumulators: the caller forgets what it passed and keeps what it got. ``forward`` and ``prepare`` consume nothing. What
is owed to a weight gradient holds some arrays of the stash, and the gradients that came and went, by reference: the
rest is freed when the caller drops the stash. For R and U see :mod:`rrfp_jax.programs.updates`.

What accumulates is taken over by the next call that does, and cannot be waited for then. So ``backward`` and
``weight_gradient`` return a *token* too, a scalar that is complete when they are and that nothing takes over.

Derived values
--------------
What costs work and depends on parameters alone, such as weights cast to bfloat16, is computed once per update by
``prepare`` and given to the programs that run a microbatch. Where ``derived`` is left out they call it themselves.

All calls return as soon as the work is enqueued. Arrays may be JAX arrays on the chunk's devices or NumPy arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.programs.chunk import Chunk, Params, check_seed, counters
from rrfp_jax.programs.chunk_plan import ChunkPlan, naming
from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.handover import Owed, OwedBytes, Stash
from rrfp_jax.programs.shapes import ChunkShapes
from rrfp_jax.programs.shardings import spread, unit_shardings
from rrfp_jax.programs.specs import Specs, accumulator_spec, num_bytes
from rrfp_jax.programs.state import full, zeros
from rrfp_jax.programs.updates import StageUpdates, UnitUpdates
from rrfp_jax.tasks import PipelineGraph


@dataclass(frozen=True, kw_only=True)
class ChunkSizes:
    """Bytes of what a chunk holds on its devices, for tables and memory forecasts.

    While a microbatch is between forward and backward it holds ``stash_bytes + kept_bytes``, between input gradient and
    weight gradient ``owed.total``. Kept arrays and gradients are held by reference: where somebody else holds them too
    (an inbox, a transport, another chunk of the stage) count them once.
    """

    params_bytes: int
    """Parameters, once."""
    accumulators_bytes: int
    """Accumulated gradients, once; 0 for a chunk that does not train."""
    optimizer_bytes: int
    """Optimizer state, once; 0 for a chunk that does not train."""
    derived_bytes: int
    """What ``prepare`` derives from the parameters, once."""
    inputs_bytes: int
    """What arrives for the forward of one microbatch from all predecessors."""
    outputs_bytes: int
    """The output of one microbatch, as sent to each successor."""
    stash_bytes: int
    """What only the stash of one microbatch holds."""
    kept_bytes: int
    """Inputs, batch leaves and outputs of one microbatch that its stash keeps alive."""
    output_grads_bytes: int
    """What arrives for the backward of one microbatch from all successors; 0 for a chunk that computes a loss."""
    input_grads_bytes: int
    """The gradients of one microbatch, as sent to all predecessors."""
    owed: OwedBytes = field(default_factory=OwedBytes)
    """What one microbatch owes to its weight gradient; nothing where the backward is not split."""
    temporaries: Mapping[str, int] = field(default_factory=dict)
    """What each program needs while it runs beside its arguments and results, by its name; 0 where the backend does not
    say."""


class CompiledChunk:
    """The compiled programs of chunk ``index`` on the devices of one unit.

    A program that would compute nothing is left out: the input gradient of a chunk that sends none, the weight gradient
    of a chunk without parameters, the preparation where nothing is derived from parameters.

    Args:
        shapes: of every chunk, see :func:`rrfp_jax.programs.shapes.derive_shapes`.
        plan: of the chunk, see :func:`rrfp_jax.programs.chunk_plan.plan_chunk`; serves for any number of units.
        optimizer: must treat every array by itself: see :func:`rrfp_jax.programs.optimizers.check_leafwise`, which
            needs the whole model.
        sharding: the unit's boundary (see :mod:`rrfp_jax.programs.shardings`): a ``SingleDeviceSharding``, or
            ``StageDevices.unit_sharding(replica)``.
        seed: of the run's random keys, 0 to 2**32 - 1.
        stage: what the replicas of the chunk's stage do together, if there are several: it takes the place of R and,
            with a sharded optimizer state, of U.

    Raises ValueError, naming the chunk, where it cannot be compiled.
    """

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        shapes: Sequence[ChunkShapes],
        plan: ChunkPlan,
        *,
        optimizer: optax.GradientTransformation,
        sharding: Sharding,
        seed: int = 0,
        stage: StageUpdates | None = None,
    ) -> None:
        check_seed(seed)
        self.index, self.chunk, self.shapes = index, chunks[index], shapes[index]
        self.sharding = sharding
        """Of activations, their gradients, batch leaves and scalars."""
        self.shardings = unit_shardings(chunks, index, sharding)
        """Of parameters too."""
        self.compiled: dict[str, Compiled] = {}
        """The compiled programs by name, for their cost and memory analysis."""
        self._stage, self._seed = stage, seed
        self._params = spread(self.shapes.params, self.shardings.params)
        self._prepare: Compiled | None = None
        self._backward: Compiled | None = None
        self._input_gradient: Compiled | None = None
        self._weight_gradient: Compiled | None = None
        with naming(chunks, index):
            self.plan = self._compile_gradients(plan)
            """As it was given, laid out for what the forward and the input gradient make where it lies."""
            self.updates = UnitUpdates(index, chunks, graph, optimizer=optimizer, sharding=sharding, stage=stage)
            """R and U."""
        self.compiled |= self.updates.compiled | (stage.compiled if stage is not None else {})
        self._is_sink = not graph.successors(index)
        self._absent_inputs, self._absent_grads = self._zeros_for_absent(graph)
        self._loss_grads = full(self.plan.output_grads, sharding, 1) if self._is_sink else ()

    # -- compilation -------------------------------------------------------------------------------------------------

    def _compile(self, name: str, function: Any, *specs: Specs, results: Any, donate: tuple[int, ...] = (0,)) -> Any:
        """Arguments lie as their specs say, at the boundary where they say nothing."""
        inputs = jax.tree.map(lambda spec: self.sharding if spec.sharding is None else spec.sharding, specs)
        self.compiled[name] = compile_program(
            name, function, *specs, in_shardings=inputs, out_shardings=results, donate=donate
        )
        return self.compiled[name]

    def _compile_gradients(self, plan: ChunkPlan) -> ChunkPlan:
        """Compile the plan's functions; where a program's results lie decides how the next ones are laid out."""
        params, at_boundary, chosen = self._params, self.sharding, self.shardings.chosen
        self._derived = derived = jax.eval_shape(plan.prepare, self.shapes.params)
        if derived:
            self._prepare = self._compile("prepare", plan.prepare, params, results=chosen, donate=())
            self._derived = derived = spread(derived, self._prepare.output_shardings)
        results = (at_boundary, chosen)
        specs: tuple[Specs, ...] = (params, derived, plan.operands)
        self._forward = self._compile("forward", plan.forward, *specs, results=results, donate=())
        plan = plan.laid_out(at_boundary, self._forward.output_shardings[1])
        stash, sums = plan.stash.specs, accumulator_spec(params)
        rest = (params, derived, (stash.saved, stash.kept), plan.output_grads)
        if plan.split is None:
            return plan
        if not plan.is_split:
            specs, at_sums = ((sums, stash.donated), *rest), self.shardings.params
            lying = ((at_sums, at_boundary), at_boundary)
            self._backward = self._compile("backward", _with_token(plan.backward), *specs, results=lying)
            return plan
        made: Any = ()
        if jax.tree.leaves((plan.input_grads, plan.made)):
            program = self._compile("input_gradient", plan.input_gradient, stash.donated, *rest, results=results)
            self._input_gradient, made = program, program.output_shardings[1]
        plan = plan.owing(at_boundary, made)
        if jax.tree.leaves(params):
            specs = (sums, params, derived, plan.owed.specs)
            self._weight_gradient = self._compile(
                "weight_gradient",
                _with_token(plan.weight_gradient),
                *specs,
                results=(self.shardings.params, at_boundary),
            )
        return plan

    def _zeros_for_absent(self, graph: PipelineGraph) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
        """Zeros for predecessors and gradient successors that a microbatch may skip; which do, can change every step.

        None where no microbatch can skip any: an only predecessor, or an only successor, runs whatever the chunk runs.
        """
        inputs = grads = None
        if len(self.shapes.inputs) > 1:
            inputs = tuple(zeros(spec, self.sharding) for spec in self.shapes.inputs)
        if len(graph.successors(self.index)) > 1 and self.plan.output_grads:
            grads = (zeros(self.plan.output_grads[0], self.sharding),) * len(self.plan.output_grads)
        return inputs, grads

    @cached_property
    def sizes(self) -> ChunkSizes:
        """Bytes of parameters, optimizer state, accumulators, of one microbatch's data and of running programs."""
        plan, stash, stage = self.plan, self.plan.stash.specs, self._stage
        return ChunkSizes(
            params_bytes=num_bytes(self._params),
            accumulators_bytes=num_bytes(accumulator_spec(self._params)) if self.updates.trains else 0,
            optimizer_bytes=num_bytes((self.updates.state_specs, () if stage is None else stage.state_specs)),
            derived_bytes=num_bytes(self._derived),
            inputs_bytes=num_bytes(self.shapes.inputs),
            outputs_bytes=num_bytes(self.shapes.outputs),
            stash_bytes=num_bytes((stash.donated, stash.saved)),
            kept_bytes=num_bytes(stash.kept),
            output_grads_bytes=0 if self._is_sink else num_bytes(plan.output_grads),
            input_grads_bytes=num_bytes(plan.input_grads),
            owed=plan.owed.num_bytes,
            temporaries=temporaries(self.compiled),
        )

    # -- calls -------------------------------------------------------------------------------------------------------

    def zeros(self) -> Any:
        """Accumulators before the first backward: zeros like the parameters, float32."""
        return zeros(accumulator_spec(self.shapes.params), self.shardings.params)

    def prepare(self, params: Params) -> tuple[Any, ...]:
        """What is derived from these parameters and costs work: valid until they change, empty if there is nothing."""
        return () if self._prepare is None else self._prepare(params)

    def forward(
        self,
        params: Params,
        inputs: tuple[Any, ...],
        leaves: dict[str, Any],
        step: int = 0,
        microbatch: int = 0,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[Any, Stash]:
        """Run one microbatch forward.

        ``inputs`` has the output of every predecessor, ascending, and None for one that the microbatch skips;
        ``leaves`` exactly the chunk's batch leaves; ``microbatch`` counts over the whole step. Returns the output and
        what the backward needs.
        """
        if self._absent_inputs is not None:
            inputs = _fill(inputs, self._absent_inputs)
        operands = (inputs, leaves, counters(self._seed, step, microbatch) if self.chunk.uses_key else ())
        outputs, made = self._forward(params, self.prepare(params) if derived is None else derived, operands)
        layout = self.plan.stash
        donated = tuple([made[place] for place in layout.donated])
        saved = tuple([made[place] for place in layout.saved])
        if not layout.kept:
            return outputs, Stash(donated, saved)
        at_hand = jax.tree.leaves((operands, outputs))
        return outputs, Stash(donated, saved, tuple([at_hand[place] for place in layout.kept]))

    def backward(
        self,
        params: Params,
        stash: Stash,
        output_grads: tuple[Any, ...],
        accumulators: Any,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[tuple[Any, ...], Any, Any]:
        """Run one microbatch backward, with the parameters that its forward had.

        ``output_grads`` has one entry per gradient successor, ascending, None for one that the microbatch skips, and is
        empty for a chunk that computes a loss. Returns one gradient per gradient predecessor, ascending, with None in
        place of leaves that have no gradient, the accumulators with this microbatch's gradient of the summed loss, and
        the token. Only for a chunk whose backward is not split.
        """
        if self._backward is None:
            raise self._refusal()
        derived = self.prepare(params) if derived is None else derived
        owned, rest = (accumulators, stash.donated), (stash.saved, stash.kept)
        (accumulators, input_grads), token = self._backward(owned, params, derived, rest, self._complete(output_grads))
        return input_grads, accumulators, token

    def input_gradient(
        self,
        params: Params,
        stash: Stash,
        output_grads: tuple[Any, ...],
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[tuple[Any, ...], Owed]:
        """The first half of a split backward: as ``backward``, but returns what it owes instead of accumulating."""
        if not self.plan.is_split:
            raise self._refusal()
        derived = self.prepare(params) if derived is None else derived
        output_grads, rest = self._complete(output_grads), (stash.saved, stash.kept)
        input_grads: tuple[Any, ...] = ()
        made: tuple[Any, ...] = ()
        if self._input_gradient is not None:
            input_grads, made = self._input_gradient(stash.donated, params, derived, rest, output_grads)
        at_hand = jax.tree.leaves((rest, output_grads, input_grads, made))
        return input_grads, tuple([at_hand[place] for place in self.plan.owed.leaves])

    def weight_gradient(
        self, params: Params, owed: Owed, accumulators: Any, *, derived: tuple[Any, ...] | None = None
    ) -> tuple[Any, Any]:
        """The second half of a split backward: the accumulators with this microbatch's gradient of the summed loss, and
        the token, which is empty where there is no program."""
        if not self.plan.is_split:
            raise self._refusal()
        if self._weight_gradient is None:
            return accumulators, ()
        derived = self.prepare(params) if derived is None else derived
        accumulators, token = self._weight_gradient(accumulators, params, derived, owed)
        return accumulators, token

    def shared_layers(self, accumulators: Any) -> dict[str, Any]:
        """The accumulators that the chunks which share parameters with this one need for R."""
        return {name: accumulators[name] for name in sorted(self.chunk.shared)}

    def _complete(self, output_grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._is_sink:
            return self._loss_grads
        return output_grads if self._absent_grads is None else _fill(output_grads, self._absent_grads)

    def _refusal(self) -> ValueError:
        if self.plan.split is None:
            return ValueError(f"no gradient reaches chunk {self.index}: it has no backward")
        split = "split: call input_gradient and weight_gradient"
        return ValueError(
            f"the backward of chunk {self.index} is {split if self.plan.is_split else 'in one piece: call backward'}"
        )


def temporaries(compiled: Mapping[str, Compiled]) -> dict[str, int]:
    """Temporary bytes of compiled programs by name, as the backend's memory analysis has them."""
    analyses = {name: program.memory_analysis() for name, program in compiled.items()}
    return {name: int(getattr(analysis, "temp_size_in_bytes", None) or 0) for name, analysis in analyses.items()}


def _with_token(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The same, with a token as a second result: the results of a program are complete together."""

    def program(*arguments: Any) -> tuple[Any, Any]:
        return function(*arguments), jnp.zeros((), jnp.int32)

    return program


def _fill(values: tuple[Any, ...], zeros: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([zero if value is None else value for value, zero in zip(values, zeros, strict=True)])
