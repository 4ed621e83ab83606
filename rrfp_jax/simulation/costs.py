"""Durations of tasks: constants, an array or the recorded timeline of a real run, and jitter on top.

Every source becomes one array of milliseconds, float64 ``[steps, chunks, microbatches, 3]``, whose last axis holds F,
input gradient and weight gradient. A fused backward takes the sum of the last two. A run of more steps than the array
has begins again with its first.

Jitter is drawn before the run. Every draw belongs to a (step, chunk, microbatch, slot), never to a moment, so that two
orders simulated from the same seed meet the same noise on the same tasks. The generator comes in as an argument; this
module holds none.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.schedules import Op, Pair, PipelineGraph, Placement, Task, TaskKind
from rrfp_jax.schedules.timeline import Timeline

Durations = NDArray[np.float64]
"""Milliseconds, [steps, chunks, microbatches, 3] for F, input gradient and weight gradient."""

EMA_KEPT = 0.9
"""The part of the moving average of compute times that remains after one more task (RRFP paper, RQ4)."""


def lognormal(durations_ms: Durations, sigma: float, rng: np.random.Generator) -> Durations:
    """Multiplies each duration by ``exp(sigma z - sigma^2 / 2)``, z standard normal.

    The factor has mean 1, so that more jitter does not mean more work: what changes is variability alone.
    """
    if sigma < 0:
        raise ValueError(f"log-normal sigma is {sigma}: give 0 or more")
    return durations_ms * np.exp(sigma * rng.standard_normal(durations_ms.shape) - sigma**2 / 2)


def bimodal(durations_ms: Durations, probability: float, factor: float, rng: np.random.Generator) -> Durations:
    """Makes each duration ``factor`` times as long with this probability.

    Mean work grows to ``1 + probability (factor - 1)`` of what it was.
    """
    _check_probability(probability)
    if factor < 0:
        raise ValueError(f"bimodal factor is {factor}: give 0 or more")
    return durations_ms * np.where(rng.random(durations_ms.shape) < probability, factor, 1.0)


def straggler(durations_ms: Durations, placement: Placement, stage: int, factor: float) -> Durations:
    """Makes every task of one stage ``factor`` times as long, in all steps."""
    if not 0 <= stage < placement.num_stages:
        raise ValueError(f"straggler stage {stage} does not exist: give 0..{placement.num_stages - 1}")
    if factor < 0:
        raise ValueError(f"straggler factor is {factor}: give 0 or more")
    slowed = durations_ms.copy()
    slowed[:, list(placement.chunks_of_stage[stage])] *= factor
    return slowed


@dataclass(frozen=True, kw_only=True)
class SleepLevel:
    """A level of the RRFP paper's jitter (RQ4)."""

    probability: float
    base_ms: float
    alpha: float


PAPER_LEVELS = {
    "J0": SleepLevel(probability=0.0, base_ms=0.0, alpha=0.0),
    "J1": SleepLevel(probability=0.1, base_ms=5.0, alpha=0.5),
    "J2": SleepLevel(probability=0.2, base_ms=10.0, alpha=1.0),
    "J3": SleepLevel(probability=0.3, base_ms=15.0, alpha=1.5),
}


@dataclass(frozen=True, kw_only=True)
class InjectedSleeps:
    """Sleeps inside F and B (or I) tasks: ``factor * max(base_ms, e)``.

    ``e = 0.9 e + 0.1 c`` is the stage's own moving average of compute times c without the sleeps, from 0 at the start
    of the run, over its F and B (or I) tasks, the present one included. W tasks neither sleep nor count, for the paper
    names F and B only, and its B of a split backward is our I.
    """

    base_ms: float
    factors: Durations
    """[steps, chunks, microbatches, 2] for F and B (or I): ``alpha (0.5 + U(0, 1))``, or 0 where none is injected."""


def paper(level: SleepLevel, shape: tuple[int, ...], rng: np.random.Generator) -> InjectedSleeps:
    """Draws the sleeps for durations of this shape ([steps, chunks, microbatches, 3])."""
    _check_probability(level.probability)
    size = (*shape[:-1], 2)
    injected = rng.random(size) < level.probability
    return InjectedSleeps(base_ms=level.base_ms, factors=injected * level.alpha * (0.5 + rng.random(size)))


def _check_probability(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise ValueError(f"probability is {probability}: give a number between 0 and 1")


DURATION_SLOTS = {TaskKind.F: (0,), TaskKind.B: (1, 2), TaskKind.I: (1,), TaskKind.W: (2,)}
"""The places on an array's last axis whose sum is the duration of a kind."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations of all tasks of a run. Raises ValueError on durations that no task can have."""

    durations_ms: Durations
    """Milliseconds, [steps, chunks, microbatches, 3]."""
    sleeps: InjectedSleeps | None = None
    """Sleeps that depend on what the stage ran before (the RRFP paper's jitter)."""
    reduce_ms: float | tuple[float, ...] = 0.0
    """Duration of each R, once per chunk and step: one for all chunks, or one for each."""
    update_ms: float | tuple[float, ...] = 0.0
    """Duration of each U: one for all chunks, or one for each."""
    collectives_ms: float = 0.0
    """How much longer F and I take where they run alone, for the collectives inside them, such as sums of
    tensor-parallel layers. A pair hides them, as B does behind its weight gradients."""
    operations_ms: Mapping[str, float] = field(default_factory=dict)
    """Durations of operations by their letters; by default an operation's own ``ms``."""

    def __post_init__(self) -> None:
        check_durations(self.durations_ms)
        num_chunks = self.durations_ms.shape[1]
        once_ms = _by_chunk(self.reduce_ms, num_chunks), _by_chunk(self.update_ms, num_chunks)
        if {len(each) for each in once_ms} != {num_chunks}:
            raise ValueError(
                f"reduce_ms and update_ms are one number, or one for each of {num_chunks} chunks: mend them"
            )
        if min(map(min, once_ms)) < 0:
            raise ValueError(f"reduce_ms ({self.reduce_ms}) and update_ms ({self.update_ms}) must not be negative")
        if not self.collectives_ms >= 0:
            raise ValueError(f"collectives_ms is {self.collectives_ms}: give 0 or more")
        for letters, milliseconds in self.operations_ms.items():
            if not milliseconds >= 0:
                raise ValueError(f"operation {letters!r} takes {milliseconds} ms: give 0 or more")


class StageTimes:
    """Durations of the tasks of one stage, asked for in the order in which the tasks start.

    Injected sleeps depend on the tasks that the stage ran before (:class:`InjectedSleeps`), so every stage has a copy
    of its own, whose tables are shared.
    """

    __slots__ = (
        "_average_ms",
        "_base_ms",
        "_collectives_ms",
        "_durations_ms",
        "_factors",
        "_num_given",
        "_operations_ms",
        "_reduce_ms",
        "_steps",
        "_update_ms",
    )

    def __init__(self, costs: Costs, ops: Iterable[Op] = ()) -> None:
        self._operations_ms = {op.letter: costs.operations_ms.get(op.letter, op.ms) for op in ops}
        self._durations_ms, self._num_given = costs.durations_ms, len(costs.durations_ms)
        self._steps: dict[int, dict[TaskKind, list[list[float]]]] = {}
        """Durations as [step][kind][chunk][microbatch]; each step is made when it is first read."""
        num_chunks = costs.durations_ms.shape[1]
        self._reduce_ms = _by_chunk(costs.reduce_ms, num_chunks)
        self._update_ms = _by_chunk(costs.update_ms, num_chunks)
        self._factors: list[list[list[list[float]]]] = costs.sleeps.factors.tolist() if costs.sleeps else []
        self._base_ms = costs.sleeps.base_ms if costs.sleeps else 0.0
        self._average_ms = 0.0
        self._collectives_ms = costs.collectives_ms

    def of_program_ms(self, step: int, run: Task | Pair) -> float:
        """Returns how long the program of a task or of a pair runs."""
        if isinstance(run, Pair):
            return self.duration_ms(step, run.first) + self.duration_ms(step, run.second)
        waits_ms = self._collectives_ms if run.kind is TaskKind.F or run.kind is TaskKind.I else 0.0
        return self.duration_ms(step, run) + waits_ms

    def duration_ms(self, step: int, task: Task) -> float:
        """Returns the duration of a task, without collectives."""
        kind, chunk, microbatch = task
        if self._operations_ms and kind in self._operations_ms:
            return self._operations_ms[kind]
        if microbatch < 0:
            return (self._reduce_ms if kind is TaskKind.R else self._update_ms)[chunk]
        number = step % self._num_given
        of_kinds = self._steps.get(number)
        if of_kinds is None:
            made = of_tasks(self._durations_ms[number : number + 1])
            of_kinds = self._steps[number] = {kind: of_steps[0] for kind, of_steps in made.items()}
        compute_ms = of_kinds[kind][chunk][microbatch]
        if not self._factors or kind is TaskKind.W:
            return compute_ms
        self._average_ms = EMA_KEPT * self._average_ms + (1 - EMA_KEPT) * compute_ms
        slot = 0 if kind is TaskKind.F else 1
        factor = self._factors[step % len(self._factors)][chunk][microbatch][slot]
        return compute_ms + factor * max(self._base_ms, self._average_ms)


def _by_chunk(milliseconds: float | tuple[float, ...], num_chunks: int) -> tuple[float, ...]:
    return milliseconds if isinstance(milliseconds, tuple) else (milliseconds,) * num_chunks


def check_durations(durations_ms: Durations) -> None:
    """Raise ValueError unless this is an array of finite, non-negative milliseconds of the right rank."""
    shape = durations_ms.shape
    if len(shape) != 4 or shape[-1] != 3 or 0 in shape:
        raise ValueError(
            f"durations have the shape {list(shape)}: give [steps, chunks, microbatches, 3] for F, input gradient and "
            "weight gradient"
        )
    if not (np.isfinite(durations_ms).all() and (durations_ms >= 0).all()):
        raise ValueError("durations hold negative or non-finite numbers: give milliseconds, 0 or more")


def constant(durations_ms: tuple[float, float, float], graph: PipelineGraph) -> Durations:
    """Returns one step with the same F, input gradient and weight gradient for every chunk and microbatch."""
    shape = (1, graph.num_chunks, graph.num_microbatches, 3)
    return for_graph(np.broadcast_to(np.array(durations_ms, np.float64), shape), graph)


def for_graph(durations_ms: Durations, graph: PipelineGraph) -> Durations:
    """Returns a copy in which frozen chunks take no time for a weight gradient, which they do not compute.

    So the B of a frozen chunk takes as long as its input gradient. Raises ValueError with both sizes where the array
    does not fit the graph.
    """
    check_durations(durations_ms)
    _, chunks, microbatches, _ = durations_ms.shape
    if (chunks, microbatches) != (graph.num_chunks, graph.num_microbatches):
        raise ValueError(
            f"durations are for {chunks} chunks and {microbatches} microbatches, the pipeline has {graph.num_chunks} "
            f"and {graph.num_microbatches}: make both the same"
        )
    fitted = durations_ms.copy()
    fitted[:, sorted(graph.frozen), :, DURATION_SLOTS[TaskKind.W]] = 0.0
    return fitted


def for_steps(durations_ms: Durations, num_steps: int) -> Durations:
    repeated: Durations = durations_ms[np.arange(num_steps) % durations_ms.shape[0]]
    return repeated


def recorded(timeline: Timeline, graph: PipelineGraph, *, per_task: bool = False) -> Durations:
    """Returns the durations of a recorded run.

    By default one step of means per chunk and kind, which serve any number of microbatches; ``per_task`` keeps every
    task of every step. A recorded fused backward counts as input gradient and leaves 0 for the weight gradient. Raises
    ValueError if the record lacks a task of the graph, or a split backward that the graph has.
    """
    spans = [span for span in timeline.spans if span.task.microbatch >= 0 and span.task.kind in DURATION_SLOTS]
    fused = {span.task.chunk for span in spans if span.task.kind is TaskKind.B}
    if fused & graph.split:
        raise ValueError(
            f"the recorded run has a fused backward on chunks {sorted(fused & graph.split)}, which cannot be split "
            "afterwards: simulate a fused one, or record a split one"
        )
    by_task: dict[tuple[int, int, int, int], list[float]] = defaultdict(list)
    for span in spans:
        kind, chunk, microbatch = span.task
        milliseconds = (span.end_s - span.start_s) * 1e3
        place = (span.step, chunk, microbatch) if per_task else (0, chunk, 0)
        by_task[*place, DURATION_SLOTS[kind][0]].append(milliseconds)
    steps = timeline.steps() if per_task else [0]
    durations = np.zeros((max(1, len(steps)), graph.num_chunks, graph.num_microbatches, 3))
    for task in (task for task in graph.tasks() if task.kind in DURATION_SLOTS):
        for row, step in enumerate(steps):
            microbatch = task.microbatch if per_task else 0
            found = [by_task.get((step, task.chunk, microbatch, slot)) for slot in DURATION_SLOTS[task.kind]]
            if found[0] is None:
                where = f" in step {step}" if per_task else ""
                raise ValueError(f"the recorded run has no {task}{where}: record a run of the same pipeline")
            for slot, values in zip(DURATION_SLOTS[task.kind], found, strict=True):
                if values is not None:
                    durations[row, task.chunk, task.microbatch, slot] = fmean(values)
    return durations


def of_tasks(durations_ms: Durations) -> dict[TaskKind, list[list[list[float]]]]:
    """Returns nested lists ``[kind][step][chunk][microbatch]``, which a loop reads much faster than an array."""
    return {kind: durations_ms[..., slots].sum(axis=-1).tolist() for kind, slots in DURATION_SLOTS.items()}
