"""A choice with its order made and its memory forecast; and the hints that need no table."""

from collections.abc import Iterator
from dataclasses import dataclass

from rrfp_jax.arbitration import Order, Ordering
from rrfp_jax.costs import CutModel
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.costs.order_memory import forecast_memory
from rrfp_jax.planning.search.points import LINEAR, Point
from rrfp_jax.planning.search.records import Choice
from rrfp_jax.planning.search.wishes import READY, STRICT, Wishes

HINTS = ("bf", "bfw", "bf-deep")


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A choice with its order made, and the memory that it takes."""

    choice: Choice
    order: Order
    memory: tuple[StageForecast, ...]

    @property
    def is_strict(self) -> bool:
        """Whether the stages keep to a table."""
        return self.choice.ordering.consume == STRICT

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak for stage in self.memory)

    def fits(self, memory_bytes: int | None) -> bool:
        """Whether no stage takes more."""
        return memory_bytes is None or self.peak_bytes <= memory_bytes


def candidate(
    point: Point, cut: CutModel, ordering: Ordering, name: str, *, is_even: bool, is_searched: bool = False
) -> Candidate:
    """Raises ValueError where the ordering does not fit the cut."""
    order = ordering.resolve(cut.placement, cut.graph)
    memory = forecast_memory(order, dict(enumerate(cut.chunk_bytes)), cut.num_microbatches)
    choice = Choice(
        shape=point.shape, cut=cut, is_even=is_even, ordering=ordering, order_name=name, is_searched=is_searched
    )
    return Candidate(choice=choice, order=order, memory=tuple(memory))


def hint_names_for(point: Point, wishes: Wishes) -> tuple[str, ...]:
    """The hints worth a try on a placement."""
    if READY not in wishes.consumptions:
        return ()
    names = ("bf", "bfw") if point.family == LINEAR else HINTS
    return tuple(name for name in names if wishes.schedules is None or name in wishes.schedules)


def is_split(name: str) -> bool:
    """Whether a hint runs the backward as two tasks."""
    return name != "bf"


def largest_windows(cut: CutModel, memory_bytes: int | None, at_most: int | None) -> tuple[int, ...] | None:
    """The most microbatches that each stage has memory for, in a window; None where some stage has for none."""
    most = min(cut.num_microbatches, at_most or cut.num_microbatches)
    hint = "bfw" if cut.split else "bf"
    order = Ordering(hint=hint, window=most).resolve(cut.placement, cut.graph)
    found = forecast_memory(order, dict(enumerate(cut.chunk_bytes)), cut.num_microbatches)
    windows = [most if memory_bytes is None else stage.largest_window(memory_bytes) for stage in found]
    return tuple(windows) if min(windows) > 0 else None


def hints_for(
    point: Point, cut: CutModel, wishes: Wishes, memory_bytes: int | None, *, is_even: bool
) -> Iterator[Candidate]:
    """The hints whose backward is as the cut has it, with the largest windows that fit."""
    windows = largest_windows(cut, memory_bytes, wishes.window)
    if windows is None:
        return
    most = 2 * point.shape.num_stages
    for name in hint_names_for(point, wishes):
        if is_split(name) != cut.split:
            continue
        for window in dict.fromkeys([windows, tuple(min(each, most) for each in windows)]):
            ordering = Ordering(hint=name, window=window, backward="split" if cut.split else "fused")
            yield candidate(point, cut, ordering, name, is_even=is_even)
