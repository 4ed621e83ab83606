"""The batches of a run: read with patience, and taken or refused by all processes alike.

Each process reads its own share of a batch. If one cannot, the others must not begin the step: they would wait for it,
and the state before the step could not be saved any more. So all processes exchange the outcomes of their reading
before any of them begins, which takes a moment while the step before runs.

A sample that one process cannot read is left out by all of them, if the configuration allows as many: the sample keeps
its place, and counts nothing in the loss.

The first process also chooses the order in which a step's microbatches come (:class:`CostOrders`), and tells the others
in the same exchange. So measured times, which differ from process to process, may decide about it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from rrfp_jax.core import Order
from rrfp_jax.data import BrokenData
from rrfp_jax.data.balancing import MicrobatchOrders
from rrfp_jax.data.dataset import Batch, Reads, prefetched
from rrfp_jax.schedules import Absences
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation.costs import DURATION_SLOTS, Durations

_AllGather = Callable[[str, Any], dict[int, Any]]
"""A function of a name and the process's own plain data that returns the data of all processes, by rank."""
_PAUSES_S = (0.2, 1.0, 3.0)
"""Pauses before each further try after a failure of the system: file servers that are restarted, handles that are
stale."""
_LOG = logging.getLogger(__name__)


class Reading(NamedTuple):
    """The outcome of a process's reading of its share."""

    batch: Batch | None
    """The batch; None: it could not be read."""
    left_out: frozenset[int]
    """Samples of the step that could not be read."""
    problem: str | None = None
    order: "StepOrder | None" = None


class StepOrder(NamedTuple):
    """The order in which a step's microbatches come."""

    order: list[int]
    predicted_s: float | None
    """The predicted time of the step's tasks; None: nothing has been measured by which to tell."""


BatchCosts = Callable[[Batch], tuple[Durations, Absences]]
"""A function from a batch to the costs of its tasks [chunks, microbatches, 3], in any unit, and the pairs that it
lacks."""
_PART_OF_STEP = 0.01
"""The part of a step's time that the search for the next order may take of the host's."""
_WALKED_S = 4e-6
"""Seconds of the host for a task of a walk, about."""
_MOST_ROUNDS = 4


class CostOrders:
    """Chooses the order of each step's microbatches, while a step before it runs.

    The longer the steps, the longer the search. Costs are corrected by the measured times of the chunks that this
    process hosts, and while they say nothing about these times, microbatches come in their own order.

    Args:
        order: the order of tasks of one replica.
        costs_of: tells the costs of a batch.
        num_replicas: the number of replicas, each with its share of the microbatches.
        is_first: whether this process chooses.
    """

    def __init__(
        self, order: Order, costs_of: BatchCosts, *, num_replicas: int = 1, is_first: Callable[[], bool] = lambda: True
    ) -> None:
        self._orders, self._costs_of, self._is_first = MicrobatchOrders(order), costs_of, is_first
        self._num_replicas, self._share = num_replicas, order.graph.num_microbatches
        self._seconds = np.full((order.graph.num_chunks, 2), np.nan)
        """Seconds for a unit of cost, of the forward and of the backward of each chunk; NaN: not measured."""
        self._costs: dict[int, Durations] = {}
        """Predicted costs of the steps that have not ended yet."""
        self._step_s = 0.0
        self._lock = threading.Lock()  # several threads may make batches

    def choose(self, step: int, batch: Batch) -> StepOrder | None:
        """Returns the order of a step's microbatches; None: as they come. May be called from any thread."""
        if not self._is_first():
            return None
        with self._lock:
            costs, absent = self._costs_of(batch)
            self._costs[step] = costs
            orders, allowed_s = self._orders, _PART_OF_STEP * self._step_s / self._num_replicas
            if allowed_s < 2 * orders.num_tasks * _WALKED_S:
                return None
            rounds = int(allowed_s / (orders.walks_per_round * orders.num_tasks * _WALKED_S))
            is_known = bool(np.isfinite(self._seconds).any())
            corrected = costs * self._corrections()[:, None, :] * 1e3
            found, predicted_ms = list[int](), list[float]()
            for first in range(0, self._num_replicas * self._share, self._share):
                own = slice(first, first + self._share)
                lacks = tuple((chunk, mask >> first & ((1 << self._share) - 1)) for chunk, mask in absent)
                lacks = tuple((chunk, mask) for chunk, mask in lacks if mask)
                chosen = orders.choose(corrected[:, own], lacks, rounds=min(rounds, _MOST_ROUNDS))
                if chosen is not None:
                    predicted_ms.append(chosen.predicted_ms)
                places = range(self._share) if chosen is None else chosen.order
                found += [first + place for place in places]
            if not predicted_ms:
                return None
            return StepOrder(found, max(predicted_ms) / 1e3 if is_known else None)

    def _corrections(self) -> Durations:
        """Returns the seconds for a unit of cost [chunks, 3]; chunks of other processes take the mean ones."""
        if not np.isfinite(self._seconds).any():
            return np.ones((len(self._seconds), 3))
        mean = np.nanmean(self._seconds)
        return np.where(np.isfinite(self._seconds), self._seconds, mean)[:, [0, 1, 1]]

    def learn(self, step: int, order: Sequence[int] | None, timeline: Timeline, step_s: float) -> None:
        """Takes note of how long a step and its tasks took on the stages of this process."""
        with self._lock:
            self._step_s, costs = step_s, self._costs.pop(step, None)
            if costs is None:
                return
            measured = np.zeros((*costs.shape[:2], 2))
            for span in timeline.spans:
                kind, chunk, place = span.task
                if place >= 0 and kind in DURATION_SLOTS:
                    own = place if order is None else order[place]
                    is_backward = DURATION_SLOTS[kind] != (0,)
                    measured[chunk // self._num_replicas, own, int(is_backward)] += span.end_s - span.start_s
            totals = measured.sum(axis=2)
            self._orders.learn(costs * self._corrections()[:, None, :], np.where(totals > 0, totals, np.nan))
            for chunk, (known, times) in enumerate(zip(totals > 0, measured, strict=True)):
                parts = costs[chunk, known]
                for slot, cost in enumerate((parts[:, 0].sum(), parts[:, 1:].sum())):
                    if cost > 0:
                        found, before = times[known, slot].sum() / cost, self._seconds[chunk, slot]
                        self._seconds[chunk, slot] = found if np.isnan(before) else (3 * before + found) / 4


class AgreedBatches:
    """The batches of a data set, as all processes agree on them.

    Args:
        gather: gathers the outcomes of all processes.
        max_bad: how many samples may be left out.
        num_bad: how many were left out before.
        orders: chooses the orders of microbatches; None: they come as they are. All processes have one, or none.
    """

    def __init__(
        self,
        dataset: Any,
        gather: _AllGather,
        *,
        max_bad: int = 0,
        num_bad: int = 0,
        orders: CostOrders | None = None,
    ) -> None:
        self._dataset, self._gather, self._max_bad = dataset, gather, max_bad
        self.orders = orders
        self.order: StepOrder | None = None
        """The order of the batch that was taken last, the same in all processes."""
        self.num_bad = num_bad
        """Number of samples that were left out so far."""

    def read(self, step: int, reads: Reads | None, left_out: frozenset[int] = frozenset()) -> Reading:
        """Returns this process's share, without the samples ``left_out`` and others that turn out bad.

        May be called from any thread.
        """
        while True:
            # A data set of the user's own need not know of samples that are left out.
            rest = (left_out,) if left_out else ()
            try:
                batch = _patiently(partial(self._dataset.batch, step, reads, *rest))
                return Reading(batch, left_out, order=None if self.orders is None else self.orders.choose(step, batch))
            except Exception as error:  # not even a defect of ours is a reason to lose the state
                sample = getattr(error, "sample", None)
                if sample is None or sample in left_out or not self._max_bad:
                    problem = error if isinstance(error, BrokenData) else f"{type(error).__name__}: {error}"
                    if not isinstance(error, BrokenData | OSError):
                        _LOG.exception("the batch of step %d cannot be made", step)
                    return Reading(None, left_out, str(problem))
                _LOG.warning("left out: %s", error)
                left_out |= {sample}

    def _agreed(self, step: int, reads: Reads | None, reading: Reading) -> Batch:
        """Returns the batch of a step once all have read it; raises BrokenData in all processes if one of them
        cannot."""
        while True:
            own = {"problem": reading.problem, "left out": sorted(reading.left_out), "order": reading.order}
            outcomes = self._gather("batch", own)
            problems = {rank: each["problem"] for rank, each in outcomes.items() if each["problem"] is not None}
            if problems:
                rank = min(problems)
                raise BrokenData(problems[rank] if len(outcomes) == 1 else f"rank {rank}: {problems[rank]}")
            left_out = frozenset(sample for each in outcomes.values() for sample in each["left out"])
            if all(len(each["left out"]) == len(left_out) for each in outcomes.values()):
                break
            if left_out != reading.left_out:
                reading = self.read(step, reads, left_out)
        self.num_bad += len(left_out)
        if left_out and self.num_bad > self._max_bad:
            raise BrokenData(
                f"{self.num_bad} samples could not be read, more than max_bad_samples {self._max_bad}: mend the data, "
                "or let more go"
            )
        assert reading.batch is not None
        told = [outcomes[rank]["order"] for rank in sorted(outcomes) if outcomes[rank]["order"] is not None]
        self.order = StepOrder(*told[0]) if told else None
        return reading.batch

    def batch(self, step: int, reads: Reads | None) -> Batch:
        """Returns the batch of one step."""
        return self._agreed(step, reads, self.read(step, reads))

    def shown(self, step: int, reads: Reads | None) -> Batch:
        """Returns a batch as this process alone reads it, for its shapes; raises BrokenData if it cannot be read."""
        reading = self.read(step, reads)
        if reading.batch is None:
            raise BrokenData(reading.problem)
        return reading.batch

    @contextmanager
    def ahead(self, start_step: int, reads: Reads, num_threads: int) -> Iterator[Iterator[Batch]]:
        """Yields an iterator over the batches of ``start_step`` and all later steps, read ahead; see
        :func:`prefetched`."""
        of_steps: Any = SimpleNamespace(batch=self.read, buckets=None)  # readings in the form of a data set
        with prefetched(of_steps, start_step, reads=reads, num_threads=num_threads) as readings:
            yield (
                self._agreed(step, reads, reading)  # type: ignore[arg-type]
                for step, reading in enumerate(readings, start=start_step)
            )


def _patiently(read: Callable[[], Batch]) -> Batch:
    for pause_s in _PAUSES_S:
        try:
            return read()
        except Exception as error:
            # Only a refusal by the operating system, which has a number, may pass; damaged files stay damaged.
            cause: BaseException | None = error
            while cause is not None and not (isinstance(cause, OSError) and cause.errno is not None):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            _LOG.warning("%s; trying again in %g s", error, pause_s)
            time.sleep(pause_s)
    return read()
