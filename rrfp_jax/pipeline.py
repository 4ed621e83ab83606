"""The object that a user holds: chunks, a placement, an order and an optimizer, assembled into a running pipeline.

::

    pipeline = Pipeline(chunks, placement=linear(4), hint="bf", window=8, optimizer=optax.adamw(3e-4))
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.step(state, batch)      # batch leaves: [num_microbatches, ...]
    print(metrics.result().loss)
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from rrfp_jax.arbitration import READY, STRICT, Agreement, GroupProtocol, Ordering, StepRules
from rrfp_jax.arbitration.replicas import microbatches_per_replica, replication
from rrfp_jax.planning.layout import Layout
from rrfp_jax.planning.memory import ChunkBytes, StageForecast, check_fits, parse_bytes, window_of_bytes
from rrfp_jax.programs.agreement import check_clip_norm
from rrfp_jax.programs.batches import BatchSpec, check_same_shapes, leaves_read, num_microbatches, spec_of_batch
from rrfp_jax.programs.chunk import Chunk, check_seed, param_specs
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.model_graph import fitted_placement, model_graph
from rrfp_jax.programs.optimizers import check_leafwise
from rrfp_jax.programs.remat import Remat, remat_of_chunks
from rrfp_jax.programs.shapes import model_params
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.runtime import PipelineRuntime, StageExecutor, StepMetrics
from rrfp_jax.runtime.determinism import require_determinism
from rrfp_jax.runtime.driver import check_runtime_options
from rrfp_jax.runtime.everybodys import gather_sizes
from rrfp_jax.runtime.hosted import HostedModel, HostedPrograms, HostedState
from rrfp_jax.runtime.hosted_stages import stage_maker
from rrfp_jax.runtime.memory import chunk_bytes, forecast_memory
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.program_stage import UpdateRules
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.tasks import Edge, Placement

Window = int | tuple[int, ...] | str | None
_MAX_STEPS_ENQUEUED = 2


@dataclass(frozen=True)
class PipelineState:
    """A handle on what the stages hold after ``step`` steps. ``Pipeline.step`` consumes it and returns the next."""

    step: int


class Pipeline:
    """Trains a model cut into chunks.

    Args:
        chunks: the model's chunks, numbered as in ``placement``; see :class:`rrfp_jax.programs.chunk.Chunk`.
        placement: which stage owns which chunk; None takes the schedule's.
        data: replicas of the whole pipeline; each runs an equal part of the microbatches.
        tensor: devices that share every layer of a stage, as the chunks' ``partition`` says.
        shard_optimizer: share the optimizer state out to the replicas (ZeRO-1).
        process: this process's part in a run of several, connected; ``data`` and ``tensor`` are then its layout's.
            Every process makes the same pipeline and calls the same methods with the same arguments.
        group_protocol: how the processes of a stage that spans several agree on the next task.
        optimizer: any optax optimizer that treats each array by itself.
        hint, consume, schedule, window, backward: the order of tasks; see :class:`rrfp_jax.arbitration.Ordering`. The
            window is a number of microbatches, one per stage, or the memory that a stage's microbatches in flight may
            take, for example ``"512MiB"``.
        edges: which chunk feeds which; None means the schedule's, or a chain without a schedule.
        devices: the devices of all stages, in order, for each stage those of its replicas, for each replica ``tensor``
            ones; None takes the first ones that JAX knows, shared out evenly if there are fewer than stages.
        remat: what forwards keep and backwards recompute, for all chunks or one for each: ``none``, ``dots``, ``full``,
            or a policy of ``jax.checkpoint``.
        memory_limit: bytes that each stage may take, as a number or as text; None: what its device has, if that is
            known. A run that is predicted to need more is refused before its first step.
        clip_norm: largest global norm of the gradient; None: no clipping.
        skip_nonfinite: leave out a step whose loss or gradients are not finite.
        deterministic: the same bits whatever the order of tasks, at the price of accumulating in microbatch order.
            Refused where the machine's own sums are not reproducible.
        dispatch_ahead: how many tasks a stage may be handed before the running one has ended; hides the host's latency,
            and lets a task go ahead of a better one that becomes ready meanwhile.
        seed: of the random keys that chunks read.
        progress_deadline_s: how long no task may finish before the run is given up with a report; longer than any task.
        log_steps: how many steps of each stage's event log are kept.
        wrap_stage: put around every stage's executor, for example :class:`rrfp_jax.testing.DelayedStage`.

    Programs are compiled for the shapes of the first batch, before its first message.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        optimizer: optax.GradientTransformation,
        placement: Placement | None = None,
        data: int = 1,
        tensor: int = 1,
        shard_optimizer: bool = False,
        process: Process | None = None,
        group_protocol: GroupProtocol | str = GroupProtocol.LEADER,
        hint: str | None = None,
        consume: str = READY,
        schedule: ScheduleTable | None = None,
        window: Window = None,
        backward: str | None = None,
        edges: Sequence[Edge] | None = None,
        devices: Sequence[jax.Device] | None = None,
        remat: Remat | Sequence[Remat] = "none",
        memory_limit: int | str | None = None,
        clip_norm: float | None = 1.0,
        skip_nonfinite: bool = True,
        deterministic: bool = False,
        dispatch_ahead: int = 0,
        seed: int = 0,
        progress_deadline_s: float = 600.0,
        log_steps: int = 2,
        wrap_stage: Callable[[StageExecutor], StageExecutor] | None = None,
    ) -> None:
        self.chunks = tuple(chunks)
        self.placement = fitted_placement(self.chunks, placement, schedule)
        check_clip_norm(clip_norm)
        self._update_rules = UpdateRules(clip_norm=clip_norm, skip_nonfinite=skip_nonfinite)
        agreement = Agreement.ALL if self._update_rules.needs_norm else Agreement.LOSS
        self._process = _process(process, self.placement.num_stages, data, tensor, devices)
        self.layout = self._process.layout
        if shard_optimizer and self.layout.data == 1:
            raise ValueError("shard_optimizer shares the optimizer state out to replicas: give data at least 2")
        self._shard_optimizer = shard_optimizer
        self._step_rules = StepRules(ordered=deterministic, agreement=agreement, lockstep=self.layout.data > 1)
        self._group_protocol = GroupProtocol(group_protocol)
        self._edges = None if edges is None else tuple(edges)
        self._optimizer, self._log_steps = optimizer, log_steps
        self._progress_deadline_s, self._wrap_stage = progress_deadline_s, wrap_stage
        if deterministic:
            require_determinism(jax.local_devices())
        check_runtime_options(progress_deadline_s, log_steps)
        check_seed(seed)
        self._model = HostedModel(
            self.chunks,
            self.placement,
            self._process,
            optimizer=optimizer,
            shard_optimizer=shard_optimizer,
            ordered=deterministic,
            seed=seed,
            remat=remat_of_chunks(remat, len(self.chunks)),
        )
        if dispatch_ahead < 0:
            raise ValueError(f"dispatch_ahead is {dispatch_ahead}: give 0 or more tasks")
        self._dispatch_ahead = dispatch_ahead
        self._memory_limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
        self._compiled: dict[Hashable, HostedPrograms] = {}
        """By graph and batch; shared with the pipelines that ``reordered`` makes."""
        self._start_over(window, hint=hint, consume=consume, table=schedule, backward=backward)

    def reordered(
        self,
        *,
        hint: str | None = None,
        consume: str = READY,
        schedule: ScheduleTable | None = None,
        window: Window = None,
        backward: str | None = None,
        wrap_stage: Callable[[StageExecutor], StageExecutor] | None = None,
    ) -> "Pipeline":
        """A pipeline of its own that differs in the order of tasks only; compiled programs are shared.

        For comparing schedules: the new one starts with ``init`` and need not compile what this one has compiled. What
        is not given here takes its default, not this pipeline's value.
        """
        twin = copy(self)
        twin._wrap_stage = wrap_stage
        twin._start_over(window, hint=hint, consume=consume, table=schedule, backward=backward)
        return twin

    def _start_over(self, window: Window, **order: Any) -> None:
        self._window_bytes = parse_bytes(window) if isinstance(window, str) else None
        self._ordering = Ordering(window=None if isinstance(window, str) else window, **order)
        self._resolve(num_microbatches_per_replica=None)
        self.forecast: list[StageForecast] = []
        """The predicted memory of every unit, once the programs are compiled."""
        self._initial: HostedState | None = None
        self._held = HostedState({}, {})
        self._runtime: PipelineRuntime | None = None
        self._batch_spec: BatchSpec = {}
        self._enqueued: deque[StepMetrics] = deque()
        self._step = 0

    def _resolve(self, num_microbatches_per_replica: int | None) -> None:
        """Work out the order; without a number of microbatches it is that of the table, or one."""
        graph = model_graph(self.chunks, self._edges, self._ordering.table, num_microbatches_per_replica)
        self._graph = self._ordering.resolve(self.placement, graph).graph
        """Of one replica."""
        self.order = self._ordering.resolve(self.placement, graph, num_replicas=self.layout.data)
        """The order in force, of all replicas; without a table it is for one microbatch until a batch has come."""
        self._copies = replication(graph, self.layout.data)

    # -- state -------------------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> PipelineState:
        """Initialise parameters and optimizer state on the stages' devices; ``key`` is a typed random key.

        The result does not depend on where the model is cut.
        """
        if self._runtime is not None:
            raise RuntimeError("this pipeline has been stepped already: make a new one to start over")
        check_leafwise(self._optimizer, model_params(map(param_specs, self.chunks)))
        self._initial = self._model.initial_state(key, self._graph)
        return PipelineState(self._step)

    def params(self, state: PipelineState) -> dict[str, Any]:
        """The parameters by layer name, on their stages' devices; waits for the steps enqueued.

        Those of the whole model, or of the stages that this process hosts where there are several. The arrays are those
        in use: copy them before the next ``step``, which takes them over.
        """
        self._check_state(state)
        self.wait()
        held = self._held_state().chunks
        return model_params(held[chunk].params for chunk in sorted(held))

    def chunk_states(self, state: PipelineState) -> list[tuple[int, ChunkState]]:
        """The state of every chunk that this process hosts, copies of replicas included, with the chunk's number in
        the model; waits for the steps enqueued. The arrays are those in use, see :meth:`params`."""
        self._check_state(state)
        self.wait()
        return self._model.by_chunk(self._held_state())

    def state_specs(self) -> list[tuple[int, ChunkState]]:
        """What :meth:`chunk_states` returns, as shapes with shardings; nothing is computed."""
        return self._model.by_chunk(self._model.state_specs(self._graph))

    def restore(self, states: Sequence[ChunkState], step: int) -> PipelineState:
        """Go on after ``step`` steps from these states, one for each entry of :meth:`state_specs`, instead of ``init``.

        Takes the states over.
        """
        if self._runtime is not None:
            raise RuntimeError("this pipeline has been stepped already: make a new one to restore a state")
        check_leafwise(self._optimizer, model_params(map(param_specs, self.chunks)))
        self._initial, self._step = self._model.from_chunks(states, self._graph), step
        return PipelineState(step)

    def has_backward(self, chunk: int) -> bool:
        """Whether a chunk of the model trains."""
        return self._graph.has_backward(chunk)

    def num_params(self) -> list[int]:
        """How many parameters each stage holds; copies of shared ones count on every stage."""
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(param_specs(chunk))) for chunk in self.chunks]
        return [sum(sizes[c] for c in chunks) for chunks in self.placement.chunks_of_stage]

    def _held_state(self) -> HostedState:
        return self._held if self._initial is None else self._initial

    def _check_state(self, state: PipelineState) -> None:
        if self._initial is None and self._runtime is None:
            raise RuntimeError("the pipeline holds no parameters yet: call init first")
        if state.step != self._step:
            raise ValueError(
                f"this state was consumed by step {state.step}: use the one that the last call of step returned"
            )

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(
        self, state: PipelineState, batch: Mapping[str, Any], *, absent: Iterable[tuple[int, int]] = ()
    ) -> tuple[PipelineState, StepMetrics]:
        """Enqueue one training step; returns as soon as it is enqueued, at most one step ahead of the running one.

        Args:
            state: what ``init`` or the last ``step`` returned; it is consumed.
            batch: arrays [num_microbatches, ...], at least the leaves that the chunks read; they are copied.
            absent: (chunk, microbatch) pairs that this batch does not have, for example images that are missing.

        Raises ValueError on a batch that does not fit, before anything has changed, and PipelineClosed after ``close``.
        If the run fails, the step's result raises RunFailed, and so does this method once it is known.
        """
        self._check_state(state)
        absent = frozenset(absent)
        self.prepare(batch)
        absent = self._copies.pairs(absent)
        leaves = leaves_read(self.chunks, batch, copied_for=self._model.base_chunks)
        check_same_shapes(leaves, self._batch_spec)
        self.order.graph.skipping_also(absent)  # raises on pairs that cannot be absent
        while self._enqueued and (len(self._enqueued) >= _MAX_STEPS_ENQUEUED or self._enqueued[0].done()):
            self._wait_for_oldest()
        future = self.runtime.submit(self._step, leaves, absent)
        metrics = StepMetrics(future, has_norm=self._update_rules.needs_norm)
        self._enqueued.append(metrics)
        self._step += 1
        return PipelineState(self._step), metrics

    def wait(self) -> None:
        """Wait for all steps enqueued."""
        while self._enqueued:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """A step that failed stays in the queue, so that nobody goes on from half of an update."""
        self._enqueued[0].result()
        self._enqueued.popleft()

    def prepare(self, batch: Mapping[str, Any], *, progress: CompileProgress = lambda done, total: None) -> None:
        """Compile every program for batches of these shapes (arrays or specs) and start the stages, if not done yet.

        ``progress`` is called with the number of programs that this process has compiled and of all that it compiles,
        from 0 on, one call at a time, from any thread; not at all where nothing is left to compile.

        ``step`` does so by itself with its first batch. Raises ValueError where chunks, graph and batch do not fit.
        """
        if self._runtime is not None:
            return
        if self._initial is None:
            raise RuntimeError("the pipeline holds no parameters yet: call init first")
        spec = spec_of_batch(leaves_read(self.chunks, batch, copied_for=()))
        self._resolve(microbatches_per_replica(num_microbatches(spec), self.layout.data))
        with self._process.relying_on_others():
            programs = self._programs(spec, progress)
            self._fit_into_memory({c: chunk_bytes(each) for c, each in programs.chunks.items()})
            self._model.connect()
        self._start_runtime(self._initial, programs)
        self._held, self._initial, self._batch_spec = self._initial, None, spec

    def close(self) -> None:
        """Stop the stages; steps under way are abandoned."""
        if self._runtime is not None:
            self._runtime.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process(self) -> Process:
        """This process's part in the run."""
        return self._process

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return self._optimizer

    @property
    def shards_optimizer(self) -> bool:
        """Whether the replicas share the optimizer state."""
        return self._shard_optimizer

    @property
    def runtime(self) -> PipelineRuntime:
        """The running stages, for their event logs."""
        if self._runtime is None:
            raise RuntimeError("the pipeline has not been prepared: call prepare or step first")
        return self._runtime

    # -- assembly ----------------------------------------------------------------------------------------------------

    def _programs(self, batch: BatchSpec, progress: CompileProgress) -> HostedPrograms:
        key = (self._graph, tuple(sorted(batch.items())))
        if key not in self._compiled:
            self._compiled[key] = self._model.compile(self._graph, batch, progress)
        return self._compiled[key]

    def _fit_into_memory(self, own: Mapping[int, ChunkBytes]) -> None:
        """Turn a window in bytes into microbatches, and refuse what cannot fit; every process knows all sizes."""
        sizes, known = gather_sizes(self._process, own)
        chunks, share = self.order.placement.chunks_of_stage, self._graph.num_microbatches
        if self._window_bytes is not None:
            windows = tuple(
                window_of_bytes(self._window_bytes, [sizes[c] for c in chunks[stage]], stage, share)
                for stage in range(self.layout.num_stages)
            )
            self._ordering = replace(self._ordering, window=windows)
            self._resolve(share)
        self.forecast = forecast_memory(self.order, sizes, share)
        limit = self._memory_limit
        units = range(self.layout.num_units)
        check_fits(
            self.forecast,
            [known[unit] if limit is None else limit for unit in units],
            is_strict=self._ordering.consume == STRICT,
        )

    def _start_runtime(self, state: HostedState, programs: HostedPrograms) -> None:
        make_stage = stage_maker(
            self._model,
            self._process,
            self.order,
            state,
            programs,
            copies=self._copies,
            update_rules=self._update_rules,
            step_rules=self._step_rules,
        )
        wrap = self._wrap_stage or (lambda stage: stage)
        self._runtime = self._process.start(
            self.order.arbiters(
                self._step_rules,
                dispatch_ahead=self._dispatch_ahead,
                members=self._process.members(),
                protocol=self._group_protocol,
            ),
            lambda unit, ship: wrap(make_stage(unit, ship)),
            edge=lambda message: self._model.edge(message, programs.shapes),
            progress_deadline_s=self._progress_deadline_s,
            log_steps=self._log_steps,
        )


def _process(
    process: Process | None, num_stages: int, data: int, tensor: int, devices: Sequence[jax.Device] | None
) -> Process:
    """The process given, or one that is alone, on these devices."""
    if process is not None:
        layout = process.layout
        if layout.num_stages != num_stages or (data, tensor) not in ((1, 1), (layout.data, layout.tensor)):
            raise ValueError(
                f"the process is part of {layout.describe()}, but the pipeline has {num_stages} stages, data {data} "
                f"and tensor {tensor}: give both the same"
            )
        if devices is not None:
            process.use_devices(devices)
        return process
    process = Process(Layout(num_stages=num_stages, data=data, tensor=tensor))
    wanted, known = process.layout.num_devices, jax.local_devices()
    if devices is None and len(known) < wanted == num_stages:
        devices = [known[stage * len(known) // num_stages] for stage in range(num_stages)]
    if devices is not None:
        process.use_devices(devices)
    return process
