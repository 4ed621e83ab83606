"""Choices with their order made and their memory forecast: hints with their windows, and ways to consume a table."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from rrfp_jax.core import Order, Ordering
from rrfp_jax.costs import CutModel
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.costs.order_memory import forecast_memory
from rrfp_jax.planner.records import PlanChoice
from rrfp_jax.planner.search_space import LINEAR, READY, STRICT, Point, SearchSpace
from rrfp_jax.schedules import ScheduleTable

if TYPE_CHECKING:
    from rrfp_jax.planner.judging import Judge

PLANNED_HINTS = ("bf", "bfw", "bf-deep")
_WAYS = ((STRICT, None), (READY, None), (READY, False))
"""Consumption and foresight of the ways to consume a table."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanCandidate:
    """A choice with its order made, and the memory that it takes."""

    choice: PlanChoice
    order: Order
    memory: tuple[StageForecast, ...]

    @property
    def is_strict(self) -> bool:
        """Whether the stages keep to a table."""
        return self.choice.ordering.consume == STRICT

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest stage."""
        return max(stage.peak for stage in self.memory)

    def fits(self, memory_bytes: int | None) -> bool:
        """Returns whether no stage takes more."""
        return memory_bytes is None or self.peak_bytes <= memory_bytes


def make_candidate(
    point: Point, cut: CutModel, ordering: Ordering, name: str, *, is_even: bool, is_searched: bool = False
) -> PlanCandidate:
    """Returns the candidate; raises ValueError where the ordering does not fit the cut."""
    order = ordering.resolve(cut.placement, cut.graph)
    memory = forecast_memory(order, dict(enumerate(cut.chunk_bytes)), cut.num_microbatches)
    choice = PlanChoice(
        shape=point.shape, cut=cut, is_even=is_even, ordering=ordering, order_name=name, is_searched=is_searched
    )
    return PlanCandidate(choice=choice, order=order, memory=tuple(memory))


def largest_windows(cut: CutModel, memory_bytes: int | None, most: int | None = None) -> tuple[int, ...] | None:
    """Returns the most microbatches that memory of each stage holds, all or ``most``; None where some stage holds
    none."""
    most = most or cut.num_microbatches
    order = Ordering(hint=plain_hint(cut), window=most).resolve(cut.placement, cut.graph)
    found = forecast_memory(order, dict(enumerate(cut.chunk_bytes)), cut.num_microbatches)
    windows = [most if memory_bytes is None else stage.largest_window(memory_bytes) for stage in found]
    return tuple(windows) if min(windows) > 0 else None


def plain_hint(cut: CutModel) -> str:
    """Returns the hint that runs the backward as the cut has it."""
    return "bfw" if cut.split else "bf"


def hints_for(
    point: Point, cut: CutModel, space: SearchSpace, memory_bytes: int | None, *, is_even: bool
) -> Iterator[PlanCandidate]:
    """Yields the hints whose backward is as the cut has it, with the largest windows that fit, and with short ones."""
    windows = largest_windows(cut, memory_bytes)
    if windows is None or READY not in space.consumptions:
        return
    most = 2 * point.shape.num_stages
    for name in PLANNED_HINTS[:2] if point.family == LINEAR else PLANNED_HINTS:
        if (name != "bf") != cut.split or (space.schedules is not None and name not in space.schedules):
            continue
        for window in dict.fromkeys([windows, tuple(min(each, most) for each in windows)]):
            ordering = Ordering(hint=name, window=window, backward="split" if cut.split else "fused")
            yield make_candidate(point, cut, ordering, name, is_even=is_even)


@dataclass(eq=False, kw_only=True)
class TriedTable:
    """A table that was tried on a cut: its time where it is kept to, and the ways to consume it that fit."""

    point: Point
    cut: CutModel
    table: ScheduleTable
    judge: "Judge"
    num_draws: int
    """Draws by which it is timed."""
    is_even: bool
    is_searched: bool = False
    has_room: bool = False
    """Whether some way to consume it was found to fit."""
    _made: dict[int, PlanCandidate | None] = field(default_factory=dict)

    @cached_property
    def tasks_of_stages(self) -> tuple[object, ...]:
        """The tasks that stages run in order, strictly and by readiness; equal for tables that differ in name alone."""
        hint = self.table.hint
        return self.table.graph, self.table.orders, self.table.weights_fill, None if hint is None else hint.orders

    @cached_property
    def value(self) -> float:
        """Milliseconds per sample where the table is kept to, whether memory suffices for it or not."""
        times_ms = self.judge.strict_times_ms(self.cut, self.table, self.num_draws)
        return float(times_ms.mean()) / self.point.shape.batch_size

    def fitting(self, space: SearchSpace, memory_bytes: int | None) -> Iterator[PlanCandidate]:
        """Yields the strict way, ready with foresight and ready without, if they are allowed and fit the memory."""
        if not self.may_fit(memory_bytes):
            return
        for number in range(len(_WAYS)):
            one = self._way(number, space)
            if one is not None and one.fits(memory_bytes):
                self.has_room = True
                yield one

    def least_bytes(self, space: SearchSpace) -> int | None:
        """Returns the bytes of the fullest stage in the way that takes least; None where no way is allowed."""
        ways = [self._way(number, space) for number in range(len(_WAYS))]
        return min((one.peak_bytes for one in ways if one is not None), default=None)

    def may_fit(self, memory_bytes: int | None) -> bool:
        """Returns whether the activations of the table's row, counted as the smallest of the stage, fit the memory.

        Quick, where the forecast takes longer; True is no promise.
        """
        if memory_bytes is None:
            return True
        for stage, chunks in enumerate(self.cut.placement.chunks_of_stage):
            sizes = [self.cut.chunk_bytes[chunk] for chunk in chunks]
            held = round(self._peaks[stage] * len(chunks)) * min(each.per_microbatch for each in sizes)
            if sum(each.fixed for each in sizes) + held > memory_bytes:
                return False
        return True

    @cached_property
    def _peaks(self) -> tuple[float, ...]:
        return self.table.peak_activations()

    def _way(self, number: int, space: SearchSpace) -> PlanCandidate | None:
        """Returns a way to consume the table, made once; None where it is not allowed."""
        consume, foresight = _WAYS[number]
        if number not in self._made:
            self._made[number] = None
            if consume in space.consumptions:
                ordering = Ordering(schedule=self.table, consume=consume, foresight=foresight)
                self._made[number] = make_candidate(
                    self.point, self.cut, ordering, self.table.name, is_even=self.is_even, is_searched=self.is_searched
                )
        return self._made[number]
