"""Results of one schedule at one size, at all three levels: formulas, ideal table, execution under every hop and mode.

Times are in forwards of a whole stage (F = I = W, so B = 2F): to a schedule a compute-bound system is nothing but the
ratio of a hop to a forward, and systems of one ratio are computed once. The virtual time of an execution is in
milliseconds that make halves, thirds and sixteenths of a forward exact, so that ties are ties.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from experiments.systems.records import Hop
from rrfp_jax.commands.studies import RULES, chunk_durations
from rrfp_jax.core import DEFAULT_WINDOW, READY, STRICT, Order, Ordering
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, schedule_entry
from rrfp_jax.schedules.formulas import compare
from rrfp_jax.schedules.slots import EQUAL, execute, per_stage
from rrfp_jax.simulation import Communication, Costs, Links, Machine, peak_memory, simulate

FORWARD_MS = 192.0
"""Milliseconds of a whole stage's forward, in virtual time."""
_EXACT_MS = 2.0**-24
"""Milliseconds of which the times of hops are multiples, so that sums are exact."""
READINESS, FORESIGHT = "ready", "foresight"
ROOM = "+room"
ORDERS = (STRICT, READINESS, FORESIGHT, READINESS + ROOM, FORESIGHT + ROOM)
"""Ways to execute a table: strictly; as a hint for readiness alone and with foresight, holding no more activations than
the table does; and the same two with a window of microbatches where that is more."""


class Entry(NamedTuple):
    """Schedule that takes part; ``hanayo:4`` is Hanayo with 4 chunks per stage."""

    label: str
    name: str
    chunks_per_stage: int | None


class Case(NamedTuple):
    """Schedule at one size."""

    entry: Entry
    num_stages: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class Ideal:
    """Values by formulas and the ideal table, in which nothing communicates."""

    paper: float | None
    """Bubble rate of the paper; None where it gives none for this size with B = 2F."""
    closed_form: float | None
    """Bubble rate by our own closed form; None where there is none."""
    bubble: float
    """Bubble rate of the table."""
    step: float
    """Step time of the table, first start to last end."""
    peak: float
    """Activations of the table's fullest stage, in those of one microbatch on a whole stage."""

    @property
    def by_formula(self) -> float | None:
        """Bubble rate by the paper's formula, or else by ours."""
        return self.closed_form if self.paper is None else self.paper

    def step_by_formula(self, num_microbatches: int) -> float | None:
        """Returns the step time that belongs to that rate: the busiest stage's own span."""
        return None if self.by_formula is None else 3 * num_microbatches / (1 - self.by_formula)


class Setting(NamedTuple):
    """Settings for the execution of a table."""

    hop: Hop
    communication: Communication
    order: str
    """Order of execution, one of :data:`ORDERS`."""


class Executed(NamedTuple):
    """Results of one execution."""

    step: float
    """Step time, first start to last end."""
    bubble: float
    peak: float


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Results of one case; ``refused`` says why there are none."""

    case: Case
    ideal: Ideal | None = None
    executed: tuple[tuple[Setting, Executed], ...] = ()
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class CaseJob:
    """Case, and the settings that it is executed under."""

    case: Case
    hops: tuple[Hop, ...]
    communications: tuple[Communication, ...]
    orders: tuple[str, ...] = ORDERS
    window: int = DEFAULT_WINDOW
    """Window of the orders with room."""

    @property
    def size(self) -> int:
        """Estimate of the amount of work."""
        chunks = self.case.entry.chunks_per_stage or schedule_entry(self.case.entry.name).shape.chunks_per_stage
        return self.case.num_stages * self.case.num_microbatches * chunks


def study_case(job: CaseJob) -> CaseResult:
    """Runs a case; one that does not fit its size is refused with the reason."""
    try:
        ideal = ideal_of(job.case)
    except ValueError as error:
        return CaseResult(case=job.case, refused=str(error))
    executed = tuple((setting, run(job.case, setting, window=job.window)) for setting in settings_of(job))
    return CaseResult(case=job.case, ideal=ideal, executed=executed)


def settings_of(job: CaseJob) -> Iterator[Setting]:
    """Yields every hop under every mode in every order."""
    for hop in job.hops:
        for communication in job.communications:
            for order in job.orders:
                yield Setting(hop, communication, order)


def ideal_of(case: Case) -> Ideal:
    """Returns formulas and ideal table; raises ValueError where the size does not fit the schedule."""
    table = table_of(case)
    levels = compare(case.entry.name, _request(case), EQUAL)
    slots = execute(table, per_stage(table, EQUAL, _parts(case)))
    return Ideal(
        paper=levels.published_rate,
        closed_form=levels.fitted_rate,
        bubble=levels.table_rate,
        step=slots.makespan,
        peak=levels.table_peak,
    )


def run(case: Case, setting: Setting, *, window: int = DEFAULT_WINDOW) -> Executed:
    """Runs one step of the table by the arbiters in virtual time."""
    table, parts = table_of(case), _parts(case)
    order = _order(case, setting.order, window)
    durations_ms = chunk_durations(table, (FORWARD_MS, FORWARD_MS, FORWARD_MS), parts)
    links = Links(latency_ms=_exact_ms(setting.hop.ratio), announce_ms=_exact_ms(setting.hop.latency))
    machine = Machine(links=links, communication=setting.communication)
    timeline = simulate(order.arbiters(RULES), Costs(durations_ms=durations_ms), machine=machine).timeline
    return Executed(
        step=timeline.makespan_s() * 1e3 / FORWARD_MS,
        bubble=max(0.0, timeline.bubble_fraction()),
        peak=round(max(peak_memory(timeline, table.graph, table.placement, chunk_parts=parts)), 9),
    )


@lru_cache(maxsize=4)
def table_of(case: Case) -> ScheduleTable:
    """Returns the table of a case; raises ValueError where the size does not fit the schedule."""
    return build_schedule(case.entry.name, _request(case))


def _request(case: Case) -> ScheduleRequest:
    return ScheduleRequest(
        num_stages=case.num_stages,
        num_microbatches=case.num_microbatches,
        chunks_per_stage=case.entry.chunks_per_stage,
    )


def _parts(case: Case) -> Sequence[float]:
    cut = schedule_entry(case.entry.name).chunk_parts
    return cut(case.num_stages) if cut else ()


@lru_cache(maxsize=2 * len(ORDERS))
def _order(case: Case, order: str, window: int) -> Order:
    table = table_of(case)
    return _ordering(table, order, window).resolve(table.placement, table.graph)


def _ordering(table: ScheduleTable, order: str, window: int) -> Ordering:
    if order == STRICT:
        return Ordering(schedule=table, consume=STRICT)
    looks_ahead, has_room = order.startswith(FORESIGHT), order.endswith(ROOM)
    if not has_room:
        return Ordering(schedule=table, consume=READY, foresight=looks_ahead)
    peaks = zip(table.peak_in_flight(), table.peak_activations(), strict=True)
    room = tuple(max(window, in_flight, math.ceil(held)) for in_flight, held in peaks)
    return Ordering(schedule=table, consume=READY, foresight=looks_ahead, footprint=looks_ahead, window=room)


def _exact_ms(forwards: float) -> float:
    return round(forwards * FORWARD_MS / _EXACT_MS) * _EXACT_MS
