"""The batches of a run: read with patience, and taken or refused by all processes alike.

Each process reads its own share of a batch. If one cannot, the others must not begin the step: they would wait for it,
and the state before the step could not be saved any more. So all processes exchange the outcomes of their reading
before any of them begins, which takes a moment while the step before runs.

A sample that one process cannot read is left out by all of them, if the configuration allows as many: the sample keeps
its place, and counts nothing in the loss.

The first process also chooses the order in which a step's microbatches come (:class:`CostOrders`), and tells the others
in the same exchange, in which it hears how well costs told their times. So measured times, which differ from process
to process, may decide about it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    predicted_s: float
    """The predicted time of the step's tasks."""


BatchCosts = Callable[[Batch], tuple[Durations, Absences]]
"""A function from a batch to the costs of its tasks [chunks, microbatches, 3], in any unit, and the pairs that it
lacks."""
_PART_OF_STEP = 0.01
"""The part of a step's time that the search for the next order may take of the host's."""
_WALKED_S = 4e-6
"""Seconds of the host for a task of a walk, about."""
_MOST_ROUNDS = 4
_TRUSTED, _REMEMBERED = 0.5, 2
"""The correlation of costs with measured times from which on costs count, and the number of steps over which it is
smoothed. It begins at 0, so that chance does not do."""
_ALIKE = 0.02
"""Relative difference of costs below which noise decides how long microbatches take."""


class _Experience(NamedTuple):
    """Experience of a process with the costs of a chunk."""

    chunk: int
    forward_s: float = 0.0
    """Seconds for a unit of cost; 0: not measured. Alike for the backward."""
    backward_s: float = 0.0
    agreement: float = 0.0
    """Correlation of costs with measured times over the last steps."""
    spread: float = 0.0
    """Standard deviation of the microbatches' costs, over their mean; 0: no costs were compared."""

    def after(
        self, costs: NDArray[np.float64], predicted: NDArray[np.float64], taken: NDArray[np.float64]
    ) -> "_Experience":
        """Returns the experience after a step, with costs [microbatches, 3], predicted times [microbatches], and those
        of forward and backward [microbatches, 2]."""

        def seconds(before: float, unit: float, found: float) -> float:
            new = float(found / unit) if unit > 0 else 0.0
            return (3 * before + new) / 4 if before and new else before or new

        agreement, spread = self.agreement, self.spread
        if len(predicted) > 2 and np.ptp(predicted) > _ALIKE * predicted.max() > 0:
            times = taken.sum(axis=1)
            found = float(np.corrcoef(predicted, times)[0, 1]) if np.ptp(times) > 0 else 0.0
            agreement += (found - agreement) / _REMEMBERED
            spread = float(predicted.std() / predicted.mean())
        forward_s = seconds(self.forward_s, costs[:, 0].sum(), taken[:, 0].sum())
        backward_s = seconds(self.backward_s, costs[:, 1:].sum(), taken[:, 1].sum())
        return _Experience(self.chunk, forward_s, backward_s, agreement, spread)


class CostOrders:
    """Chooses the order of each step's microbatches, while a step before it runs.

    The longer the steps, the longer the search. Costs are corrected by the times that all processes measure. Until they
    have told these times for some steps, and whenever they do not, microbatches come in their own order.

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
        self._orders.trusts_costs = False
        self._num_replicas, self._share = num_replicas, order.graph.num_microbatches
        self._num_chunks = order.graph.num_chunks
        self._own: dict[int, _Experience] = {}
        """Experience with the chunks that this process hosts."""
        self._all = list[_Experience]()
        """Experience of all processes."""
        self._costs: dict[int, Durations] = {}
        """Predicted costs of the steps that have not ended yet."""
        self._step_s = 0.0
        self._lock = threading.Lock()  # several threads may make batches

    def choose(self, step: int, batch: Batch) -> StepOrder | None:
        """Returns the order of a step's microbatches; None: as they come. May be called from any thread."""
        with self._lock:
            costs, absent = self._costs_of(batch)
            self._costs[step] = costs
            if not self._is_first():
                return None
            orders, allowed_s = self._orders, _PART_OF_STEP * self._step_s / self._num_replicas
            if allowed_s < 2 * orders.num_tasks * _WALKED_S:
                return None
            rounds = int(allowed_s / (orders.walks_per_round * orders.num_tasks * _WALKED_S))
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
            return StepOrder(found, max(predicted_ms) / 1e3)

    def _corrections(self) -> Durations:
        """Returns the seconds for a unit of cost [chunks, 3], the mean of the replicas; where nobody has measured it,
        the mean of all."""
        sums, counts = np.zeros((2, self._num_chunks, 2))
        for each in self._all:
            seconds = each.forward_s, each.backward_s
            sums[each.chunk] += seconds
            counts[each.chunk] += np.sign(seconds)
        mean = sums.sum() / counts.sum() if counts.any() else 1.0
        return np.where(counts > 0, sums / np.maximum(counts, 1), mean)[:, [0, 1, 1]]

    def experience(self) -> list[list[float]]:
        """Returns the experience of this process as plain data, for all to :meth:`hear`."""
        with self._lock:
            return [list(each) for each in self._own.values()]

    def hear(self, told: Iterable[Sequence[Sequence[float]]]) -> None:
        """Takes over the experience of all processes."""
        with self._lock:
            self._all = [_Experience(int(each[0]), *each[1:]) for of_one in told for each in of_one]
            # The more the costs of a chunk vary, the more it counts.
            spread = sum(each.spread for each in self._all)
            agreement = sum(each.spread * each.agreement for each in self._all)
            self._orders.trusts_costs = spread > 0 and agreement >= _TRUSTED * spread

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
            predicted = (costs * self._corrections()[:, None, :]).sum(axis=2)
            for chunk, taken in enumerate(measured):
                known = (taken.sum(axis=1) > 0) & (predicted[chunk] > 0) & np.isfinite(predicted[chunk])
                if known.any():
                    before = self._own.get(chunk, _Experience(chunk))
                    self._own[chunk] = before.after(costs[chunk, known], predicted[chunk, known], taken[known])


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
            own = {
                "problem": reading.problem,
                "left out": sorted(reading.left_out),
                "order": reading.order,
                "experience": [] if self.orders is None else self.orders.experience(),
            }
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
        if self.orders is not None:
            self.orders.hear(each["experience"] for each in outcomes.values())
        told = [outcomes[rank]["order"] for rank in sorted(outcomes) if outcomes[rank]["order"] is not None]
        self.order = StepOrder(*told[0]) if told else None
        return reading.batch

    def state_at(self, step: int) -> Any:
        """Returns the state of the data set before ``step``, as plain data; None: the number of the step says all."""
        return self._dataset.state_at(step) if hasattr(self._dataset, "state_at") else None

    def go_on(self, step: int, state: Any) -> None:
        """Takes the state before ``step`` from a checkpoint."""
        if state is not None:
            self._dataset.go_on(step, state)

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
