"""Steps that evaluate, as a pipeline runs them: their shapes, which microbatch goes where, and what they gave.

An evaluation step has room for a fixed number of microbatches, those of one or several batches, so that the pipeline
fills and drains once for all of them. Where it is given fewer, the rest are absent. Every replica gets an equal share.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.core.replicas import Replication, microbatches_per_replica
from rrfp_jax.field_rules import check_types
from rrfp_jax.programs.batches import Leaf, StepBatch, num_microbatches
from rrfp_jax.programs.buckets import Buckets
from rrfp_jax.runtime.holding import Hold
from rrfp_jax.runtime.steps_under_way import StepOutcome
from rrfp_jax.schedules import Absences, PipelineGraph
from rrfp_jax.schedules.timeline import StepSums, Timeline
from rrfp_jax.waiting import result_of


@dataclass(frozen=True, kw_only=True)
class EvaluationShapes:
    """What evaluations of a pipeline look like. Raises ValueError for less than one batch."""

    buckets: Iterable[Mapping[str, Any]]
    """The shapes that their microbatches may have, each with a spec or array for every leaf; several may be alike."""
    batches: int = 1
    """How many batches, of as many microbatches as a training step has, one step can evaluate at most. More of them
    share the time in which the pipeline fills and drains."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.batches < 1:
            raise ValueError(f"an evaluation step of {self.batches} batches evaluates nothing: give at least 1")


@dataclass(frozen=True, kw_only=True)
class PreparedEvaluation:
    """What a running pipeline has for evaluations."""

    buckets: Buckets
    first_bucket: int
    """The number of their first bucket among all of the run."""
    skipped: tuple[frozenset[int], ...]
    """By bucket, the chunks of a replica that its microbatches skip."""
    copies: Replication
    """How chunks and microbatches of an evaluation step belong to replicas."""

    @property
    def num_microbatches(self) -> int:
        """That a step has room for, over all replicas."""
        return self.copies.num_microbatches * self.copies.num_replicas

    def step(self, leaves: Mapping[str, Leaf], trained: int) -> tuple[StepBatch, Absences]:
        """The batch of a step, and the pairs that it lacks; ``trained``: how many training steps were run before.

        Raises ValueError for shapes that nothing was compiled for, and for a number of microbatches that does not fit.
        """
        given, room = num_microbatches(leaves), self.num_microbatches
        if given > room:
            raise ValueError(
                f"the batch has {given} microbatches, and an evaluation step has room for {room}: evaluate them in "
                "several calls, or prepare the pipeline for more batches"
            )
        numbers = self.buckets.numbers(leaves)
        share = microbatches_per_replica(given, self.copies.num_replicas)
        of_replica = self.copies.num_microbatches
        places = {(m // share) * of_replica + m % share: m for m in range(given)}
        arranged = {
            name: [entries[places[p]] if p in places else None for p in range(room)] for name, entries in leaves.items()
        }
        buckets = [self.first_bucket + (numbers[places[p]] if p in places else 0) for p in range(room)]
        absent = [
            (chunk, place)
            for place in range(room)
            for chunk in (self.skipped[numbers[places[place]]] if place in places else range(self.copies.num_chunks))
        ]
        return StepBatch(arranged, buckets, trained), self.copies.pairs(absent)


def prepared_evaluation(
    buckets: Buckets, graph: PipelineGraph, skipped: Sequence[frozenset[int]], *, first_bucket: int, num_replicas: int
) -> PreparedEvaluation:
    """What a pipeline has for evaluations; ``graph`` is theirs, of one replica."""
    copies = Replication(
        num_chunks=graph.num_chunks, num_microbatches=graph.num_microbatches, num_replicas=num_replicas
    )
    return PreparedEvaluation(buckets=buckets, first_bucket=first_bucket, skipped=tuple(skipped), copies=copies)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What one evaluation step gave, the same in all processes but for times."""

    step: int
    """How many training steps had been run before."""
    loss_sum: float
    """Over all microbatches, in nats."""
    weight: float
    """Total weight, for a language model the number of tokens that were predicted."""
    means: dict[str, float] = field(default_factory=dict)
    """What the last chunk summed beside the loss, by name, over the total weight."""
    timeline: Timeline = field(repr=False)
    """When every task ran on the stages that this process hosts."""
    sums: StepSums = field(repr=False)
    """What the timelines add up to: in the first process of all stages."""
    stop: bool = field(repr=False)
    """Whether a process has asked to end the run; the same in all processes, as is ``save``."""
    save: bool = field(repr=False)
    """Whether it is time to save the state; said once, in this step or in one that trains."""
    ended_s: float = field(repr=False)
    """When the step had ended on all stages (``time.perf_counter``)."""

    @property
    def loss(self) -> float:
        """The mean over the weight; not a number where that is 0."""
        return self.loss_sum / self.weight if self.weight else float("nan")


class EvaluationMetrics:
    """The result of an enqueued evaluation; ``result()`` waits for it."""

    def __init__(self, future: "Future[StepOutcome]", step: int, hold: Hold) -> None:
        self._future, self._step, self._hold = future, step, hold

    def done(self) -> bool:
        self._hold.check_process()
        return self._future.done()

    def result(self) -> EvaluationResult:
        """Wait for the end of the step. Raises RunFailed, with the wait-for report, if the run cannot go on."""
        self._hold.check_process()
        outcome = result_of(self._future)
        verdict = outcome.result
        return EvaluationResult(
            step=self._step,
            loss_sum=verdict.loss_sum,
            weight=verdict.weight,
            means=verdict.means,
            timeline=outcome.timeline,
            sums=outcome.sums,
            stop=verdict.stop,
            save=verdict.save,
            ended_s=outcome.ended_s,
        )
