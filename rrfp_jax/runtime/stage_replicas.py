"""What the replicas of a stage in one process do together: R, and with a sharded optimizer state U.

A program over several replicas' devices is launched once per process, although each replica has a compute thread of its
own. So the threads meet: the last one to come launches for all, and every one goes away with its own part. All of them
come, and in the same order, because a step ends in lockstep (see :class:`rrfp_jax.arbitration.StepRules`).
"""

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.programs.agreement import Verdict
from rrfp_jax.programs.replica_programs import ReplicaPrograms

Launch = Callable[[dict[int, Any]], Mapping[int, Any]]


class StageReplicas:
    """The replicas of one stage of which this process hosts devices.

    Args:
        programs: by base number, the programs of the stage's chunks.
        states: by base number, the optimizer states that the replicas share; updated in place.
        local: the replicas, ascending.
    """

    def __init__(self, programs: Mapping[int, ReplicaPrograms], states: dict[int, Any], local: tuple[int, ...]) -> None:
        self._programs, self._states = programs, states
        self._meetings = _Meetings(len(local))
        self._gradients: dict[int, Any] = {}

    def shares_optimizer(self, base: int) -> bool:
        """Whether ``update`` is to be called for a chunk."""
        return self._programs[base].shards_optimizer

    def reduce(
        self, step: int, base: int, replica: int, accumulators: Any, shared: tuple[Any, ...]
    ) -> tuple[Any, float]:
        """R of a chunk: what this replica holds from now on, and the squared norm of the sums."""

        def launch(parts: dict[int, Any]) -> Mapping[int, Any]:
            tied = {r: other for r, (_, other) in parts.items()} if shared else None
            reduced = self._programs[base].all_reduce({r: own for r, (own, _) in parts.items()}, tied)
            self._gradients[base] = reduced.gradients
            norm = float(reduced.squared_norm)
            return {r: (reduced.accumulators[r], norm) for r in parts}

        result: tuple[Any, float] = self._meetings.meet((step, "R", base), replica, (accumulators, shared), launch)
        return result

    def update(self, step: int, base: int, replica: int, params: Any, verdict: Verdict) -> Any:
        """U of a chunk with a shared optimizer state: the new parameters on this replica."""

        def launch(parts: dict[int, Any]) -> Mapping[int, Any]:
            gradients, state = self._gradients.pop(base), self._states[base]
            new, self._states[base] = self._programs[base].update(parts, gradients, state, verdict.scale, verdict.apply)
            return new

        return self._meetings.meet((step, "U", base), replica, params, launch)


@dataclass
class _Meeting:
    parts: dict[int, Any] = field(default_factory=dict)
    results: Mapping[int, Any] | None = None
    error: BaseException | None = None
    num_gone: int = 0


class _Meetings:
    """Where a number of threads meet, again and again."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._condition = threading.Condition()
        self._meetings: dict[Hashable, _Meeting] = {}

    def meet(self, what: Hashable, who: int, part: Any, launch: Launch) -> Any:
        """Bring ``part``, have ``launch`` called once with everybody's parts, and return what it gives to ``who``.

        Blocks until all have come; what ``launch`` raises is raised for everyone.
        """
        with self._condition:
            meeting = self._meetings.setdefault(what, _Meeting())
            meeting.parts[who] = part
            if len(meeting.parts) == self._num:
                self._launch(meeting, launch)
            else:
                self._condition.wait_for(lambda: meeting.results is not None or meeting.error is not None)
            meeting.num_gone += 1
            if meeting.num_gone == self._num:
                del self._meetings[what]
        if meeting.error is not None:
            raise meeting.error
        assert meeting.results is not None
        return meeting.results[who]

    def _launch(self, meeting: _Meeting, launch: Launch) -> None:
        try:
            meeting.results = launch(dict(sorted(meeting.parts.items())))
        except BaseException as error:
            meeting.error = error
        self._condition.notify_all()
