"""Gain of a search for orders over named tables, in the same memory: simulated makespans of one step.

Each case is cut for five placements, with the backward whole and split. *even* is the best named table where layers are
dealt out evenly, *best cut* the best one where every table has the cut that suits it: the least work of the fullest
stage, with memory for the activations of the table. *found* is the best order that the search finds on these cuts;
*bound* is a time that no order of them can beat, whatever the memory. Placements are searched in the order of their
bounds, as long as these are below the best found; seconds are of the processor, for all of them, without the time for
cuts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import process_time

from rich.console import Console
from rich.table import Table

from experiments.order_cases import CASES, NUM_MICROBATCHES, PLACEMENTS, Case
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.costs import CutModel
from rrfp_jax.planner.best_cut import best_cut, even_cut
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.planner.list_scheduler import NS_PER_MS, memory_for_activations, order_problem
from rrfp_jax.planner.order_search import FoundOrder, named_orders, search_orders
from rrfp_jax.schedules import ScheduleTable, TaskKind

_CUTS = 3
"""Number of cuts of each placement that are searched."""


@dataclass(frozen=True)
class On:
    """Order on a cut of one placement."""

    placement: str
    order: FoundOrder

    @property
    def words(self) -> str:
        kind = "" if self.order.table.graph.split else ", fused"
        return f"{self.order.name} {self.order.makespan_ms:.1f} ({self.placement}{kind})"


@dataclass(frozen=True)
class Row:
    """One case and its results."""

    case: Case
    even: On | None
    best_cut: On | None
    found: On | None
    bound_ms: float
    seconds: float

    @property
    def gain(self) -> float | None:
        """Excess of the best named table's time on its best cut over the found order's, as a fraction."""
        if self.best_cut is None or self.found is None:
            return None
        return self.best_cut.order.makespan_ms / self.found.order.makespan_ms - 1


def bench_orders(console: Console | None = None, cases: Sequence[Case] = CASES) -> list[Row]:
    """Prints and returns all cases."""
    rows = [measure(case) for case in cases]
    table = Table(title="makespans of a step in ms, 8 stages, 32 microbatches", title_justify="left")
    for heading in ("case", "memory", "even", "best cut", "found", "gain", "bound", "peak", "s"):
        table.add_column(heading, justify="left" if heading in {"case", "even", "best cut", "found"} else "right")
    for row in rows:
        table.add_row(*_cells(row))
    (console or make_console()).print(table)
    return rows


def _cells(row: Row) -> list[str]:
    on = ["none fits" if each is None else each.words for each in (row.even, row.best_cut, row.found)]
    peak = "" if row.found is None else f"{max(row.found.order.peak) / row.case.unit:g}"
    gain = "" if row.gain is None else f"{row.gain:+.1%}"
    last = [gain, f"{row.bound_ms:.1f}", peak, f"{row.seconds:.1f}"]
    return [row.case.name, f"{row.case.memory:g}", *on, *last]


def measure(case: Case) -> Row:
    """Measures all placements of a case."""
    even, best, sites = list[On](), list[On](), list[tuple[float, str, CutModel]]()
    for name, placement in PLACEMENTS.items():
        for split in (True, False):
            dealt = even_cut(case.costs, placement, NUM_MICROBATCHES, split=split)
            even += [On(name, order) for order in named_orders(dealt, _room(case, dealt))[:1]]
            cuts = dict.fromkeys([best_cut(case.costs, placement, NUM_MICROBATCHES, split=split).counts])
            here = list(_on_best_cuts(case, name, next(iter(cuts)), split))
            best += [on for _, on in here[:1]]
            cuts |= dict.fromkeys(counts for counts, _ in here)
            for counts in [*cuts][:_CUTS]:
                cut = _cut(case, name, counts, split)
                sites.append((_bound_ms(case, cut), name, cut))
    begin = process_time()
    found = _searched(case, sites)
    seconds = process_time() - begin
    bound_ms = min(each for each, *_ in sites)
    return Row(case, _quickest(even), _quickest(best), found, bound_ms, seconds)


def _searched(case: Case, sites: list[tuple[float, str, CutModel]]) -> On | None:
    best = None
    for bound_ms, name, cut in sorted(sites, key=lambda site: site[0]):
        if best is not None and bound_ms >= best.order.makespan_ms:
            break
        found = search_orders(cut, _room(case, cut))
        best = _quickest([*([] if best is None else [best]), *(On(name, order) for order in found[:1])])
    return best


def _on_best_cuts(case: Case, name: str, counts: tuple[int, ...], split: bool) -> Iterator[tuple[tuple[int, ...], On]]:
    """Yields named tables on the best cut, and on the cuts that suit the memory of each; the quickest first."""
    placement, cut = PLACEMENTS[name], _cut(case, name, counts, split)
    made = [(counts, order) for order in named_orders(cut, _room(case, cut))]
    for order in named_orders(cut, None):
        room = MemoryBudget(limits=(case.limit,) * placement.num_stages, held=_held(order.table))
        try:
            other = best_cut(case.costs, placement, NUM_MICROBATCHES, split=split, memory=room)
        except ValueError:  # there is no room, however it is cut
            continue
        made += [(other.counts, each) for each in named_orders(other, _room(case, other)) if each.name == order.name]
    yield from ((cut, On(name, order)) for cut, order in sorted(made, key=lambda one: one[1].makespan_ms))


def _held(table: ScheduleTable) -> tuple[float, ...]:
    """Returns the most microbatches that each chunk holds at a time."""
    held = [0.0] * table.graph.num_chunks
    most = list(held)
    for task in (task for order in table.orders for task in order):
        held[task.chunk] += task.kind is TaskKind.F
        most[task.chunk] = max(most[task.chunk], held[task.chunk])
        held[task.chunk] -= task.kind in (TaskKind.B, TaskKind.W)
    return tuple(most)


def _cut(case: Case, name: str, counts: tuple[int, ...], split: bool) -> CutModel:
    return CutModel(
        costs=case.costs,
        counts=counts,
        placement=PLACEMENTS[name],
        num_microbatches=NUM_MICROBATCHES,
        split=split,
    )


def _room(case: Case, cut: CutModel) -> tuple[float, ...]:
    return memory_for_activations(cut, [case.limit] * cut.placement.num_stages)


def _bound_ms(case: Case, cut: CutModel) -> float:
    return order_problem(cut, _room(case, cut)).bound / NS_PER_MS


def _quickest(orders: list[On]) -> On | None:
    return min(orders, key=lambda on: on.order.makespan_ms, default=None)
