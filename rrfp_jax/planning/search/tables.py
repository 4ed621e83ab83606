"""A table that was tried on a cut: its time where it is kept to, and the ways to consume it that fit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from rrfp_jax.arbitration import Ordering
from rrfp_jax.costs import CutModel
from rrfp_jax.planning.search.candidates import Candidate, candidate
from rrfp_jax.planning.search.judging import Judge
from rrfp_jax.planning.search.points import Point
from rrfp_jax.planning.search.wishes import READY, STRICT, Wishes
from rrfp_jax.schedules import ScheduleTable


@dataclass(eq=False, kw_only=True)
class TriedTable:
    """A table on a cut."""

    point: Point
    cut: CutModel
    table: ScheduleTable
    judge: Judge
    num_draws: int
    """By which it is timed."""
    is_even: bool
    is_searched: bool = False
    has_room: bool = False
    """Whether some way to consume it was found to fit."""
    _made: dict[int, Candidate | None] = field(default_factory=dict)

    @cached_property
    def says(self) -> tuple[object, ...]:
        """What stages run in which order, strictly and by readiness: the same in tables that differ in name alone."""
        hint = self.table.hint
        return self.table.graph, self.table.orders, self.table.weights_fill, None if hint is None else hint.orders

    @cached_property
    def value(self) -> float:
        """The objective over samples where the table is kept to, whether memory has room for it or not."""
        times = self.judge.strict_times(self.cut, self.table, self.judge.steps_ms(self.cut, self.num_draws))
        return times.value(self.judge.objective) / self.point.shape.batch_size

    def fitting(self, wishes: Wishes, memory_bytes: int | None) -> Iterator[Candidate]:
        """Strict, ready with foresight and ready without, as far as they are allowed and memory has room."""
        if not self.may_fit(memory_bytes):
            return
        for number in range(3):
            if number not in self._made:
                self._made[number] = self._candidate(number, wishes)
            one = self._made[number]
            if one is not None and one.fits(memory_bytes):
                self.has_room = True
                yield one

    def least_bytes(self, wishes: Wishes) -> int | None:
        """What the fullest stage takes in the way that takes least; None where no way is allowed."""
        for number in range(3):
            if number not in self._made:
                self._made[number] = self._candidate(number, wishes)
        return min((one.peak_bytes for one in self._made.values() if one is not None), default=None)

    def may_fit(self, memory_bytes: int | None) -> bool:
        """Whether the forecast, which takes longer, may find room for what the table holds: as many activations as in
        its row, the smallest that there are."""
        if memory_bytes is None:
            return True
        stages = enumerate(self.cut.placement.chunks_of_stage)
        peaks = self._peaks
        for stage, chunks in stages:
            sizes = [self.cut.chunk_bytes[chunk] for chunk in chunks]
            held = round(peaks[stage] * len(chunks)) * min(each.per_microbatch for each in sizes)
            if sum(each.fixed for each in sizes) + held > memory_bytes:
                return False
        return True

    @cached_property
    def _peaks(self) -> tuple[float, ...]:
        return self.table.peak_activations()

    def _candidate(self, number: int, wishes: Wishes) -> Candidate | None:
        if (STRICT if number == 0 else READY) not in wishes.consumptions:
            return None
        consume = STRICT if number == 0 else READY
        try:
            ordering = Ordering(
                schedule=self.table,
                consume=consume,
                window=wishes.window,
                foresight=False if number == 2 else None,
            )
            return candidate(
                self.point,
                self.cut,
                ordering,
                self.table.name,
                is_even=self.is_even,
                is_searched=self.is_searched,
            )
        except ValueError:  # the window admits less than the table holds
            return None
