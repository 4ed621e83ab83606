"""Steps that evaluate, as a pipeline runs them: their shapes, the places of their microbatches, and their results.

An evaluation step takes a fixed number of microbatches, those of one or several batches, so that the pipeline fills and
drains once for all of them. Where it is given fewer, the rest are absent. Every replica gets an equal share.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from rrfp_jax.core import BESIDE
from rrfp_jax.core.replicas import Replication, microbatches_per_replica
from rrfp_jax.field_rules import check_types
from rrfp_jax.programs.batches import BatchLeaf, Buckets, StepBatch, num_microbatches
from rrfp_jax.runtime.steps import StepMetrics, StepOutcome
from rrfp_jax.schedules import Absences
from rrfp_jax.schedules.timeline import StepSums, Timeline
from rrfp_jax.waiting import result_of

if TYPE_CHECKING:
    from rrfp_jax.runtime.driver import PipelineRuntime
    from rrfp_jax.runtime.process import Process


@dataclass(frozen=True, kw_only=True)
class EvaluationShapes:
    """The shapes of a pipeline's evaluations. Raises ValueError for less than one batch."""

    buckets: Iterable[Mapping[str, Any]]
    """The shapes that their microbatches may have, each with a spec or array for every leaf; several may be alike."""
    batches: int = 1
    """Most batches, of as many microbatches as a training step has, that one step can evaluate. More of them share the
    time in which the pipeline fills and drains."""
    in_idle_time: bool = False
    """Whether evaluations run beside training, where stages would idle (:class:`IdleEvaluations`), and not between
    steps."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.batches < 1:
            raise ValueError(f"an evaluation step of {self.batches} batches evaluates nothing: give at least 1")


@dataclass(frozen=True, kw_only=True)
class PreparedEvaluation:
    """The evaluation steps that a running pipeline is prepared for."""

    buckets: Buckets
    first_bucket: int
    """The number of their first bucket among all of the run."""
    skipped: tuple[frozenset[int], ...]
    """By bucket, the chunks of a replica that its microbatches skip."""
    copies: Replication
    """Tells how chunks and microbatches of an evaluation step belong to replicas."""
    beside: "IdleEvaluations | None"
    """Runs them in idle time; None: they run between steps that train."""

    @property
    def num_microbatches(self) -> int:
        """Most microbatches of a step, over all replicas."""
        return self.copies.num_microbatches * self.copies.num_replicas

    def step(self, leaves: Mapping[str, BatchLeaf], trained: int) -> tuple[StepBatch, Absences]:
        """Returns the batch of a step, and the pairs that it lacks.

        ``trained`` is the number of training steps before it. Raises ValueError for shapes that nothing was compiled
        for, and for a number of microbatches that does not fit.
        """
        given, most = num_microbatches(leaves), self.num_microbatches
        if given > most:
            raise ValueError(
                f"the batch has {given} microbatches, and an evaluation step has room for {most}: evaluate them in "
                "several calls, or prepare the pipeline for more batches"
            )
        numbers = self.buckets.numbers(leaves)
        # Every replica takes its share at the beginning of its own places; the rest of them are absent.
        share = microbatches_per_replica(given, self.copies.num_replicas)
        of_replica = self.copies.num_microbatches
        places = {(m // share) * of_replica + m % share: m for m in range(given)}
        batch, absent = placed(leaves, places, numbers, self.skipped, self.copies)
        buckets = [self.first_bucket + number for number in batch.buckets]
        return batch._replace(buckets=buckets, step=trained), absent


def placed(
    leaves: Mapping[str, BatchLeaf],
    places: Mapping[int, int],
    numbers: Sequence[int],
    skipped: Sequence[frozenset[int]],
    copies: Replication,
) -> tuple[StepBatch, Absences]:
    """Returns the batch of a step, with microbatches at some of its places, and the pairs that it lacks.

    Args:
        places: by place, the microbatch of ``leaves`` that is there; at all other places there is none.
        numbers: the bucket of each of these microbatches.
        skipped: by bucket, the chunks of a replica that its microbatches skip.
        copies: tells how chunks and microbatches of the step belong to replicas.
    """
    every = range(copies.num_microbatches * copies.num_replicas)
    arranged = {name: [entries[places[p]] if p in places else None for p in every] for name, entries in leaves.items()}
    absent = [
        (chunk, p)
        for p in every
        for chunk in (skipped[numbers[places[p]]] if p in places else range(copies.num_chunks))
    ]
    return StepBatch(arranged, [numbers[places[p]] if p in places else 0 for p in every]), copies.pairs(absent)


class _Copy(dict[int, Any]):
    """Copies of the parameters of hosted chunks, by chunk, which are freed with the last evaluation that reads them."""


class IdleEvaluations:
    """Evaluations beside training, whose forwards run where stages would idle (:class:`rrfp_jax.runtime.actor.Beside`).

    They read a copy of the parameters, since training goes on meanwhile: one copy at a time, so that an evaluation of a
    later state first waits for all of an earlier one. Every stage has an arbiter of its own for them, whose messages
    have numbers of their own, so that neither kind of steps waits for the other.
    """

    def __init__(self) -> None:
        self._turn = BESIDE
        """The number of the next evaluation."""
        self._trained = 0
        """How many steps had been trained when the copy was made."""
        self._copied: Callable[[], _Copy | None] = lambda: None
        """Returns the copy while an evaluation reads it."""
        self._futures: list[Future[StepOutcome]] = []

    def submit(
        self,
        runtime: "PipelineRuntime",
        batch: StepBatch,
        absent: Absences,
        params: Callable[[], Mapping[int, Any]],
    ) -> "Future[StepOutcome]":
        """Enqueues an evaluation after ``batch.step`` training steps; ``params`` returns the parameters, at rest."""
        assert batch.step is not None
        copied = self._copied() if batch.step == self._trained else None
        if copied is None:
            for future in self._futures:
                if not future.done():
                    runtime.hurry()
                result_of(future)
            copied = _Copy(
                {
                    number: jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding, may_alias=False), own)
                    for number, own in params().items()
                }
            )
            # Training takes the parameters over with its next update.
            jax.block_until_ready([*copied.values()])
            self._trained, self._copied = batch.step, weakref.ref(copied)
        self._futures = [future for future in self._futures if not future.done()]
        future = runtime.submit(self._turn, batch._replace(params=copied), absent, evaluates=True, trained=batch.step)
        self._turn += 1
        self._futures.append(future)
        return future


def check_beside(process: "Process", *, delay: bool) -> None:
    """Raises ValueError where evaluations cannot run in idle time."""
    layout = process.layout
    if delay:
        raise ValueError("stages on which steps overlap hardly idle: evaluate between steps, or leave the delay out")
    if any(len(layout.ranks_of(unit)) > 1 for unit in range(layout.num_units)):
        raise ValueError(
            "a stage of several processes has no idle time of its own: evaluate between steps, or give each stage one"
        )
    if process.recovers or layout.absent:
        raise ValueError(
            "a run that goes on without lost ranks evaluates between steps, not in idle time: give one replica, or "
            "reduce collective"
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The result of one evaluation step, the same in all processes but for times."""

    step: int
    """Number of training steps before it."""
    loss_sum: float
    """Sum of the loss over all microbatches, in nats."""
    weight: float
    """Total weight, for a language model the number of tokens that were predicted."""
    means: dict[str, float] = field(default_factory=dict)
    """Sums of the last chunk beside the loss, by name, over the total weight."""
    timeline: Timeline = field(repr=False)
    """Record of the stages that this process hosts."""
    sums: StepSums = field(repr=False)
    """Sums over the timelines: in the first process of all stages."""
    stop: bool = field(repr=False)
    """Whether a process has asked to end the run; the same in all processes, as is ``save``."""
    save: bool = field(repr=False)
    """Whether it is time to save the state; said once, in this step or in one that trains."""
    ended_s: float = field(repr=False)
    """Time at which the step had ended on all stages (``time.perf_counter``)."""

    @property
    def loss(self) -> float:
        """The mean over the weight; not a number where that is 0."""
        return self.loss_sum / self.weight if self.weight else float("nan")

    @classmethod
    def of(cls, outcome: StepOutcome, step: int) -> "EvaluationResult":
        """Returns the result of an evaluation after ``step`` training steps."""
        verdict = outcome.result
        return cls(
            step=step,
            loss_sum=verdict.loss_sum,
            weight=verdict.weight,
            means=verdict.means,
            timeline=outcome.timeline,
            sums=outcome.sums,
            stop=verdict.stop,
            save=verdict.save,
            ended_s=outcome.ended_s,
        )


EvaluationMetrics = StepMetrics[EvaluationResult]
"""The future result of an enqueued evaluation."""
