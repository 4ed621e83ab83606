"""What an arbiter asks its foresight: which entry is next, what that lacks, and what may run meanwhile.

A part of :class:`rrfp_jax.core.arbiter.StageArbiter`, apart because it reads the arbiter's state and changes
nothing but the foresight's; the rules are in :mod:`rrfp_jax.core.foresight`.
"""

from collections.abc import Sequence

from rrfp_jax.core.events import InputPromised, Instruction, Message, TaskAnnounced, WakeAt, record
from rrfp_jax.core.foresight import Foresight
from rrfp_jax.core.hints import Heads
from rrfp_jax.core.stage_state import StageState


class Lookout(StageState):
    """An arbiter as far as foresight sees it."""

    __slots__ = ()

    def _admits(self, position: int) -> bool:
        """Whether the F at this position may start as far as memory goes."""
        raise NotImplementedError

    def _hear_announcement(self, event: TaskAnnounced | InputPromised) -> bool:
        """Take in what only foresight hears; tells whether it may end a hold."""
        foresight = self._foresight
        if foresight is None:
            return False
        if event.step != self.step or not self.is_active:
            step, time_s, message = event
            is_ahead = self.step is None or step > self.step
            if is_ahead and self._lacks_early(step, message):
                foresight.hear_early(step, message, time_s)
            return False
        number = self._ranked.plan.arrivals.get(event.message)
        if number is not None and number not in self._arrived:
            foresight.hear(number, event.time_s)
        return foresight.held_since_s is not None

    def _hear_promise(self, event: InputPromised) -> bool:
        """Take in what only foresight uses; tells whether the stage may have something to do."""
        self._hear_announcement(event)
        step, _, message = event
        if step != self.step or not self.is_active:
            if self._lacks_early(step, message):
                self._promises.hear_early(step, message)
            return False
        number = self._ranked.plan.arrivals.get(message)
        if number is None or number in self._arrived:
            return False
        self._promises.made.add(number)
        return self._foresight is not None

    def _lacks_early(self, step: int, message: Message) -> bool:
        """Whether this message of a step that has not begun is not here yet."""
        return all(message != early.message for early in self._early.get(step, ()))

    def _promised_next(self) -> int | None:
        """The next entry, where nothing is ready, if it lacks nothing but what is promised."""
        foresight, due = self._foresight, self._due
        is_early = self._certainty is not None and due is not None and not self._is_told
        if foresight is None or is_early or len(self._running) > (due is not None):
            return None
        place = self._unrestrained(foresight.next)
        missing = self._missing(place) if place < len(self._ranked.at) else ()
        return place if missing and self._promises.cover(missing) and foresight.awaits(place) else None

    def _look_ahead(self, foresight: Foresight, best: int, heads: Heads, out: list[Instruction]) -> int | None:
        """What to run instead of ``best``: itself, something that ends before what is in sight arrives, or nothing; or
        what is in sight itself, where the device waits for its inputs."""
        ranked, waiting, place = self._ranked, self._waiting, foresight.next
        at = ranked.at
        while waiting[at[place]] < 0:
            place += 1
        foresight.next = place
        if self._ahead is not None:
            place = self._unrestrained(place)
        if place == best:
            return best
        missing = self._missing(place)
        if not missing:
            return best
        due = self._due
        if len(self._running) > (due is not None):
            return None  # ahead of a running task only the next entry goes; its end decides on others
        now_s = self._now_s
        free_s = now_s if due is None else max(now_s, foresight.expected_end_s(ranked.position[due]))
        chosen = foresight.choose(best, heads, missing, now_s, free_s)
        if chosen is None and self._promises.cover(missing) and foresight.awaits(place):
            return place
        if chosen is None and (wake_s := foresight.wake_at_s()) is not None:
            out.append(record(WakeAt, (self.step, wake_s)))
        return chosen

    def _unrestrained(self, place: int) -> int:
        """The first entry from this one on that has not started and that read-ahead does not restrain; behind the last
        one where there is none."""
        at, tasks, waiting, ahead = self._ranked.at, self._ranked.plan.tasks, self._waiting, self._ahead
        while place < len(at):
            node = at[place]
            if waiting[node] >= 0 and (ahead is None or ahead.admits(tasks[node])):
                break
            place += 1
        return place

    def _missing(self, position: int) -> Sequence[int]:
        """The numbers of the messages that the entry at this position lacks; none if it lacks anything else."""
        ranked, arrived = self._ranked, self._arrived
        node = ranked.at[position]
        missing: Sequence[int] = self._foresight.outlook.inputs_of[node]  # type: ignore[union-attr]
        if not arrived.isdisjoint(missing):
            missing = tuple(number for number in missing if number not in arrived)
        if len(missing) != self._waiting[node] or (not ranked.plan.lanes[node] and not self._admits(position)):
            return ()
        return missing
