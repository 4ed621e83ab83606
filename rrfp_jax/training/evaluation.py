"""Evaluation of a pipeline on named data sets: the same batches every time, through the stages that train.

Several batches go through the pipeline as one step (:mod:`rrfp_jax.runtime.evaluating`), so that it fills and drains
once for them; the next ones are made meanwhile. Each such step asks whether the run is to stop, so a run that is told
to does so within an evaluation.
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
from rrfp_jax.runtime.evaluating import EvaluationMetrics, EvaluationResult, EvaluationShapes
from rrfp_jax.training.batches import AgreedBatches
from rrfp_jax.training.evaluation_config import EvaluationConfig

_LARGEST_EXPONENT = 700.0
"""Beyond it a perplexity is no number any more."""
_MOST_IDLE = 0.05
"""About how much of an evaluation step the pipeline may take to fill and drain."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """What one set gave, one line of ``metrics.jsonl``."""

    step: int
    """The last step that was trained, counted from 0; -1: none."""
    evaluation: str
    """The set's name."""
    loss: float
    """Mean cross entropy in nats per token, without what a model adds to it in training (``means``)."""
    perplexity: float
    bits_per_byte: float | None
    """None where the data does not know how many bytes a token stands for."""
    exact_match: float | None
    """The fraction of answers that greedy decoding writes without a fault (:mod:`rrfp_jax.models.loss`); None where
    the data does not say what is an answer."""
    token_accuracy: float | None
    """The fraction of predicted tokens that are the likeliest one behind the true text; None likewise."""
    means: dict[str, float]
    """What the model adds to the loss in training, over the weight, by name, such as ``router_loss``."""
    tokens: float
    """Loss weight: the tokens that were predicted."""
    seconds: float
    """From the first batch to the last result; not counted in what the training steps took."""


class Evaluator:
    """Evaluates a pipeline; all processes call the same methods alike.

    Args:
        sets: the data sets by name; their batches have as many microbatches as those of training.
        batches: the number of batches of each set.
        num_microbatches: the number of microbatches of a batch.
        max_bad: how many samples of a set may be left out because they cannot be read.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sets: Mapping[str, Dataset],
        *,
        batches: int,
        num_microbatches: int,
        max_bad: int = 0,
    ) -> None:
        self._pipeline, self._sets, self._max_bad = pipeline, dict(sets), max_bad
        self._batches, self._num_microbatches = batches, num_microbatches
        layout = pipeline.layout
        self._per_step = batches_per_step(
            batches, num_chunks=pipeline.placement.num_chunks, num_microbatches=num_microbatches // layout.data
        )
        self.stop = self.save = False
        """Whether steps of evaluations have asked to end the run, or said that it is time to save."""

    @property
    def names(self) -> list[str]:
        """The sets' names."""
        return list(self._sets)

    def shapes(self) -> EvaluationShapes:
        """What the pipeline is to be prepared for."""
        return EvaluationShapes(
            buckets=[bucket for dataset in self._sets.values() for bucket in _buckets(dataset)], batches=self._per_step
        )

    def run(self, state: PipelineState) -> list[EvaluationRow] | None:
        """Evaluate all sets; returns None if a process has asked to end the run meanwhile.

        Raises BrokenData in all processes if one of them cannot read a batch.
        """
        rows = []
        for name, dataset in self._sets.items():
            begun_s = time.perf_counter()
            results = self._results(state, dataset)
            if results is None:
                return None
            seconds = time.perf_counter() - begun_s
            per_token = bytes_per_token(dataset)
            rows.append(row_of(state.step - 1, name, results, bytes_per_token=per_token, seconds=seconds))
        return rows

    def _results(self, state: PipelineState, dataset: Dataset) -> list[EvaluationResult] | None:
        enqueued: deque[EvaluationMetrics] = deque()
        results: list[EvaluationResult] = []
        agreed = AgreedBatches(dataset, self._pipeline.process.gather, max_bad=self._max_bad)
        for first in range(0, self._batches, self._per_step):
            numbers = range(first, min(self._batches, first + self._per_step))
            batch = self._joined(agreed, numbers)
            if self.stop:
                break
            enqueued.append(self._pipeline.evaluate(state, batch))
            if len(enqueued) > 1:
                results.append(self._taken(enqueued.popleft()))
        results += map(self._taken, enqueued)
        return None if self.stop else results

    def _taken(self, metrics: EvaluationMetrics) -> EvaluationResult:
        result = metrics.result()
        self.stop |= result.stop
        self.save |= result.save
        return result

    def _joined(self, dataset: AgreedBatches, numbers: range) -> Batch:
        """Several batches as one, of which each replica reads consecutive microbatches."""
        each = self._num_microbatches
        reads = self._pipeline.reads(each * len(numbers))
        parts = [dataset.batch(number, _within(reads, place * each, each)) for place, number in enumerate(numbers)]
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: [entry for part in parts for entry in part.get(name, [None] * each)] for name in names}


def _within(reads: Mapping[str, range], first: int, number: int) -> Reads:
    """What is read of so many microbatches from ``first`` on, counted from there."""
    return {
        name: range(max(0, own.start - first), max(0, min(number, own.stop - first))) for name, own in reads.items()
    }


def batches_per_step(batches: int, *, num_chunks: int, num_microbatches: int) -> int:
    """How many of a set's batches share a step, about equally many in all steps: so many that filling and draining the
    pipeline takes a small part of it. ``num_microbatches`` is a replica's share of a batch."""
    enough = math.ceil((num_chunks - 1) * (1 - _MOST_IDLE) / _MOST_IDLE / num_microbatches)
    num_steps = math.ceil(batches / min(batches, max(1, enough)))
    return math.ceil(batches / num_steps)


def row_of(
    step: int, name: str, results: Sequence[EvaluationResult], *, bytes_per_token: float | None, seconds: float
) -> EvaluationRow:
    """What the steps of one set's evaluation gave together."""
    weight = math.fsum(result.weight for result in results)
    names = dict.fromkeys(each for result in results for each in result.means)
    sums = {
        each: [result.means.get(each, 0.0) * result.weight for result in results if result.weight] for each in names
    }
    counts = {each: sum(map(round, sums.pop(each, ()))) for each in COUNTS}
    means = {each: _mean(parts, weight) for each, parts in sums.items()}
    loss = _mean([result.loss_sum for result in results], weight) - math.fsum(means.values())
    return EvaluationRow(
        step=step,
        evaluation=name,
        loss=loss,
        perplexity=math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf,
        bits_per_byte=None if bytes_per_token is None else loss / math.log(2) / bytes_per_token,
        exact_match=_fraction(counts[EXACT_ANSWERS], counts[ANSWERS]),
        token_accuracy=_fraction(counts[RIGHT_TOKENS], counts[ANSWER_TOKENS]),
        means=means,
        tokens=weight,
        seconds=seconds,
    )


def _mean(sums: Sequence[float], weight: float) -> float:
    return math.fsum(sums) / weight if weight else math.nan


def _fraction(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def bytes_per_token(dataset: Any) -> float | None:
    """How many bytes of text a token of a data set stands for; None where it does not know."""
    known: float | None = getattr(dataset, "bytes_per_token", None)
    return known


def _buckets(dataset: Dataset) -> Sequence[Bucket]:
    """The shapes of a set's microbatches."""
    if dataset.buckets is not None:
        return dataset.buckets
    batch = dataset.batch(0, {})
    return buckets_of({name: list(leaf) for name, leaf in batch.items()})


class Evaluations:
    """The evaluations of a run: when they are due, what was found, and which checkpoint is the best so far.

    Args:
        evaluator: runs them.
        num_steps: of the run.
        saved: what :attr:`host` was when the run was saved from which this one goes on; None: it starts.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        evaluator: Evaluator,
        num_steps: int,
        *,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._evaluator, self._num_steps = config, evaluator, num_steps
        saved = saved or {}
        self._done: int | None = saved.get("done")
        self._best_step: int | None = saved.get("best_step")
        self._best_loss = math.inf if saved.get("best_loss") is None else float(saved["best_loss"])

    @property
    def host(self) -> dict[str, Any]:
        """Plain data to be saved with the state."""
        best = None if self._best_step is None else self._best_loss
        return {"done": self._done, "best_step": self._best_step, "best_loss": best}

    @property
    def keep_also(self) -> tuple[int, ...]:
        """The steps whose checkpoints stay beside the newest ones."""
        return () if self._best_step is None else (self._best_step,)

    @property
    def stop(self) -> bool:
        """Whether a process has asked to end the run, in an evaluation."""
        return self._evaluator.stop

    def take_save(self) -> bool:
        """Whether an evaluation has said that it is time to save; told once."""
        save, self._evaluator.save = self._evaluator.save, False
        return save

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after so many steps, as has not been done yet."""
        return step != self._done and self._config.is_due(step, self._num_steps)

    def run(self, state: PipelineState) -> list[EvaluationRow]:
        """Evaluate all sets; nothing where a process has asked to end the run meanwhile."""
        rows = self._evaluator.run(state)
        if rows is None:
            return []
        self._done = state.step
        if self._config.keep_best and rows[0].loss < self._best_loss:
            self._best_step, self._best_loss = state.step, rows[0].loss
        return rows

    def is_best(self, step: int) -> bool:
        """Whether the state after so many steps is the best so far, and is to be kept."""
        return step == self._best_step
