"""The batches of a run: read with patience, and taken or refused by all processes alike.

Each process reads its own share of a batch. If one cannot, the others must not begin the step: they would wait for it,
and the state before the step could not be saved any more. So all processes exchange the outcomes of their reading
before any of them begins, which takes a moment while the step before runs.

A sample that one process cannot read is left out by all of them, if the configuration allows as many: the sample keeps
its place, and counts nothing in the loss.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from rrfp_jax.data import BrokenData
from rrfp_jax.data.dataset import Batch, Reads, prefetched

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


class AgreedBatches:
    """The batches of a data set, as all processes agree on them.

    Args:
        gather: gathers the outcomes of all processes.
        max_bad: how many samples may be left out.
        num_bad: how many were left out before.
    """

    def __init__(self, dataset: Any, gather: _AllGather, *, max_bad: int = 0, num_bad: int = 0) -> None:
        self._dataset, self._gather, self._max_bad = dataset, gather, max_bad
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
                return Reading(_patiently(partial(self._dataset.batch, step, reads, *rest)), left_out)
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
            outcomes = self._gather("batch", {"problem": reading.problem, "left out": sorted(reading.left_out)})
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
