"""The object that a user holds: a model in chunks, an optimizer and some records, assembled into a running pipeline.

::

    pipeline = Pipeline(
        chunks,
        optimizer=optax.adamw(3e-4),
        placement=linear(4),
        ordering=Ordering(hint="bf", window=8),
        updates=UpdateRules(clip_norm=1.0),
    )
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.step(state, batch)      # batch leaves: [num_microbatches, ...]
    print(metrics.result().loss)

``prepare``, or the first ``step``, compiles and starts everything once (:mod:`rrfp_jax.runtime.prepare`). After that a
step only checks its batch, copies it and submits it.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rrfp_jax.core import BY_STAGE, Order, Ordering
from rrfp_jax.core.replicas import StepOwners, check_blocks, microbatches_per_replica, with_owners
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.field_rules import is_whole, typed, with_type
from rrfp_jax.private.jax_names import trace_state_clean
from rrfp_jax.programs.batches import (
    Buckets,
    StepBatch,
    buckets_of,
    in_order,
    leaves_read,
    leaves_to_lack,
    num_microbatches,
)
from rrfp_jax.programs.chunk import (
    ADAPTERS,
    Chunk,
    check_chunks,
    check_seed,
    first_shards,
    param_specs,
    shard_named,
    trained_specs,
    whole_layers,
)
from rrfp_jax.programs.compiled import ChunkSizes
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.model_graph import as_held, fitted_placement, model_graph, with_passes
from rrfp_jax.programs.optimizers import (
    averaging,
    check_elementwise,
    check_leafwise,
    delayed,
    of_whole_layers,
    with_standard_promotion,
)
from rrfp_jax.programs.remat import Remat, remat_of_chunks
from rrfp_jax.programs.shapes import checked_params, model_params, pick, spec_of
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.programs.update_functions import AveragedState, OptimizerOnHost
from rrfp_jax.runtime import PipelineRuntime, StepMetrics, StepResult
from rrfp_jax.runtime.consistency import Verification, result_difference, state_difference
from rrfp_jax.runtime.evaluation import EvaluationMetrics, EvaluationResult, EvaluationShapes, check_beside, placed
from rrfp_jax.runtime.jax_environment import require_determinism
from rrfp_jax.runtime.model import HostedModel, HostedState
from rrfp_jax.runtime.operations import check_operations
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.prepare import CompiledOnly, Prepared, compile_only, prepare_pipeline
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.recovery import RecoveringRuntime
from rrfp_jax.runtime.steps import Hold
from rrfp_jax.schedules import Edge, PipelineGraph, Placement

_MAX_STEPS_ENQUEUED = 2
_SPARSE = "replicas that average a share of their parameters"


@dataclass(frozen=True)
class PipelineState:
    """A handle on the state of the stages after ``step`` steps. ``Pipeline.step`` consumes it and returns the next.

    It belongs to the pipeline, and to the ``init`` or ``restore``, that it came from.
    """

    step: int
    _hold: Hold | None = field(default=None, repr=False, compare=False)


class Pipeline:
    """Trains a model cut into chunks.

    Args:
        chunks: the model's chunks, numbered as in ``placement``; see :class:`rrfp_jax.programs.chunk.Chunk`.
        optimizer: any optax optimizer that treats each array by itself, alike whatever arrays stand beside it.
        placement: which stage owns which chunk; None takes the schedule's.
        edges: which chunk feeds which; None means the schedule's, or a chain without a schedule.
        process: where the pipeline runs: ``Process(Layout(num_stages=4, data=2, tensor=2))`` lays it out over eight
            devices of this process, and one with a cluster is this process's part in a run of several, in which every
            process makes the same pipeline and calls the same methods with the same arguments. None: alone, with a
            device for each stage, or with those that JAX knows shared out evenly if they are fewer.
        ordering: the order of tasks, and how many microbatches may be in flight.
        updates: how gradients become updates: clipping, steps that are left out, deterministic sums, ZeRO-1.
        remat: which values forwards keep or backwards recompute, for all chunks or one for each: ``none``, ``dots``,
            ``full``, names of what layers keep, or a policy of ``jax.checkpoint``.
        seed: the seed of the random keys that chunks read.
        options: how the stages run: memory limit, deadline, event logs and the like.
        trains: False for a pipeline that only evaluates: it holds no gradients and no optimizer state, and compiles no
            backward.

    Close it, or use it in a ``with`` statement; one that nobody refers to any more, or that is open when the process
    ends, is closed by itself. It works in the process that made it, and not in children forked from that.

    Raises ValueError, in one sentence with the remedy, where these do not fit together. Programs are compiled for the
    shapes of the first batch, before its first message.
    """

    @typed
    def __init__(
        self,
        chunks: Iterable[Chunk],
        *,
        optimizer: optax.GradientTransformation,
        placement: Placement | None = None,
        edges: Sequence[Edge] | None = None,
        process: Process | None = None,
        ordering: Ordering = Ordering(),
        updates: UpdateRules = UpdateRules(),
        remat: Remat | Sequence[Remat] = "none",
        seed: int = 0,
        options: RuntimeOptions = RuntimeOptions(),
        trains: bool = True,
    ) -> None:
        self._hold = Hold()
        """The hold of the state that ``init`` or ``restore`` made last."""
        self.chunks, self.optimizer = check_chunks(chunks), of_whole_layers(with_standard_promotion(optimizer))
        self._given_optimizer = optimizer
        if ordering.delay != updates.delay:
            if ordering.delay:
                raise ValueError("a delay changes what is learnt: give it as updates=UpdateRules(delay=1)")
            ordering = replace(ordering, delay=updates.delay)
        self.placement = fitted_placement(self.chunks, placement, ordering.schedule)
        if updates.delay or (updates.sparse is not None and trains):
            self._wrap_optimizer(updates)
        self._edges = None if edges is None else tuple(edges)
        self.ordering, self.updates, self.options = ordering, updates, options
        graph = with_passes(
            model_graph(self.chunks, self._edges, ordering.schedule),
            self.chunks,
            self.placement,
            deterministic=updates.deterministic,
        )
        self._graph = ordering.fitted(self.placement, graph)
        """The graph of one replica; without a schedule, that of one microbatch."""
        if not trains:
            # Everything below derives from the graph, so no backward is compiled and no gradient gets memory.
            self._graph = self._graph.evaluating()
        self.holding = as_held(self.chunks, self._graph)
        """The chunks as they hold parameters: a chunk that is a later pass of another holds none."""
        self._only_evaluates = not trains
        self._may_lack = leaves_to_lack(self.chunks, self._graph)
        """Leaves that a microbatch may lack."""
        check_seed(seed)
        self.remat, self._seed = remat_of_chunks(remat, len(self.chunks)), seed
        """The rematerialisation of each chunk."""
        self.process = _fitted_process(process, self.placement, updates)
        """This process's part in the run."""
        self.layout = self.process.layout
        if updates.sparse is not None:
            self._check_sparse()
        check_operations(self._graph, self.process, options.group_protocol)
        if options.pieces is not None and updates.delay:
            raise ValueError("stages on which steps overlap hardly idle: leave out options.pieces, or the delay")
        if options.pieces is not None and any(len(self.layout.ranks_of(u)) > 1 for u in range(self.layout.num_units)):
            raise ValueError("a stage of several processes has no pieces of its own: leave out options.pieces")
        if updates.delay and (self.process.recovers or options.other_owners):
            raise ValueError("steps that overlap (delay 1) do not survive lost ranks: leave out recovery, or the delay")
        if updates.deterministic:
            ordering.check_deterministic()
            require_determinism(jax.local_devices())
        self._model = HostedModel(
            self.chunks,
            self.placement,
            self.process,
            optimizer=self.optimizer,
            updates=updates,
            seed=self._seed,
            remat=self.remat,
            holding=self.holding,
        )
        self._state: HostedState | None = None
        """Parameters and optimizer state of the hosted chunks. Owned by the stages once they run."""
        self._preparation: Prepared | None = None
        self._enqueued: deque[StepMetrics[StepResult] | EvaluationMetrics] = deque()
        # The runtime counts steps of both kinds without gaps. Checkpoints and random keys go by training steps alone,
        # so that evaluations in between change nothing.
        self._step = 0
        self._turn = 0
        """The number of the next step of any kind."""

    @typed
    def reordered(self, ordering: Ordering = Ordering(), *, options: RuntimeOptions | None = None) -> "Pipeline":
        """Returns a new pipeline with another order of tasks, and with other ``options`` if they are given.

        For comparing schedules: compiled programs are shared, so the new one starts with ``init`` and need not compile
        programs that this one has compiled.
        """
        twin = Pipeline(
            self.chunks,
            optimizer=self._given_optimizer,
            placement=self.placement,
            edges=self._edges,
            process=self.process,
            ordering=ordering,
            updates=self.updates,
            remat=self.remat,
            seed=self._seed,
            options=self.options if options is None else options,
            trains=not self._only_evaluates,
        )
        # The hosted model holds the compiled programs and depends on neither order nor options, so twins can share it.
        twin._model = self._model
        return twin

    def _wrap_optimizer(self, updates: UpdateRules) -> None:
        """Has the optimizer's state hold older parameters, or averages under way; raises ValueError where it cannot."""
        who = _SPARSE if updates.sparse is not None else "steps that overlap (delay 1)"
        params = next(filter(jax.tree.leaves, map(trained_specs, self.chunks)), {})
        if isinstance(jax.eval_shape(self.optimizer.init, spec_of(params)), AveragedState):
            raise ValueError(f"{who} keep no averages of their own: leave average_decay out")
        if isinstance(self.optimizer, OptimizerOnHost):
            raise ValueError(f"{who} need their state on the devices: leave on_host out")
        if updates.sparse is not None:
            self.optimizer = averaging(self.optimizer, updates.sparse)
        else:
            self.optimizer = delayed(self.optimizer, self._undelayed_layers() if updates.delay == BY_STAGE else ())

    def _check_sparse(self) -> None:
        """Lets no replica stand for another that is lost; raises ValueError where they cannot have parameters of their
        own."""
        if self.layout.data == 1 or self.layout.absent:
            raise ValueError(
                f"{_SPARSE} are equally many on all stages, and 2 or more: give such replicas, or reduce auto"
            )
        if self.options.other_owners:
            raise ValueError(f"{_SPARSE} run their own microbatches: leave other_owners out")
        layers = [name for chunk in self.chunks for name in param_specs(chunk)]
        sharing = [list(filter(self._graph.updates, group)) for group in self._graph.shared]  # passes are one
        if any(len(chunks) > 1 for chunks in sharing):
            raise ValueError(f"{_SPARSE} share no layers between chunks: untie them, or put them into one chunk")
        if found := next((n for n in layers if n.startswith(ADAPTERS) or shard_named(n) is not None), None):
            raise ValueError(f"{_SPARSE} have whole layers and no adapters, unlike {found}: give reduce auto")
        self.process.may_recover = False

    def _undelayed_layers(self) -> set[str]:
        """Returns the layers of the last stage, where that takes its gradients at the newest parameters."""
        others, last = set[str](), set[str]()
        for chunk, stage in zip(self.chunks, self.placement.stage_of_chunk, strict=True):
            (last if stage == self.placement.num_stages - 1 else others).update(trained_specs(chunk))
        if both := sorted(last & others):
            raise ValueError(
                f"layer {both[0]} is on the last stage and on another one, which have other delays: give delay 1, or "
                "parameters of its own to each"
            )
        return last

    # -- state -------------------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> PipelineState:
        """Initialise parameters and optimizer state on the stages' devices; ``key`` is a typed random key.

        The result does not depend on where the model is cut.
        """
        self._check_new("start over")
        _check_key(key)
        self._state = self._model.initial_state(self._graph, key)
        return self._started(0)

    def await_state(self) -> PipelineState:
        """Prepare without a state, in a process that comes back to a run under way; :meth:`restore` brings one, once it
        is prepared."""
        self._check_new("start over")
        self._state = self._model.initial_state(self._graph, None)
        return self._started(0)

    def params(self, state: PipelineState) -> dict[str, Any]:
        """Returns the parameters by layer name, on their stages' devices; waits for the steps enqueued.

        They are those of the whole model, or of the stages that this process hosts where there are several processes;
        a layer of which these hold a part has only that. Of replicas with parameters of their own
        (:class:`.SparseAveraging`) they are those of the first.
        The arrays are in use: copy them before the next ``step``, which takes them over.
        """
        held = self._held(state).chunks
        first = {self._model.copies.base(number): held[number] for number in sorted(held, reverse=True)}
        return whole_layers(model_params(first[chunk].params for chunk in sorted(first)))

    def chunk_states(self, state: PipelineState, *, once: bool = False) -> list[tuple[int, ChunkState]]:
        """Returns the state of every chunk that this process hosts, copies of replicas included, each with the chunk's
        number in the model; waits for the steps enqueued. The arrays are in use, as those of :meth:`params`.

        Where an optimizer state is cut into shares of which each replica holds some, ``once`` leaves each share to the
        first replica that holds it.
        """
        return self._model.by_chunk(self._held(state), once=once)

    def differing_copies(self, state: PipelineState) -> str | None:
        """Returns the first array of which replicas hold different bits, in words; None if all copies agree. Replicas
        with parameters of their own are no copies.

        All processes call this method, and get the same; it waits for the steps enqueued. A difference means that a
        device has computed wrongly.
        """
        return state_difference(self._model, self._held(state), state.step)

    def state_specs(self) -> list[tuple[int, ChunkState]]:
        """Returns the shapes and shardings of the arrays of :meth:`chunk_states`; nothing is computed."""
        return self._model.by_chunk(self._model.initial_state(self._graph, None))

    def norms(self, state: PipelineState) -> tuple[float, ...]:
        """Returns the norms of the last steps by which spikes are known, for :meth:`restore`; waits for the steps
        enqueued."""
        return self._held(state).norms.norms

    def restore(
        self, states: Sequence[ChunkState], step: int, *, turn: int | None = None, norms: Sequence[float] = ()
    ) -> PipelineState:
        """Go on after ``step`` steps from these states, one for each entry of :meth:`state_specs`, instead of ``init``.

        Takes the states over. Optimizer state that is still a spec starts anew. ``turn`` is the number of steps of any
        kind that the others have done, where this process comes back to them. ``norms`` are those of :meth:`norms`.

        Raises ValueError, before anything is taken, for states that are not as :meth:`state_specs` says.
        """
        if not self.process.comes_back:
            self._check_new("restore a state")
        if not (is_whole(step) and 0 <= step < 2**32):
            raise ValueError(f"step is {with_type(step)}: give the number of steps done, from 0 to {2**32 - 1}")
        state = self._model.from_chunks(states, self._graph)
        state.norms.go_on(norms)
        if self._preparation is None:
            self._state = state
            return self._started(int(step))
        assert self._state is not None
        # In place: the stages will be made of these.
        self._state.chunks.update(state.chunks)
        self._state.shared.update(state.shared)
        self._state.norms.go_on(norms)
        self._step, self._turn = int(step), int(step) if turn is None else turn
        return PipelineState(self._step, self._hold)

    def hold(self, state: PipelineState) -> None:
        """Wait for lost ranks whose new processes are prepared to take part; see :meth:`RecoveringRuntime.hold`."""
        self._held(state)
        assert self.process.recovery is not None
        self.process.recovery.hold(self._turn)

    def _started(self, step: int) -> PipelineState:
        """Returns the state that a new start begins with; the states of an earlier start no longer count."""
        self._step = self._turn = step
        self._hold = Hold()
        return PipelineState(step, self._hold)

    def trains(self, chunk: int) -> bool:
        """Returns whether a gradient reaches a chunk of the model, and it holds layers that are not frozen."""
        return self._graph.updates(chunk)

    def num_params(self) -> list[int]:
        """Returns the number of parameters of each stage; copies of shared ones count on every stage."""
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(param_specs(chunk))) for chunk in self.holding]
        return [sum(sizes[c] for c in chunks) for chunks in self.placement.chunks_of_stage]

    def _check_new(self, purpose: str) -> None:
        self._check_here()
        if self._preparation is not None:
            raise RuntimeError(f"this pipeline has been stepped already: make a new one to {purpose}")
        # Every process checks all chunks, those of other processes too: a part of the model can hide that the optimizer
        # couples its arrays, and all processes must refuse the same models.
        for index in range(len(self.chunks)):
            checked_params(self.chunks, index)
        whole_layers(model_params(map(param_specs, self.holding)))  # refuses what is no part of a layer
        every = model_params(map(trained_specs, self.holding))
        # the shards of a layer have its name for the optimizer, so the first stands for all, which are alike
        params = first_shards(every)
        check_elementwise(
            self.optimizer, {name: layer for name, layer in every.items() if shard_named(name) is not None}
        )
        parts = [part for index in range(len(self.chunks)) for part in self._model.parts(index)]
        groups = [[name for name in part.layers if name in params] for part in parts]
        shares = [pick(part.pick(every), group) for part, group in zip(parts, groups, strict=True) if group]
        is_cut = self._model.num_shares > 1
        check_leafwise(self.optimizer, params, () if is_cut else list(filter(None, groups)), shares if is_cut else ())

    def _held(self, state: PipelineState) -> HostedState:
        """Returns the state of the hosted chunks once all steps enqueued have ended."""
        # A wrong state is refused without waiting. The stages update the chunks' states in place, so ``held`` is up to
        # date after the wait.
        held = self._checked(state)
        self.wait()
        return held

    def _check_here(self) -> None:
        """Raises an error where nothing can run: in a forked child, without devices, in a function that JAX traces."""
        self._hold.check_process()
        if not self.process.is_here:
            raise ValueError(
                "the pipeline was made for devices that are not here: call compile_only, or give a process with devices"
            )
        if not trace_state_clean():
            raise ValueError(
                "the pipeline is used in a function that JAX traces, and runs programs of its own: call it outside of "
                "jit, grad and vmap"
            )

    def _checked(self, state: PipelineState) -> HostedState:
        self._check_here()
        if self._state is None:
            raise RuntimeError("the pipeline holds no parameters yet: call init first")
        if not isinstance(state, PipelineState):
            raise ValueError(f"state is {with_type(state)}: give the PipelineState that init or the last step returned")
        if state._hold not in (None, self._hold):
            raise ValueError(
                "this state is of another pipeline, or of an earlier init or restore of this one: use the one that "
                "this pipeline returned last"
            )
        if state.step != self._step:
            raise ValueError(
                f"this state was consumed by step {state.step}: use the one that the last call of step returned"
            )
        return self._state

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(
        self,
        state: PipelineState,
        batch: Mapping[str, Any],
        *,
        absent: Iterable[tuple[int, int]] = (),
        owners: StepOwners | None = None,
        order: Sequence[int] | None = None,
        left_out: Iterable[tuple[int, int]] = (),
    ) -> tuple[PipelineState, StepMetrics[StepResult]]:
        """Enqueue one training step; returns as soon as it is enqueued, at most one step ahead of the running one.

        Args:
            state: the state that ``init`` or the last ``step`` returned; it is consumed.
            batch: at least the leaves that the chunks read, each an array [num_microbatches, ...] or a list with an
                array, or None, for each microbatch (:mod:`rrfp_jax.programs.batches`); they are copied. Chunks are
                skipped for microbatches that lack the leaves that they read.
            absent: further (chunk, microbatch) pairs that this batch does not have; such a chunk's output is zeros
                for those that read it.
            owners: which replica runs each microbatch on each stage; None: each its block. It changes nothing but the
                order in which gradients are added up. All processes give the same.
            order: the numbers of the microbatches in the order in which stages see them, each replica's among its own
                (:class:`rrfp_jax.data.balancing.MicrobatchOrders`); None: as they come. It changes nothing but the
                order in which gradients are added up, and nothing at all in a deterministic pipeline, which adds them
                up in the order of the numbers. Timelines, event logs and ``owners`` then count places in this order.
                All processes give the same.
            left_out: (chunk, microbatch) pairs whose weight gradient the step leaves out, for which their W runs no
                program (:func:`rrfp_jax.simulation.choose_frozen` chooses such pairs). Losses and the weight by which
                gradients are divided stay those of all microbatches. All processes give the same.

        Raises ValueError on a batch that does not fit, before anything has changed, and PipelineClosed after ``close``.
        If the run fails, the step's result raises RunFailed, and so does this method once it is known.
        """
        self._checked(state)
        if self._only_evaluates:
            raise ValueError("the pipeline was made to evaluate alone, with trains=False: make one that trains")
        running = self._prepared(batch)
        leaves = leaves_read(self.chunks, batch, may_lack=self._may_lack, copied_for=self._model.base_chunks)
        if (number := num_microbatches(leaves)) != running.num_microbatches:
            raise ValueError(
                f"the batch has {number} microbatches, and the pipeline was prepared for {running.num_microbatches}: "
                "make all batches alike"
            )
        buckets = running.buckets.numbers(leaves)
        skipped = self._absent(running, buckets, absent)
        lacking = self._checked_left_out(left_out, skipped, number)
        numbers = self._own_numbers(order, number)
        if numbers:
            # From here on a microbatch goes by its place.
            places = {own: place for place, own in enumerate(numbers)}
            leaves, buckets = in_order(leaves, numbers), tuple([buckets[own] for own in numbers])
            skipped = [(chunk, places[own]) for chunk, own in skipped]
            lacking = frozenset((chunk, places[own]) for chunk, own in lacking)
        # So far chunks have their numbers in one replica; the runtime counts those of all replicas.
        pairs = running.copies.pairs(skipped)
        owners, graph = self._checked_owners(running, owners)
        weights = running.weights.of(buckets, graph)
        # All that can refuse the batch comes before this line, so a ValueError leaves pipeline and state as they were.
        self._make_room()
        batch_of_step = StepBatch(leaves, buckets, self._step, numbers=numbers, left_out=lacking)
        future = running.runtime.submit(self._turn, batch_of_step, pairs, weights, owners=owners, trained=self._step)
        made = partial(
            StepResult.of,
            step=self._step,
            has_norm=self.updates.needs_norm,
            forwards_skipped=len(set(skipped)),
            weights_left_out=len(lacking),
            absent=self.layout.absent,
        )
        metrics = StepMetrics(future, self._hold, made)
        self._enqueued.append(metrics)
        self._step += 1
        self._turn += 1
        return PipelineState(self._step, self._hold), metrics

    def evaluate(
        self, state: PipelineState, batch: Mapping[str, Any], *, owners: StepOwners | None = None
    ) -> EvaluationMetrics:
        """Enqueue forwards alone, of the parameters as they are after ``state``, which is not consumed.

        Nothing of training changes by it: no parameter, no random key, no number of a step. ``batch`` is as for
        ``step``, with at most as many microbatches as the pipeline was prepared for (:class:`EvaluationShapes`), an
        equal number for each replica; :meth:`reads` tells which of them this process reads. All processes call it
        alike. Chunks get no random key. ``owners`` are those of a training step: each batch is owned like its.
        Prepared for ``in_idle_time``, evaluations run beside the steps that follow, on averages where the optimizer
        keeps some; who asks for a result has them hurry.

        Raises ValueError where the pipeline was not prepared for evaluations, or for other shapes; otherwise as
        ``step``.
        """
        self._checked(state)
        evaluation = self._running().evaluation
        if evaluation is None:
            raise ValueError("the pipeline was not prepared for evaluations: give prepare their shapes (evaluation)")
        leaves = leaves_read(self.chunks, batch, may_lack=self._may_lack, copied_for=self._model.base_chunks)
        batch_of_step, absent = evaluation.step(leaves, self._step)
        if evaluation.beside is not None:
            if owners is not None:
                raise ValueError("evaluations in idle time have no other owners: leave owners or in_idle_time out")
            future = evaluation.beside.submit(
                self.runtime, batch_of_step, absent, partial(self._evaluated_params, state)
            )
            return EvaluationMetrics(
                future, self._hold, partial(EvaluationResult.of, step=self._step), self.runtime.hurry
            )
        owners, _ = self._checked_owners(self._running(), owners)
        self._make_room()
        future = self._running().runtime.submit(
            self._turn, batch_of_step, absent, evaluates=True, owners=owners, trained=self._step
        )
        metrics = EvaluationMetrics(future, self._hold, partial(EvaluationResult.of, step=self._step))
        self._enqueued.append(metrics)
        self._turn += 1
        return metrics

    def _evaluated_params(self, state: PipelineState) -> dict[int, Any]:
        """Returns the parameters that evaluations in idle time read, by chunk; waits for the steps enqueued."""
        held = self._held(state)
        if self._model.keeps_averages:
            return self._model.averages(held)
        return {number: each.params for number, each in held.chunks.items()}

    @contextmanager
    def averaged(self, state: PipelineState) -> Iterator[None]:
        """Evaluates, within the block, with averages of the parameters in their place (:func:`.averaged`).

        Where the optimizer keeps none, nothing changes. Waits at both ends for the steps enqueued; all processes enter
        and leave alike, and train outside of it.
        """
        held = self._held(state)
        if not self._model.keeps_averages:
            yield
            return
        kept = {number: each.params for number, each in held.chunks.items()}
        try:
            self._replace_params(self._model.averages(held))
            yield
        finally:
            try:
                self.wait()
            finally:
                self._replace_params(kept)

    def _replace_params(self, params: Mapping[int, Any]) -> None:
        assert self._state is not None
        for number, own in params.items():
            held = self._state.chunks[number]
            held.params, held.derived = own, None  # Its stage derives them again.

    def check_verifies(self) -> None:
        """Raises ValueError where :meth:`verify` cannot be called: results need not have the same bits on all units."""
        if self._only_evaluates:
            raise ValueError("the pipeline was made to evaluate alone, with trains=False: it has nothing to verify")
        if self.updates.delay:
            raise ValueError("steps that overlap (delay 1) cannot be verified: leave verifications or the delay out")
        if self.updates.sparse is not None:
            raise ValueError(f"{_SPARSE} differ, so that none verifies another: leave verifications out")
        if self._graph.passes and not self.updates.deterministic:
            raise ValueError(
                "passes of one chunk, such as slices of a sequence, add up their gradients in any order, so that bits "
                "may differ: leave verifications out, run whole sequences, or make the run deterministic"
            )
        # On CPU, programs of the same thread pool give the same bits; elsewhere the first verification tells.
        require_determinism([device for device in jax.local_devices() if device.platform != "cpu"])

    def verify(self, state: PipelineState, microbatch: Mapping[str, Any]) -> Verification:
        """Runs one microbatch forward and backward on all replicas, and compares the bits of their results.

        Blocks until the steps enqueued and this one have ended. Nothing of training changes by it. ``microbatch`` is a
        batch of a single one, of which every process has all leaves that chunks hosted there read. All processes call
        this method alike, and get the same. A replica that is alone runs it twice, which finds faults that come and go.

        Raises ValueError as :meth:`check_verifies`, and otherwise as ``step``.
        """
        self._held(state)
        self.check_verifies()
        running = self._running()
        leaves = leaves_read(self.chunks, microbatch, may_lack=self._may_lack, copied_for=self._model.base_chunks)
        if (number := num_microbatches(leaves)) != 1:
            raise ValueError(f"the batch has {number} microbatches, and a verification runs one: give a single one")
        copies = running.copies
        places = {replica * copies.num_microbatches: 0 for replica in range(copies.num_replicas)}
        numbers = running.buckets.numbers(leaves)
        batch, absent = placed(leaves, places, numbers, running.skipped, copies)
        batch = batch._replace(step=self._step, verifies=True)
        owners, graph = self._checked_owners(running, None)
        weights = running.weights.of(batch.buckets, graph)
        sums, stop, save = list[Any](), False, False
        for _ in range(1 if copies.num_replicas > 1 else 2):
            future = running.runtime.submit(self._turn, batch, absent, weights, owners=owners, trained=self._step)
            self._turn += 1
            outcome = StepMetrics(future, self._hold, lambda ended: ended).result()
            sums += [each for stage in outcome.stages.values() for each in stage.sums]
            stop, save = stop or outcome.result.stop, save or outcome.result.save
        return Verification(difference=result_difference(self.process, sums), stop=stop, save=save)

    def _own_numbers(self, order: Sequence[int] | None, num_microbatches: int) -> tuple[int, ...]:
        """Returns the order of a step's microbatches, nothing where they stay as they come; raises ValueError for one
        that a step cannot have."""
        if order is None:
            return ()
        given: Any = order  # callers without a type checker may give anything
        numbers: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
        if not all(map(is_whole, numbers)) or sorted(numbers) != list(range(num_microbatches)):
            raise ValueError(f"order is {with_type(order)}: give the numbers 0 to {num_microbatches - 1}, each once")
        share = num_microbatches // self.layout.data
        for place, own in enumerate(numbers):
            if own // share != place // share:
                raise ValueError(
                    f"order has microbatch {own} of replica {own // share} in place {place}, of replica "
                    f"{place // share}: reorder the microbatches of each replica among themselves"
                )
        return () if self.updates.deterministic else tuple(map(int, numbers))

    def _checked_owners(self, running: Prepared, owners: StepOwners | None) -> tuple[StepOwners | None, PipelineGraph]:
        """Returns the owners of a step, and the graph of all replicas with them; raises ValueError where a step cannot
        have these."""
        if owners is None:
            if (own := running.owners) is None:
                return None, running.order.graph
            # Where ranks may be lost the recovery gives the microbatches of absent units to others, as those of lost.
            given = None if self.process.recovers else own
            return given, with_owners(running.order.graph, running.order.placement, own)
        if not self.options.other_owners:
            raise ValueError("replicas were not connected for other owners: give the pipeline's options other_owners")
        if owners.lost:
            raise ValueError(f"units {list(owners.lost)} are named as lost, and all of them live: leave lost out")
        owners = owners._replace(lost=self.layout.absent)
        graph = with_owners(running.order.graph, running.order.placement, owners)
        if self.updates.deterministic and self.updates.by_messages(self.layout.data):
            check_blocks(graph)
        return owners, graph

    def _make_room(self) -> None:
        """Wait until one more step may be enqueued."""
        # Steps that have ended leave too: the failure of one is raised by the next call, not by the one after it.
        while self._enqueued and (
            len(self._enqueued) >= _MAX_STEPS_ENQUEUED + bool(self.updates.delay) or self._enqueued[0].done()
        ):
            self._wait_for_oldest()

    def _absent(
        self, running: Prepared, buckets: Sequence[int], absent: Iterable[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Returns the (chunk, microbatch) pairs skipped because leaves are lacking, and those given in ``absent``."""
        skipped = running.skipped
        pairs = [(chunk, microbatch) for microbatch, bucket in enumerate(buckets) for chunk in skipped[bucket]]
        for chunk, microbatch in self._checked_pairs("absent", absent, len(buckets)):
            for successor in self._graph.successors(chunk):
                if chunk in self._graph.optional_predecessors(successor) and microbatch < len(buckets):
                    raise ValueError(
                        f"chunk {chunk} is an optional input of chunk {successor}, which runs without it where the "
                        f"microbatch lacks its leaves: leave these out of microbatch {microbatch}, not the pair"
                    )
            pairs.append((chunk, microbatch))
        return pairs

    def _checked_pairs(
        self, name: str, pairs: Iterable[tuple[int, int]], num_microbatches: int
    ) -> Iterator[tuple[int, int]]:
        given: Iterable[Any] = pairs  # the annotation promises pairs, but callers without a type checker may not
        for pair in given:
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(is_whole, pair))):
                raise ValueError(f"{name} has {with_type(pair)}: give pairs of a chunk and a microbatch")
            chunk, microbatch = pair
            if not (0 <= chunk < len(self.chunks) and 0 <= microbatch < num_microbatches):
                raise ValueError(
                    f"{name} has chunk {chunk} with microbatch {microbatch}: there are {len(self.chunks)} chunks and "
                    f"{num_microbatches} microbatches, counted from 0"
                )
            yield chunk, microbatch

    def _checked_left_out(
        self, left_out: Iterable[tuple[int, int]], skipped: Iterable[tuple[int, int]], num_microbatches: int
    ) -> frozenset[tuple[int, int]]:
        """Returns the pairs of the step whose weight gradient it leaves out; raises ValueError where it cannot."""
        graph, lacking = self._graph, set(self._checked_pairs("left_out", left_out, num_microbatches))
        for chunk in sorted({chunk for chunk, _ in lacking}):
            if not graph.trains(chunk):
                raise ValueError(f"left_out has chunk {chunk}, which has no weight gradient: leave it out of left_out")
            if chunk not in graph.split:
                raise ValueError(
                    f"left_out has chunk {chunk}, whose backward runs in one piece: take a schedule or hint that "
                    "splits it, such as 1f1b-split, zb-h1 or bfw"
                )
        lacking.difference_update(skipped)
        trained = [chunk for chunk in range(len(self.chunks)) if graph.trains(chunk)]
        gone = sum(graph.trains(chunk) for chunk, _ in set(skipped))
        if lacking and len(lacking) >= len(trained) * num_microbatches - gone:
            raise ValueError("left_out has every weight gradient of the step, and nothing would train: leave out fewer")
        return frozenset(lacking)

    def wait(self) -> None:
        """Wait for all steps enqueued."""
        self._hold.check_process()
        while self._enqueued:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest enqueued step. A step that failed stays in the queue, so that nobody goes on from half of
        an update."""
        self._enqueued[0].result()
        self._enqueued.popleft()

    @typed
    def prepare(
        self,
        batch: Mapping[str, Any],
        *,
        buckets: Iterable[Mapping[str, Any]] | None = None,
        evaluation: EvaluationShapes | None = None,
        progress: CompileProgress = lambda done, total: None,
    ) -> None:
        """Compile every program for microbatches of these shapes and start the stages, if not done yet.

        ``batch`` is like those of ``step``, of arrays or specs. ``buckets`` are the shapes that microbatches may have,
        each with a spec or array for every leaf that such a microbatch has; None: those of ``batch``.
        ``evaluation`` has the shapes of :meth:`evaluate`; None: it will not be called.
        ``progress`` is called with the number of programs that this process has compiled and of all that it compiles,
        from 0 on, one call at a time, from any thread; not at all where nothing is left to compile.

        ``step`` does so by itself with its first batch. Raises ValueError where chunks, graph and shapes do not fit.
        """
        self._check_here()
        self._prepared(batch, buckets, progress, evaluation)

    def compile_only(
        self,
        buckets: Iterable[Mapping[str, Any]],
        num_microbatches: int,
        *,
        evaluation: EvaluationShapes | None = None,
        progress: CompileProgress = lambda done, total: None,
    ) -> CompiledOnly:
        """Compile every program for devices that are not here (``Process.compile_only``), and start nothing.

        ``buckets`` are the shapes that microbatches may have; ``num_microbatches`` is that of a step, over all
        replicas; ``evaluation`` and ``progress`` are those of :meth:`prepare`. Returns the programs of the first
        replica of every stage, and the predicted memory of every unit. Raises ValueError where chunks, graph and shapes
        do not fit.
        """
        return compile_only(
            self._model,
            self._graph,
            Buckets(self.chunks, buckets),
            num_microbatches,
            ordering=self.ordering,
            options=self.options,
            progress=progress,
            evaluation=evaluation,
        )

    @typed
    def reads(self, num_microbatches: int) -> dict[str, range]:
        """Returns, for every leaf, the microbatches of which this process reads it; a data set must make them here."""
        share = microbatches_per_replica(num_microbatches, self.layout.data)
        reads: dict[str, range] = {}
        for base in self._model.base_chunks:
            replicas = sorted(self._model.numbers(base))
            own = range(replicas[0] * share, (replicas[-1] + 1) * share)
            if self.process.recovers or self.layout.absent:  # those of a lost or absent replica may come here
                own = range(num_microbatches)
            for name in self.chunks[base].leaves:
                # One range over all chunks that read the leaf: data sets make consecutive microbatches.
                known = reads.get(name, own)
                reads[name] = range(min(known.start, own.start), max(known.stop, own.stop))
        return reads

    def _prepared(
        self,
        batch: Mapping[str, Any],
        buckets: Iterable[Mapping[str, Any]] | None = None,
        progress: CompileProgress = lambda done, total: None,
        evaluation: EvaluationShapes | None = None,
    ) -> Prepared:
        if self._preparation is None:
            if self._state is None:
                raise RuntimeError("the pipeline holds no parameters yet: call init first")
            if evaluation is not None and self._model.num_shares > 1 and self._model.keeps_averages:
                raise ValueError(
                    "each replica holds shares of the optimizer state, and so of the averages with which steps "
                    "evaluate: give reduce collective, no shard_optimizer, or no evaluation"
                )
            if evaluation is not None and evaluation.in_idle_time:
                check_beside(self.process, delay=bool(self.updates.delay))
            # Compiling needs shapes alone, so no leaf is copied.
            leaves = leaves_read(self.chunks, batch, may_lack=self._may_lack, copied_for=())
            self._preparation = prepare_pipeline(
                self._model,
                self._graph,
                self._state,
                Buckets(self.chunks, buckets_of(leaves) if buckets is None else buckets),
                num_microbatches(leaves),
                step=self._step,
                ordering=self.ordering,
                options=self.options,
                progress=progress,
                evaluation=evaluation,
            )
            # From here on threads run that refer to the runtime, so it is never collected: the hold closes it for those
            # who do not.
            self._hold.keep_open(self._preparation.runtime)
        return self._preparation

    def close(self) -> None:
        """Stop the stages; steps under way are abandoned."""
        self._hold.check_process()
        if self._preparation is not None:
            self._preparation.runtime.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def order(self) -> Order:
        """The order in force, of all replicas, once the pipeline is prepared."""
        return self._running().order

    @property
    def forecast(self) -> tuple[StageForecast, ...]:
        """The predicted memory of every unit, once the pipeline is prepared."""
        return self._running().forecast

    @property
    def chunk_sizes(self) -> Mapping[int, ChunkSizes]:
        """The sizes in bytes of each chunk that this process hosts, once the pipeline is prepared."""
        return self._running().sizes

    @property
    def runtime(self) -> PipelineRuntime:
        """The running stages, for their event logs."""
        runtime = self._running().runtime
        return runtime.runtime if isinstance(runtime, RecoveringRuntime) else runtime

    def _running(self) -> Prepared:
        if self._preparation is None:
            raise RuntimeError("the pipeline has not been prepared: call prepare or step first")
        return self._preparation


def _fitted_process(process: Process | None, placement: Placement, updates: UpdateRules) -> Process:
    """Returns the process given, or one that is alone; raises ValueError where it does not fit the pipeline."""
    if process is None:
        process = Process.alone(placement.num_stages)
    layout = process.layout
    if layout.num_stages != placement.num_stages:
        raise ValueError(
            f"the process is part of {layout.describe()}, but the pipeline has {placement.num_stages} stages: "
            "give both the same"
        )
    if updates.shard_optimizer and layout.data == 1:
        raise ValueError(
            "shard_optimizer shares the optimizer state out to replicas: give a process whose layout has data of at "
            "least 2"
        )
    return process


def _check_key(key: Any) -> None:
    if not isinstance(key, jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.dtype == jnp.uint32
    ):
        raise ValueError(f"key is {with_type(key)}: give a random key, such as jax.random.key(0)")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape:
        raise ValueError(f"key holds {key.size} random keys of shape {key.shape}: give a single one, such as key[0]")
