"""What a user says about order, in one record: table, consumption, hint and window, checked against each other."""

from dataclasses import dataclass

from rrfp_jax.arbitration.consumption import Consumption, ready, strict
from rrfp_jax.arbitration.hints import HINTS, SCHEDULE, hint_by_name, schedule_hint
from rrfp_jax.arbitration.window import check_windows
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.tasks import Placement

CONSUMPTIONS = ("ready", "strict")
DEFAULT_WINDOW = 32


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """How every stage orders its tasks.

    Raises ValueError, with the remedy, where the parts contradict each other.
    """

    hint: str | None = None
    """Ranks the ready tasks; strict consumption follows its table whatever the hint is. None: ``schedule`` where there
    is a table, else ``bf``, or ``bf-deep`` with several chunks per stage."""
    consume: str = "ready"
    """``ready`` runs the best of the ready tasks; ``strict`` runs the table, waiting for each of its entries."""
    table: ScheduleTable | None = None
    window: int | tuple[int, ...] | None = None
    """Microbatches that a stage may hold, one number or one per stage. None: 32; under ``strict`` the table's peak."""

    def __post_init__(self) -> None:
        if self.consume not in CONSUMPTIONS:
            raise ValueError(f"consume is {self.consume!r}: choose one of {', '.join(CONSUMPTIONS)}")
        if self.hint is not None and self.hint != SCHEDULE:
            hint_by_name(self.hint)
        if self.table is None and self.hint == SCHEDULE:
            raise ValueError("hint 'schedule' ranks by a table, and none is given: name a schedule")
        if self.is_strict:
            self._check_strict()

    def _check_strict(self) -> None:
        if self.table is None:
            raise ValueError("strict consumption follows a table, and none is given: name a schedule")
        if self.window is not None:
            self.table.check_window(self.window)

    @property
    def is_strict(self) -> bool:
        return self.consume == "strict"

    def hint_name(self, placement: Placement) -> str:
        """The hint in force on this placement."""
        if self.hint is not None:
            return self.hint
        if self.table is not None:
            return SCHEDULE
        return "bf-deep" if max(map(len, placement.chunks_of_stage)) > 1 else "bf"

    def windows(self, placement: Placement) -> tuple[int, ...]:
        """The window of every stage."""
        if self.window is None and self.is_strict:
            assert self.table is not None
            return self.table.peak_in_flight()
        return check_windows(DEFAULT_WINDOW if self.window is None else self.window, placement.num_stages)

    def consumptions(self, placement: Placement) -> tuple[Consumption, ...]:
        """What every stage's arbiter asks."""
        if self.table is not None and self.table.placement != placement:
            raise ValueError(
                f"table {self.table.name!r} places chunks on stages {self.table.placement.stage_of_chunk}, "
                f"the pipeline on {placement.stage_of_chunk}: give the pipeline the table's placement"
            )
        if self.is_strict:
            assert self.table is not None
            return tuple(strict(order) for order in self.table.orders)
        name = self.hint_name(placement)
        if name == SCHEDULE:
            assert self.table is not None
            return tuple(ready(schedule_hint(order)) for order in self.table.orders)
        return (ready(HINTS[name]),) * placement.num_stages
