"""R of the replicas of a stage in one process, and with a sharded optimizer state U: one launch for all of them.

A program over several replicas' devices is launched once per process, although each replica has a compute thread of its
own. So the threads meet at a barrier: the last one to arrive launches for all, and every one leaves with its own
results. All of them arrive, and in the same order, because a step ends in lockstep (see
:class:`rrfp_jax.core.StepRules`). If one cannot, since a task of its failed, the barrier is broken, and all leave with
that error.
"""

import threading
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.programs.agreement import Verdict
from rrfp_jax.programs.updates import StageUpdates


class StageReplicas:
    """The replicas of one stage of which this process hosts devices.

    Args:
        updates: by base number, R and U of the stage's chunks.
        states: by base number, the optimizer states that the replicas share; updated in place.
        local: the replicas, ascending.
    """

    def __init__(self, updates: Mapping[int, StageUpdates], states: dict[int, Any], local: tuple[int, ...]) -> None:
        self._updates, self._states = updates, states
        self._barrier = LaunchBarrier(len(local))
        self._gradients: dict[int, Any] = {}

    def shares_optimizer(self, base: int) -> bool:
        """Returns whether ``update`` is to be called for a chunk."""
        return self._updates[base].shards_optimizer

    def reduce(
        self, step: int, base: int, replica: int, accumulators: Any, shared: tuple[Any, ...], *, optimizer_state: Any
    ) -> tuple[Any, Any]:
        """Runs R of a chunk; returns the accumulators from now on, and the squared norm of the sums (float32 scalar).

        ``optimizer_state`` is the replica's own, if the replicas do not share one.
        """
        with self._barrier.meet((step, "R", base), replica, (accumulators, shared, optimizer_state)) as meeting:
            if meeting.is_launching:
                tied = {r: layers for r, (_, layers, _) in meeting.arrived.items()} if shared else None
                sums = {r: own for r, (own, _, _) in meeting.arrived.items()}
                own_states = {r: state for r, (_, _, state) in meeting.arrived.items()}
                state = self._states[base] if self.shares_optimizer(base) else own_states
                reduced = self._updates[base].reduce(sums, tied, state)
                self._gradients[base] = reduced.gradients
                meeting.results = {r: (each, reduced.squared_norm) for r, each in reduced.accumulators.items()}
        result: tuple[Any, Any] = meeting.results[replica]
        return result

    def update(self, step: int, base: int, replica: int, params: Any, verdict: Verdict) -> Any:
        """Runs U of a chunk with a shared optimizer state; returns the new parameters on this replica."""
        with self._barrier.meet((step, "U", base), replica, params) as meeting:
            if meeting.is_launching:
                gradients, state = self._gradients.pop(base), self._states[base]
                meeting.results, self._states[base] = self._updates[base].update(
                    meeting.arrived, gradients, state, verdict.scale, verdict.apply
                )
        return meeting.results[replica]

    def abort(self, error: BaseException) -> None:
        """Ends all waits for a replica of which a task has failed, now and later, with the error."""
        self._barrier.abort(error)


@dataclass
class Meeting:
    """One launch of a barrier."""

    arrived: dict[int, Any] = field(default_factory=dict)
    """Arguments by replica."""
    is_launching: bool = False
    """True in the thread that came last, while it launches."""
    results: Mapping[int, Any] = field(default_factory=dict)
    """Results by replica."""
    done: "Future[None]" = field(default_factory=Future)


class LaunchBarrier:
    """A barrier at which a number of threads meet, again and again; it can be broken."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._open: dict[Hashable, Meeting] = {}
        self._error: BaseException | None = None

    @contextmanager
    def meet(self, key: Hashable, replica: int, argument: Any) -> Iterator[Meeting]:
        """Blocks until all have come; in the last thread the body runs first, with ``is_launching``, for all of them.

        An error that the body raises there is raised for everyone, and breaks the barrier; so is the error of
        :meth:`abort`. No lock is held while the body runs.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            meeting = self._open.setdefault(key, Meeting())
            meeting.arrived[replica] = argument
            is_last = len(meeting.arrived) == self._num_threads
            if is_last:
                del self._open[key]
        if not is_last:
            meeting.done.result()
            yield meeting
            return
        meeting.arrived, meeting.is_launching = dict(sorted(meeting.arrived.items())), True
        try:
            yield meeting
        except BaseException as error:
            meeting.done.set_exception(error)
            self.abort(error)
            raise
        meeting.is_launching = False
        meeting.done.set_result(None)

    def abort(self, error: BaseException) -> None:
        """Breaks the barrier: all who wait leave with the error, and nobody waits any more."""
        with self._lock:
            self._error = self._error or error
            broken, self._open = list(self._open.values()), {}
        for meeting in broken:
            meeting.done.set_exception(error)
