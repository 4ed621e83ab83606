"""The object that a user holds: chunks, a placement, an order and an optimizer, assembled into a running pipeline.

::

    pipeline = Pipeline(chunks, placement=linear(4), hint="bf", window=8, optimizer=optax.adamw(3e-4))
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.step(state, batch)      # batch leaves: [num_microbatches, ...]
    print(metrics.result().loss)
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from rrfp_jax.arbitration import READY, STRICT, Agreement, Ordering, StepRules
from rrfp_jax.planning.memory import ChunkBytes, StageForecast, check_fits, parse_bytes, window_of_bytes
from rrfp_jax.programs.agreement import check_clip_norm
from rrfp_jax.programs.batches import (
    BatchSpec,
    check_same_shapes,
    leaves_read,
    num_microbatches,
    spec_of_batch,
    spec_of_microbatch,
)
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.chunk_programs import ChunkPrograms, compile_chunk
from rrfp_jax.programs.initial import ChunkState, initial_state
from rrfp_jax.programs.layout import fitted_placement, model_graph
from rrfp_jax.programs.optimizers import check_leafwise
from rrfp_jax.programs.remat import Remat, check_remat
from rrfp_jax.programs.rng import check_seed
from rrfp_jax.programs.shapes import derive_shapes, model_params, param_specs
from rrfp_jax.runtime import PipelineRuntime, StageExecutor, StepMetrics, start_in_process
from rrfp_jax.runtime.determinism import require_determinism
from rrfp_jax.runtime.driver import check_runtime_options
from rrfp_jax.runtime.mailbox import Ship
from rrfp_jax.runtime.memory import MemoryMeter, chunk_bytes, device_limits, forecast_memory
from rrfp_jax.runtime.program_stage import ProgramStage, UpdateRules
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.tasks import Edge, PipelineGraph, Placement

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
        optimizer: any optax optimizer that treats each array by itself.
        hint, consume, schedule, window, backward: the order of tasks; see :class:`rrfp_jax.arbitration.Ordering`. The
            window is a number of microbatches, one per stage, or the memory that a stage's microbatches in flight may
            take, for example ``"512MiB"``.
        edges: which chunk feeds which; None means the schedule's, or a chain without a schedule.
        devices: one device per stage, in order; None takes the first ones that JAX knows, shared out evenly if there
            are fewer than stages.
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
        self._step_rules = StepRules(ordered=deterministic, agreement=agreement)
        self._edges = None if edges is None else tuple(edges)
        self._optimizer, self._seed, self._log_steps = optimizer, seed, log_steps
        self._progress_deadline_s, self._wrap_stage = progress_deadline_s, wrap_stage
        self._devices = _devices(self.placement.num_stages, devices)
        self._shardings = [jax.sharding.SingleDeviceSharding(device) for device in self._devices]
        if deterministic:
            require_determinism(self._devices)
        check_runtime_options(progress_deadline_s, log_steps)
        check_seed(seed)
        if dispatch_ahead < 0:
            raise ValueError(f"dispatch_ahead is {dispatch_ahead}: give 0 or more tasks")
        self._dispatch_ahead = dispatch_ahead
        self._remat = _one_per_chunk(remat, len(self.chunks))
        limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
        self._limits = device_limits(self._devices) if limit is None else [limit] * len(self._devices)
        self._compiled: dict[Hashable, dict[int, ChunkPrograms]] = {}
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
        graph = model_graph(self.chunks, self._edges, self._ordering.table)
        self.order = self._ordering.resolve(self.placement, graph)
        """The order in force; without a table its graph has one microbatch until a batch says how many there are."""
        self.forecast: list[StageForecast] = []
        """The predicted memory of every stage, once the programs are compiled."""
        self._initial: dict[int, ChunkState] | None = None
        self._stages: list[ProgramStage] = []
        self._runtime: PipelineRuntime | None = None
        self._batch_spec: BatchSpec = {}
        self._enqueued: deque[StepMetrics] = deque()
        self._step = 0

    # -- state -------------------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> PipelineState:
        """Initialise parameters and optimizer state on the stages' devices; ``key`` is a typed random key.

        The result does not depend on where the model is cut.
        """
        if self._runtime is not None:
            raise RuntimeError("this pipeline has been stepped already: make a new one to start over")
        has_backward = self.order.graph.has_backward
        check_leafwise(self._optimizer, model_params(map(param_specs, self.chunks)))
        self._initial = {
            chunk: initial_state(
                self.chunks, chunk, key, self._optimizer, self._sharding(chunk), trains=has_backward(chunk)
            )
            for chunk in range(len(self.chunks))
        }
        return PipelineState(self._step)

    def params(self, state: PipelineState) -> dict[str, Any]:
        """The whole model's parameters by layer name, on their stages' devices; waits for the steps enqueued.

        The arrays are those in use: copy them before the next ``step``, which takes them over.
        """
        self._check_state(state)
        self.wait()
        held = self._held()
        return model_params(held[chunk].params for chunk in sorted(held))

    def num_params(self) -> list[int]:
        """How many parameters each stage holds; copies of shared ones count on every stage."""
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(param_specs(chunk))) for chunk in self.chunks]
        return [sum(sizes[c] for c in chunks) for chunks in self.placement.chunks_of_stage]

    def _held(self) -> dict[int, ChunkState]:
        if self._initial is not None:
            return self._initial
        return {chunk: held for stage in self._stages for chunk, held in stage.states.items()}

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
        leaves = leaves_read(self.chunks, batch)
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

    def prepare(self, batch: Mapping[str, Any]) -> None:
        """Compile every program for batches of these shapes (arrays or specs) and start the stages, if not done yet.

        ``step`` does so by itself with its first batch. Raises ValueError where chunks, graph and batch do not fit.
        """
        if self._runtime is not None:
            return
        if self._initial is None:
            raise RuntimeError("the pipeline holds no parameters yet: call init first")
        spec = spec_of_batch(leaves_read(self.chunks, batch))
        graph = model_graph(self.chunks, self._edges, self._ordering.table, num_microbatches(spec))
        self.order = self._ordering.resolve(self.placement, graph)
        programs = self._programs(self.order.graph, spec)
        self._fit_into_memory({chunk: chunk_bytes(each) for chunk, each in programs.items()})
        self._start_runtime(self._initial, programs)
        self._initial, self._batch_spec = None, spec

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

    # -- assembly ----------------------------------------------------------------------------------------------------

    def _programs(self, graph: PipelineGraph, batch: BatchSpec) -> dict[int, ChunkPrograms]:
        key = (graph, tuple(sorted(batch.items())))
        if key not in self._compiled:
            self._compiled[key] = self._compile(graph, batch)
        return self._compiled[key]

    def _compile(self, graph: PipelineGraph, batch: BatchSpec) -> dict[int, ChunkPrograms]:
        shapes = derive_shapes(self.chunks, graph, spec_of_microbatch(batch))

        def compile_one(chunk: int) -> ChunkPrograms:
            return compile_chunk(
                chunk,
                self.chunks,
                graph,
                shapes,
                optimizer=self._optimizer,
                sharding=self._sharding(chunk),
                seed=self._seed,
                remat=self._remat[chunk],
            )

        # XLA releases the GIL while it compiles
        with ThreadPoolExecutor(thread_name_prefix="compile") as executor:
            return dict(enumerate(executor.map(compile_one, range(len(self.chunks)))))

    def _fit_into_memory(self, sizes: Mapping[int, ChunkBytes]) -> None:
        """Turn a window in bytes into microbatches, and refuse what cannot fit."""
        if self._window_bytes is not None:
            chunks = self.placement.chunks_of_stage
            windows = tuple(
                window_of_bytes(self._window_bytes, [sizes[c] for c in own], stage, self.order.graph.num_microbatches)
                for stage, own in enumerate(chunks)
            )
            self.order = replace(self._ordering, window=windows).resolve(self.placement, self.order.graph)
        self.forecast = forecast_memory(self.order, sizes)
        check_fits(self.forecast, self._limits, is_strict=self._ordering.consume == STRICT)

    def _start_runtime(self, states: dict[int, ChunkState], programs: dict[int, ChunkPrograms]) -> None:
        self._stages = []

        def make_stage(stage: int, ship: Ship) -> StageExecutor:
            chunks = self.placement.chunks_of_stage[stage]
            made = ProgramStage(
                self.order.graph,
                self.placement,
                stage,
                programs={c: programs[c] for c in chunks},
                states={c: states[c] for c in chunks},
                update_rules=self._update_rules,
                step_rules=self._step_rules,
                meter=MemoryMeter({c: programs[c] for c in chunks}, self._devices[stage]),
                ship=ship,
            )
            self._stages.append(made)
            return self._wrap_stage(made) if self._wrap_stage else made

        self._runtime = start_in_process(
            self.order.arbiters(self._step_rules, dispatch_ahead=self._dispatch_ahead),
            make_stage,
            self._shardings,
            progress_deadline_s=self._progress_deadline_s,
            log_steps=self._log_steps,
        )

    def _sharding(self, chunk: int) -> jax.sharding.Sharding:
        return self._shardings[self.placement.stage_of_chunk[chunk]]


def _devices(num_stages: int, devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    if devices is None:
        known = jax.local_devices()
        devices = [known[stage * min(len(known), num_stages) // num_stages] for stage in range(num_stages)]
    if len(devices) != num_stages:
        raise ValueError(f"{len(devices)} devices are given for {num_stages} stages: give one device per stage")
    return list(devices)


def _one_per_chunk(remat: Remat | Sequence[Remat], num_chunks: int) -> tuple[Remat, ...]:
    policies = (remat,) * num_chunks if isinstance(remat, str) or callable(remat) else tuple(remat)
    if len(policies) != num_chunks:
        raise ValueError(
            f"remat has {len(policies)} entries for {num_chunks} chunks: give one for all, or one per chunk"
        )
    for policy in policies:
        check_remat(policy)
    return policies
