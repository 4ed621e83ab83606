"""The object that a user holds: chunks, a placement, an order and an optimizer, assembled into a running pipeline.

::

    pipeline = Pipeline(chunks, placement=linear(4), hint="bf", window=8, optimizer=optax.adamw(3e-4))
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.step(state, batch)      # batch leaves: [num_microbatches, ...]
    print(metrics.result().loss)
"""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from rrfp_jax.arbitration import Agreement, Ordering, StageArbiter, StepRules
from rrfp_jax.programs.agreement import Verdict, check_clip_norm
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.chunk_programs import ChunkPrograms, compile_chunk
from rrfp_jax.programs.initial import ChunkState, initial_state
from rrfp_jax.programs.optimizers import check_leafwise
from rrfp_jax.programs.shapes import derive_shapes, holders
from rrfp_jax.programs.specs import spec_of
from rrfp_jax.runtime import Deliver, InProcessTransport, PipelineRuntime, StepOutcome
from rrfp_jax.runtime.program_stage import ProgramStage, UpdateRules
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.tasks import Edge, PipelineGraph, Placement
from rrfp_jax.timeline import Timeline

_MAX_STEPS_ENQUEUED = 2
NO_PAIRS: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step gave."""

    step: int
    loss: float
    """Summed loss over total weight."""
    weight: float
    """Total weight, for a language model the number of tokens."""
    grad_norm: float | None
    """Global norm of the gradient of ``loss`` before clipping; None where neither clipping nor skipping asks for it."""
    skipped: bool
    """Whether the update was left out because loss or gradients were not finite."""
    timeline: Timeline
    """When every task ran, and why stages were idle."""
    ended_s: float
    """When the step had ended on all stages (``time.perf_counter``)."""


class StepMetrics:
    """The result of an enqueued step; ``result()`` waits for it."""

    def __init__(self, future: "Future[StepOutcome]", *, has_norm: bool) -> None:
        self._future, self._has_norm = future, has_norm

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> StepResult:
        """Wait for the end of the step. Raises RunFailed, with the wait-for report, if the run cannot go on."""
        outcome = self._future.result()
        verdict: Verdict = next(iter(outcome.outcomes.values()))
        return StepResult(
            step=outcome.step,
            loss=verdict.loss,
            weight=verdict.weight,
            grad_norm=verdict.grad_norm if self._has_norm else None,
            skipped=not verdict.apply,
            timeline=outcome.timeline,
            ended_s=outcome.ended_s,
        )


@dataclass(frozen=True)
class PipelineState:
    """A handle on what the stages hold after ``step`` steps. ``Pipeline.step`` consumes it and returns the next."""

    step: int


class Pipeline:
    """Trains a model cut into chunks.

    Args:
        chunks: the model's chunks, numbered as in ``placement``; see :class:`rrfp_jax.programs.chunk.Chunk`.
        placement: which stage owns which chunk; None takes the schedule's.
        optimizer: any optax optimizer that treats each array by itself.
        hint, consume, schedule, window: the order of tasks; see :class:`rrfp_jax.arbitration.Ordering`.
        edges: which chunk feeds which; None means a chain.
        devices: one device per stage, in order; None takes the first ones that JAX knows, shared out evenly if there
            are fewer than stages.
        clip_norm: largest global norm of the gradient; None: no clipping.
        skip_nonfinite: leave out a step whose loss or gradients are not finite.
        ordered: accumulate gradients in microbatch order.
        seed: of the random keys that chunks read.
        progress_deadline_s: how long no task may finish before the run is given up with a report; longer than any task.

    Programs are compiled for the shapes of the first batch, before its first message.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        optimizer: optax.GradientTransformation,
        placement: Placement | None = None,
        hint: str | None = None,
        consume: str = "ready",
        schedule: ScheduleTable | None = None,
        window: int | tuple[int, ...] | None = None,
        edges: Sequence[Edge] | None = None,
        devices: Sequence[jax.Device] | None = None,
        clip_norm: float | None = 1.0,
        skip_nonfinite: bool = True,
        ordered: bool = False,
        seed: int = 0,
        progress_deadline_s: float = 600.0,
        log_steps: int = 2,
    ) -> None:
        self.chunks = tuple(chunks)
        self.placement = _placement(self.chunks, placement, schedule)
        self._set_order(Ordering(hint=hint, consume=consume, table=schedule, window=window))
        check_clip_norm(clip_norm)
        self._update_rules = UpdateRules(clip_norm=clip_norm, skip_nonfinite=skip_nonfinite)
        agreement = Agreement.ALL if self._update_rules.needs_norm else Agreement.LOSS
        self._step_rules = StepRules(ordered=ordered, agreement=agreement)
        self._edges = tuple(edges) if edges is not None else tuple(Edge(c, c + 1) for c in range(len(chunks) - 1))
        self._optimizer, self._seed, self._log_steps = optimizer, seed, log_steps
        self._progress_deadline_s = progress_deadline_s
        self._shardings = _shardings(self.placement.num_stages, devices)
        self._initial: dict[int, ChunkState] | None = None
        self._stages: list[ProgramStage] = []
        self._programs: dict[int, ChunkPrograms] = {}
        self._batch_spec: Any = None
        self.graph = PipelineGraph(len(self.chunks), 1, self._edges, shared=_shared_groups(self.chunks))
        """For the number of microbatches of the batches prepared for; until then for one."""
        self._runtime: PipelineRuntime | None = None
        self._enqueued: deque[StepMetrics] = deque()
        self._step = 0

    def reordered(
        self,
        *,
        hint: str | None = None,
        consume: str = "ready",
        schedule: ScheduleTable | None = None,
        window: int | tuple[int, ...] | None = None,
    ) -> "Pipeline":
        """A pipeline of its own that differs in the order of tasks only; compiled programs are shared.

        For comparing schedules: the new one starts with ``init`` and need not compile what this one has compiled.
        """
        twin = copy(self)
        twin._set_order(Ordering(hint=hint, consume=consume, table=schedule, window=window))
        twin._initial, twin._stages, twin._runtime, twin._enqueued, twin._step = None, [], None, deque(), 0
        return twin

    def _set_order(self, ordering: Ordering) -> None:
        self.ordering = ordering
        self._consumptions = ordering.consumptions(self.placement)
        self.windows = ordering.windows(self.placement)

    # -- state -------------------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> PipelineState:
        """Initialise parameters and optimizer state on the stages' devices; ``key`` is a typed random key.

        The result does not depend on where the model is cut.
        """
        if self._runtime is not None:
            raise RuntimeError("this pipeline has been stepped already: make a new one to start over")
        self._initial = {
            chunk: initial_state(
                self.chunks, chunk, key, self._optimizer, self._sharding(chunk), trains=self.graph.has_backward(chunk)
            )
            for chunk in range(len(self.chunks))
        }
        check_leafwise(self._optimizer, self._merged({c: spec_of(s.params) for c, s in self._initial.items()}))
        return PipelineState(self._step)

    def params(self, state: PipelineState) -> dict[str, Any]:
        """The whole model's parameters by layer name, on their stages' devices; waits for the steps enqueued.

        The arrays are those in use: copy them before the next ``step``, which takes them over.
        """
        self._check_state(state)
        self.wait()
        return self._merged({chunk: held.params for chunk, held in self._held().items()})

    def num_params(self) -> list[int]:
        """How many parameters each stage holds; copies of shared ones count on every stage."""
        shapes = [jax.eval_shape(chunk.init, jax.random.key(0)) for chunk in self.chunks]
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(shape)) for shape in shapes]
        return [sum(sizes[c] for c in chunks) for chunks in self.placement.chunks_of_stage]

    def _held(self) -> dict[int, ChunkState]:
        if self._initial is not None:
            return self._initial
        return {chunk: held for stage in self._stages for chunk, held in stage.states.items()}

    def _merged(self, params: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Parameters by layer name; a shared layer is its lowest holder's copy."""
        merged: dict[str, Any] = {}
        for chunk in sorted(params):
            merged |= {name: layer for name, layer in params[chunk].items() if name not in merged}
        return merged

    def _check_state(self, state: PipelineState) -> None:
        if self._initial is None and self._runtime is None:
            raise RuntimeError("the pipeline holds no parameters yet: call init first")
        if state.step != self._step:
            raise ValueError(
                f"this state was consumed by step {state.step}: use the one that the last call of step returned"
            )

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(
        self, state: PipelineState, batch: Mapping[str, Any], *, absent: frozenset[tuple[int, int]] = NO_PAIRS
    ) -> tuple[PipelineState, StepMetrics]:
        """Enqueue one training step; returns as soon as it is enqueued, at most one step ahead of the running one.

        Args:
            state: what ``init`` or the last ``step`` returned; it is consumed.
            batch: arrays [num_microbatches, ...], at least the leaves that the chunks read.
            absent: (chunk, microbatch) pairs that this batch does not have, for example images that are missing.

        Raises ValueError on a batch that does not fit, before anything has changed, and RunFailed if the run has ended.
        """
        self._check_state(state)
        self.prepare(batch)
        leaves = self._leaves(batch)
        self._check_batch(leaves, absent)
        assert self._runtime is not None
        while len(self._enqueued) >= _MAX_STEPS_ENQUEUED:
            self._enqueued.popleft().result()
        future = self._runtime.submit(self._step, leaves, absent)
        metrics = StepMetrics(future, has_norm=self._update_rules.needs_norm)
        self._enqueued.append(metrics)
        self._step += 1
        return PipelineState(self._step), metrics

    def wait(self) -> None:
        """Wait for all steps enqueued."""
        while self._enqueued:
            self._enqueued.popleft().result()

    def prepare(self, batch: Mapping[str, Any]) -> None:
        """Compile every program for batches of these shapes (arrays or specs) and start the stages, if not done yet.

        ``step`` does so by itself with its first batch. Raises ValueError where chunks, graph and batch do not fit.
        """
        if self._runtime is not None:
            return
        if self._initial is None:
            raise RuntimeError("the pipeline holds no parameters yet: call init first")
        spec = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in self._leaves(batch).items()}
        graph = self._make_graph(spec)
        if not self._programs or spec != self._batch_spec or graph != self.graph:
            self._programs = self._compile(graph, spec)
        self.graph, self._batch_spec = graph, spec
        self._start_runtime()

    def _compile(self, graph: PipelineGraph, batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[int, ChunkPrograms]:
        microbatch = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in batch.items()}
        shapes = derive_shapes(self.chunks, graph, microbatch)

        def compile_one(chunk: int) -> ChunkPrograms:
            return compile_chunk(
                chunk,
                self.chunks,
                graph,
                shapes,
                optimizer=self._optimizer,
                sharding=self._sharding(chunk),
                seed=self._seed,
            )

        # XLA releases the GIL while it compiles
        with ThreadPoolExecutor(thread_name_prefix="compile") as executor:
            return dict(enumerate(executor.map(compile_one, range(len(self.chunks)))))

    def close(self) -> None:
        """Stop the stages; steps under way are abandoned."""
        if self._runtime is not None:
            self._runtime.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def runtime(self) -> PipelineRuntime:
        """The running stages, for their event logs."""
        if self._runtime is None:
            raise RuntimeError("the pipeline has not been prepared: call prepare or step first")
        return self._runtime

    def _start_runtime(self) -> None:
        assert self._initial is not None
        held, num_stages = self._initial, self.placement.num_stages
        transport: InProcessTransport

        def make_transport(deliver: Deliver) -> InProcessTransport:
            nonlocal transport
            transport = InProcessTransport(deliver, dict(enumerate(self._shardings)))
            return transport

        def ship(value: Any, stage: int) -> Any:
            return transport.ship(value, stage)

        for stage in range(num_stages):
            chunks = self.placement.chunks_of_stage[stage]
            self._stages.append(
                ProgramStage(
                    self.graph,
                    self.placement,
                    stage,
                    programs={c: self._programs[c] for c in chunks},
                    states={c: held[c] for c in chunks},
                    update_rules=self._update_rules,
                    step_rules=self._step_rules,
                    ship=ship,
                )
            )
        arbiters = [
            StageArbiter(
                self.graph,
                self.placement,
                stage,
                consumption=self._consumptions[stage],
                window=self.windows[stage],
                rules=self._step_rules,
            )
            for stage in range(num_stages)
        ]
        self._runtime = PipelineRuntime(
            arbiters,
            self._stages,
            make_transport,
            progress_deadline_s=self._progress_deadline_s,
            log_steps=self._log_steps,
        )
        self._initial = None

    def _make_graph(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> PipelineGraph:
        sizes = {name: leaf.shape[0] for name, leaf in batch.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"batch leaves have different numbers of microbatches: {sizes}; make all of them equal")
        graph = replace(self.graph, num_microbatches=next(iter(sizes.values())), absent=frozenset())
        table = self.ordering.table
        if table is None:
            return graph
        if table.graph.split:
            raise ValueError(
                f"table {table.name!r} splits the backward into I and W, which this pipeline's programs do not: "
                "choose a schedule with a full backward"
            )
        if table.graph.num_microbatches != graph.num_microbatches or set(table.graph.edges) != set(graph.edges):
            raise ValueError(
                f"table {table.name!r} is for {table.graph.num_microbatches} microbatches and edges "
                f"{_edge_text(table.graph.edges)}, the batch and the chunks have {graph.num_microbatches} and "
                f"{_edge_text(graph.edges)}: build the table for these"
            )
        return graph.skipping(table.graph.absent)

    def _leaves(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        wanted = sorted({name for chunk in self.chunks for name in chunk.leaves})
        missing = [name for name in wanted if name not in batch]
        if missing:
            raise ValueError(f"the batch lacks {', '.join(missing)}: it has {', '.join(sorted(batch)) or 'nothing'}")
        leaves = {name: batch[name] for name in wanted}
        for name, leaf in leaves.items():
            if not getattr(leaf, "shape", ()):
                raise ValueError(f"batch leaf {name!r} has no microbatch axis: give an array [num_microbatches, ...]")
        return {
            name: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf) for name, leaf in leaves.items()
        }

    def _check_batch(self, leaves: Mapping[str, Any], absent: frozenset[tuple[int, int]]) -> None:
        for name, leaf in leaves.items():
            spec = self._batch_spec[name]
            if leaf.shape != spec.shape or leaf.dtype != spec.dtype:
                raise ValueError(
                    f"batch leaf {name!r} is {leaf.dtype}{list(leaf.shape)}, but the programs were compiled for "
                    f"{spec.dtype}{list(spec.shape)}: pad every batch to one shape"
                )
        if absent:
            self.graph.skipping(self.graph.absent | absent)

    def _sharding(self, chunk: int) -> jax.sharding.Sharding:
        return self._shardings[self.placement.stage_of_chunk[chunk]]


def _placement(chunks: tuple[Chunk, ...], placement: Placement | None, table: ScheduleTable | None) -> Placement:
    if placement is None:
        if table is None:
            raise ValueError("no placement is given: pass placement=linear(num_stages), looped(...), or a schedule")
        placement = table.placement
    if placement.num_chunks != len(chunks):
        raise ValueError(
            f"{len(chunks)} chunks do not fit a placement of {placement.num_chunks} chunks on {placement.num_stages} "
            f"stages: cut the model into {placement.num_chunks} chunks"
        )
    return placement


def _shardings(num_stages: int, devices: Sequence[jax.Device] | None) -> list[jax.sharding.Sharding]:
    if devices is None:
        known = jax.local_devices()
        devices = [known[stage * min(len(known), num_stages) // num_stages] for stage in range(num_stages)]
    if len(devices) != num_stages:
        raise ValueError(f"{len(devices)} devices are given for {num_stages} stages: give one device per stage")
    return [jax.sharding.SingleDeviceSharding(device) for device in devices]


def _shared_groups(chunks: tuple[Chunk, ...]) -> tuple[tuple[int, ...], ...]:
    names = sorted({name for chunk in chunks for name in chunk.shared})
    return tuple(sorted({tuple(holders(chunks, name)) for name in names}))


def _edge_text(edges: Sequence[Edge]) -> str:
    return ", ".join(f"{e.source}->{e.target}" for e in sorted(edges))
