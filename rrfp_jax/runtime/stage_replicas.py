"""R of the replicas of a stage in one process, and with a sharded optimizer state U: one launch for all of them.

A program over several replicas' devices is launched once per process, although each replica has a compute thread of its
own. So the threads meet at a barrier: the last one to arrive launches for all, and every one leaves with its own
results. All of them arrive, and in the same order, because a step ends in lockstep (see
:class:`rrfp_jax.core.StepRules`). If one cannot, since a task of its failed, the barrier is broken, and all leave with
that error.
"""

import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
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
        self._num_local = len(local)
        self._gradients: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._open: dict[Hashable, tuple[dict[int, Any], Future[Mapping[int, Any]]]] = {}
        """Arguments by replica, and the results, of launches for which not all have come."""
        self._error: BaseException | None = None

    def shares_optimizer(self, base: int) -> bool:
        """Returns whether ``update`` is to be called for a chunk."""
        return self._updates[base].shards_optimizer

    def reduce(
        self, step: int, base: int, replica: int, accumulators: Any, shared: tuple[Any, ...], *, optimizer_state: Any
    ) -> tuple[Any, Any]:
        """Runs R of a chunk; returns the accumulators from now on, and the squared norm of the sums (float32 scalar).

        ``optimizer_state`` is the replica's own, if the replicas do not share one.
        """

        def launch(arrived: Mapping[int, tuple[Any, Any, Any]]) -> Mapping[int, tuple[Any, Any]]:
            sums = {r: own for r, (own, _, _) in arrived.items()}
            tied = {r: layers for r, (_, layers, _) in arrived.items()} if shared else None
            own_states = {r: state for r, (_, _, state) in arrived.items()}
            state = self._states[base] if self.shares_optimizer(base) else own_states
            reduced = self._updates[base].reduce(sums, tied, state)
            self._gradients[base] = reduced.gradients
            return {r: (each, reduced.squared_norm) for r, each in reduced.accumulators.items()}

        result: tuple[Any, Any] = self.meet((step, "R", base), replica, (accumulators, shared, optimizer_state), launch)
        return result

    def update(self, step: int, base: int, replica: int, params: Any, verdict: Verdict) -> Any:
        """Runs U of a chunk with a shared optimizer state; returns the new parameters on this replica."""

        def launch(arrived: Mapping[int, Any]) -> Mapping[int, Any]:
            gradients, state = self._gradients.pop(base), self._states[base]
            updated, self._states[base] = self._updates[base].update(
                arrived, gradients, state, verdict.scale, verdict.apply
            )
            return updated

        return self.meet((step, "U", base), replica, params, launch)

    def meet(
        self, key: Hashable, replica: int, argument: Any, launch: Callable[[dict[int, Any]], Mapping[int, Any]]
    ) -> Any:
        """Blocks until all have come; the last thread launches for all of them. Returns the replica's result.

        An error of ``launch`` is raised for everyone, and breaks the barrier; so is the error of :meth:`abort`.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            arrived, results = self._open.setdefault(key, ({}, Future()))
            arrived[replica] = argument
            is_last = len(arrived) == self._num_local
            if is_last:
                del self._open[key]
        if not is_last:
            return results.result()[replica]
        # Without the lock: a launch may take long, and others may meet for another launch meanwhile.
        try:
            results.set_result(launch(dict(sorted(arrived.items()))))
        except BaseException as error:
            results.set_exception(error)
            self.abort(error)
            raise
        return results.result()[replica]

    def abort(self, error: BaseException) -> None:
        """Ends all waits for a replica of which a task has failed, now and later, with the error."""
        with self._lock:
            self._error = self._error or error
            broken, self._open = list(self._open.values()), {}
        for _, results in broken:
            results.set_exception(error)
