"""Evaluation of a pipeline on named data sets: the same batches every time, through the stages that train.

Several batches go through the pipeline as one step (:mod:`rrfp_jax.runtime.evaluation`), so that it fills and drains
once for them; the next ones are made meanwhile. Each such step asks whether the run is to stop, so a request
to stop takes effect within an evaluation.

In idle time all batches of an evaluation are enqueued at once, and its rows are taken when the next evaluation is due,
before a later state is saved, or at the end: a run that goes on from a checkpoint lacks no row, except where it was
told to stop during an evaluation, for which it does not wait.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rrfp_jax.data import Batch, Dataset, Reads
from rrfp_jax.models.loss import ANSWER_TOKENS, ANSWERS, COUNTS, EXACT_ANSWERS, RIGHT_TOKENS
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.programs.batches import Bucket, buckets_of
from rrfp_jax.runtime.evaluation import EvaluationMetrics, EvaluationResult, EvaluationShapes, check_beside
from rrfp_jax.training.batches import AgreedBatches
from rrfp_jax.training.run_config import EvaluationConfig

_LARGEST_EXPONENT = 700.0
"""Beyond it a perplexity is no number any more."""
_MOST_IDLE = 0.05
"""About how much of an evaluation step the pipeline may take to fill and drain."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """Results of one set, one line of ``metrics.jsonl``."""

    step: int
    """The last step that was trained, counted from 0; -1: none."""
    evaluation: str
    """The set's name."""
    loss: float
    """Mean cross entropy in nats per token, without the losses that a model adds in training (``means``)."""
    perplexity: float
    bits_per_byte: float | None
    """Bits per byte of text; None where the data does not know how many bytes a token stands for."""
    exact_match: float | None
    """The fraction of answers that greedy decoding writes without a fault (:mod:`rrfp_jax.models.loss`); None where
    the data marks no answers."""
    token_accuracy: float | None
    """The fraction of predicted tokens that are the likeliest one behind the true text; None where
    ``exact_match`` is."""
    means: dict[str, float]
    """Losses that the model adds in training, over the weight, by name, such as ``router_loss``."""
    tokens: float
    """Loss weight: the tokens that were predicted."""
    seconds: float
    """Seconds from the first batch to the last result; training steps do not count them."""


class Evaluations:
    """The evaluations of a run: when they are due, their results, and which checkpoint is the best so far.

    All processes call the same methods alike.

    Args:
        pipeline: the pipeline that evaluates.
        sets: the data sets by name; their batches have as many microbatches as those of training.
        num_steps: number of steps of the run.
        num_microbatches: the number of microbatches of a batch.
        max_bad: how many samples of a set may be left out because they cannot be read.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        pipeline: Pipeline,
        sets: Mapping[str, Dataset],
        *,
        num_steps: int,
        num_microbatches: int,
        max_bad: int = 0,
    ) -> None:
        self._config, self._pipeline, self._sets = config, pipeline, dict(sets)
        self._num_steps, self._num_microbatches, self._max_bad = num_steps, num_microbatches, max_bad
        self._per_step = batches_per_step(
            config.batches,
            num_chunks=pipeline.placement.num_chunks,
            num_microbatches=num_microbatches // pipeline.layout.data,
        )
        if config.in_idle_time:
            check_beside(pipeline.process, delay=bool(pipeline.updates.delay))
        self.pending: int | None = None
        """The number of steps before the evaluation whose rows have not been taken; None: all have been."""
        self._begun: list[tuple[str, float, list[EvaluationMetrics]]] = []
        """The sets that are under way in idle time, with the time at which each began."""
        self._done: int | None = None
        self._best_step: int | None = None
        self._best_loss = math.inf
        self.stop = self.save = False
        """Whether steps of evaluations have asked to end the run, or to save."""

    @property
    def host(self) -> dict[str, Any]:
        """Plain data that is saved with the state."""
        best = None if self._best_step is None else self._best_loss
        return {"done": self._done, "best_step": self._best_step, "best_loss": best}

    def go_on(self, saved: Mapping[str, Any] | None) -> None:
        """Takes over :attr:`host` as it was saved with the state from which the run goes on; None: there was none."""
        if saved is not None:
            self._done, self._best_step = saved.get("done"), saved.get("best_step")
            self._best_loss = math.inf if saved.get("best_loss") is None else float(saved["best_loss"])

    @property
    def keep_also(self) -> tuple[int, ...]:
        """Steps whose checkpoints stay beside the newest ones: the best one so far."""
        return () if self._best_step is None else (self._best_step,)

    def is_due(self, step: int) -> bool:
        """Returns whether to evaluate after ``step`` steps, unless that has been done."""
        return step not in (self._done, self.pending) and self._config.is_due(step, self._num_steps)

    def shapes(self) -> EvaluationShapes:
        """Returns the shapes that the pipeline is to be prepared for."""
        buckets: list[Bucket] = []
        for dataset in self._sets.values():
            if dataset.buckets is not None:
                buckets += dataset.buckets
            else:
                batch = dataset.batch(0, {})
                buckets += buckets_of({name: list(leaf) for name, leaf in batch.items()})
        return EvaluationShapes(buckets=buckets, batches=self._per_step, in_idle_time=self.in_idle_time)

    @property
    def in_idle_time(self) -> bool:
        """Whether evaluations begin with :meth:`begin` and end with :meth:`finish`, beside training."""
        return self._config.in_idle_time

    def begin(self, state: PipelineState) -> None:
        """Enqueues an evaluation of all sets in idle time. Raises BrokenData as :meth:`run`."""
        begun = []
        for name, dataset in self._sets.items():
            agreed, begun_s = self._agreed(dataset), time.perf_counter()
            batches = [self._joined(agreed, numbers) for numbers in self._numbers_of_steps()]
            begun.append((name, begun_s, [self._pipeline.evaluate(state, batch) for batch in batches]))
        self._begun, self.pending = begun, state.step

    def finish(self) -> list[EvaluationRow]:
        """Returns the rows of the evaluation under way, which hurries; none if there is none."""
        rows = []
        for name, begun_s, enqueued in self._begun:
            results = [metrics.result() for metrics in enqueued]
            seconds = max(result.ended_s for result in results) - begun_s
            assert self.pending is not None
            rows.append(self._row(self.pending, name, results, seconds))
        if self._begun:
            self._done = self.pending
        self.drop()
        return rows

    def drop(self) -> None:
        """Forgets the evaluation under way, whose rows nobody will write."""
        self._begun, self.pending = [], None

    def run(self, state: PipelineState) -> list[EvaluationRow]:
        """Evaluates all sets, with averages of the parameters where the optimizer keeps these; returns no rows if a
        process has asked to end the run meanwhile.

        Raises BrokenData in all processes if one of them cannot read a batch.
        """
        rows = []
        with self._pipeline.averaged(state):
            for name, dataset in self._sets.items():
                begun_s = time.perf_counter()
                results = self._results(state, dataset)
                if self.stop:
                    return []
                rows.append(self._row(state.step, name, results, time.perf_counter() - begun_s))
        self._done = state.step
        if self._config.keep_best and rows[0].loss < self._best_loss:
            self._best_step, self._best_loss = state.step, rows[0].loss
        return rows

    def _row(self, steps: int, name: str, results: Sequence[EvaluationResult], seconds: float) -> EvaluationRow:
        # A data set of the user's own need not know how many bytes a token has.
        per_token = getattr(self._sets[name], "bytes_per_token", None)
        return row_of(steps - 1, name, results, bytes_per_token=per_token, seconds=seconds)

    def _agreed(self, dataset: Dataset) -> AgreedBatches:
        return AgreedBatches(dataset, self._pipeline.process.gather, max_bad=self._max_bad)

    def _numbers_of_steps(self) -> list[range]:
        """Returns the numbers of the batches that each step of an evaluation runs."""
        most, each = self._config.batches, self._per_step
        return [range(first, min(most, first + each)) for first in range(0, most, each)]

    def _results(self, state: PipelineState, dataset: Dataset) -> list[EvaluationResult]:
        enqueued: deque[EvaluationMetrics] = deque()
        results: list[EvaluationResult] = []

        def take() -> None:
            results.append(result := enqueued.popleft().result())
            self.stop |= result.stop
            self.save |= result.save

        agreed = self._agreed(dataset)
        for numbers in self._numbers_of_steps():
            batch = self._joined(agreed, numbers)
            if self.stop:
                break
            enqueued.append(self._pipeline.evaluate(state, batch))
            # One step runs while the batches of the next are made.
            if len(enqueued) > 1:
                take()
        while enqueued:
            take()
        return results

    def _joined(self, dataset: AgreedBatches, numbers: range) -> Batch:
        """Returns several batches as one, of which each replica reads consecutive microbatches."""
        each = self._num_microbatches
        reads = self._pipeline.reads(each * len(numbers))
        parts = []
        for place, number in enumerate(numbers):
            # The microbatches that this process reads, counted from the first of their batch.
            own: Reads = {
                name: range(max(0, wanted.start - place * each), max(0, min(each, wanted.stop - place * each)))
                for name, wanted in reads.items()
            }
            parts.append(dataset.batch(number, own))
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: [entry for part in parts for entry in part.get(name, [None] * each)] for name in names}


def batches_per_step(batches: int, *, num_chunks: int, num_microbatches: int) -> int:
    """Returns how many of a set's batches share a step: as many as keep the time to fill and drain the pipeline small.

    All steps get about equally many. ``num_microbatches`` is a replica's share of a batch.
    """
    # Filling and draining take the time of num_chunks - 1 microbatches
    enough = math.ceil((num_chunks - 1) * (1 - _MOST_IDLE) / _MOST_IDLE / num_microbatches)
    num_steps = math.ceil(batches / min(batches, max(1, enough)))
    return math.ceil(batches / num_steps)


def row_of(
    step: int, name: str, results: Sequence[EvaluationResult], *, bytes_per_token: float | None, seconds: float
) -> EvaluationRow:
    """Returns the row of one set from the results of its evaluation steps."""
    weight = math.fsum(result.weight for result in results)

    def mean(sums: Sequence[float]) -> float:
        return math.fsum(sums) / weight if weight else math.nan

    names = dict.fromkeys(each for result in results for each in result.means)
    sums = {
        each: [result.means.get(each, 0.0) * result.weight for result in results if result.weight] for each in names
    }
    # Counts are whole numbers, which means over the weight have rounded
    counts = {each: sum(map(round, sums.pop(each, ()))) for each in COUNTS}
    means = {each: mean(parts) for each, parts in sums.items()}
    loss = mean([result.loss_sum for result in results]) - math.fsum(means.values())
    num_answers, num_tokens = counts[ANSWERS], counts[ANSWER_TOKENS]
    return EvaluationRow(
        step=step,
        evaluation=name,
        loss=loss,
        perplexity=math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf,
        bits_per_byte=None if bytes_per_token is None else loss / math.log(2) / bytes_per_token,
        exact_match=counts[EXACT_ANSWERS] / num_answers if num_answers else None,
        token_accuracy=counts[RIGHT_TOKENS] / num_tokens if num_tokens else None,
        means=means,
        tokens=weight,
        seconds=seconds,
    )
