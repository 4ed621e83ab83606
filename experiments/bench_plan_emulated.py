"""Compare a planner's forecasts with the real runtime on emulated stages.

Twenty seeded settings of one model on four stages, so that their ranks mean something: cuts even and best; named and
searched orders, hints with their windows; strict, ready with foresight and without; jitter, and links that take time.
Both sides get the same draws of the noise. The host's time per task comes from a run of ZB-H1 at the start, as a
profile has it: stages that are rarely idle cost the host less for each task than stages that sleep and are woken. Then
the choices that a plan ranks first run too, for its *regret*: how much slower its first is, as emulated, than the best
of them.
"""

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

import numpy as np
from rich.console import Console
from scipy.stats import spearmanr

from experiments.emulate import EMULATED_STEP
from rrfp_jax.commands.common.console import make_table
from rrfp_jax.commands.common.process import use_cpu
from rrfp_jax.core import READY, STRICT, Ordering
from rrfp_jax.costs import CostBook, CostEntry, CutModel, LayerCosts, LinkCosts, Noise
from rrfp_jax.planner.best_cut import best_cut, even_cut
from rrfp_jax.planner.judging import Judge
from rrfp_jax.planner.list_scheduler import memory_for_activations
from rrfp_jax.planner.order_search import search_orders
from rrfp_jax.planner.records import LINEAR, LOOPED, WAVES, Plan, PlanChoice, PlanShape, Point
from rrfp_jax.planner.search import make_plan
from rrfp_jax.planner.search_space import SearchSpace
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import both_directions
from rrfp_jax.simulation.costs import Durations

STAGES, MICROBATCHES, STEPS, PLAN_STEPS, SETTINGS, TOP = 4, 8, 5, 10, 20, 10
WARM_UP = 2
_PROFILED = 15
"""Number of steps of the profile."""
LARGEST_OFF, LEAST_RANK_CORRELATION, LARGEST_REGRET = 0.03, 0.9, 0.02
"""Bounds that forecasts keep to on a quiet machine."""
_HINTS, _SEARCHED = ("bf", "bfw"), "searched"
_ORDERS = (
    (LINEAR, "1f1b", STRICT),
    (WAVES, "zb-v", STRICT),
    (LINEAR, "bf", READY),
    (LINEAR, _SEARCHED, STRICT),
    (LINEAR, "zb-h1", READY),
    (LINEAR, "bfw", READY),
    (LOOPED, "interleaved-1f1b", READY),
    (LINEAR, "zb-h1", STRICT),
    (LINEAR, _SEARCHED, READY),
    (WAVES, "v-half", READY),
)
_BUDGET = 20_000
_LIMIT = 30_000
"""Memory limit of the search and of the plan: a layer holds 1,000 of a microbatch, an even stage 6 layers."""
_LAYER = LayerCosts(forward_ms=1.0, input_gradient_ms=1.1, weight_gradient_ms=0.9, stash_bytes=1000, owed_bytes=1000)
_TYPES = {
    "embedding": LayerCosts(forward_ms=0.2, input_gradient_ms=0.0, weight_gradient_ms=0.4),
    "layer": _LAYER,
    "head": LayerCosts(forward_ms=3.5, input_gradient_ms=3.5, weight_gradient_ms=3.5),
}
_SHAPE = PlanShape(num_stages=STAGES, num_microbatches=MICROBATCHES)


@dataclass(frozen=True)
class Compared:
    """One choice, as forecast and as emulated: medians of the same steps."""

    words: str
    forecast_ms: float
    emulated_ms: float
    forecast_host_ms: float
    """Forecast of the host's time per task."""
    host_ms: float
    """Measured host time per task. It shows when the machine is busy otherwise."""

    @property
    def ratio(self) -> float:
        return self.emulated_ms / self.forecast_ms


@dataclass(frozen=True)
class SimToReal:
    """Results of the comparison."""

    settings: tuple[Compared, ...]
    ranked: tuple[Compared, ...]
    """Choices of the plan, its best first."""

    @property
    def largest_off(self) -> float:
        return max(abs(one.ratio - 1) for one in self.settings)

    @property
    def rank_correlation(self) -> float:
        """Spearman's rank correlation over the settings."""
        pairs = [(one.forecast_ms, one.emulated_ms) for one in self.settings]
        return float(spearmanr(*zip(*pairs, strict=True)).statistic)

    @property
    def regret(self) -> float:
        return self.ranked[0].emulated_ms / min(one.emulated_ms for one in self.ranked) - 1


def emulated_plans(console: Console) -> SimToReal:
    """Prints and returns all settings, and a plan's first choices."""
    use_cpu(2 * STAGES)
    host_ms = profiled_host_ms()
    settings = [compare(number, host_ms) for number in range(SETTINGS)]
    found = SimToReal(tuple(settings), tuple(emulated_ranking(host_ms)))
    for title, some in (("settings on emulated stages", found.settings), ("a plan's ranking", found.ranked)):
        headings = ("forecast", "emulated", "ratio", "host per task: profiled", "in this run")
        table = make_table(f"{title}, ms per step", "setting", *headings, numeric=True)
        for one in some:
            host = f"{one.forecast_host_ms:.3f}", f"{one.host_ms:.3f}"
            table.add_row(one.words, f"{one.forecast_ms:.1f}", f"{one.emulated_ms:.1f}", f"{one.ratio:.4f}", *host)
        console.print(table)
    console.print(
        f"largest deviation {found.largest_off:.2%} (at most {LARGEST_OFF:.0%}), Spearman's rank correlation "
        f"{found.rank_correlation:.3f} (at least {LEAST_RANK_CORRELATION}), regret {found.regret:.2%} (at most "
        f"{LARGEST_REGRET:.0%}); load {os.getloadavg()[0]:.1f}"
    )
    return found


def compare(number: int, host_ms: float) -> Compared:
    """Runs one setting on both sides."""
    rng = np.random.default_rng(number)
    sigma = 0.0 if number % 4 == 0 else float(rng.uniform(0.05, 0.3))
    book = book_of(sigma=sigma, hop_ms=float(rng.uniform(0, 2)), host_ms=host_ms)
    one, is_best = _candidate(number, book, window=int(rng.integers(2, MICROBATCHES + 1)))
    judge = Judge(book.noise, STEPS, seed=number)
    words = f"{one.order.label}, {'best' if is_best else 'even'} cut"
    return _compared(f"{words}, sigma {sigma:.2f}, hop {book.links.latency_ms:.1f}", one, judge)


def emulated_ranking(host_ms: float) -> list[Compared]:
    """Returns the first choices of a plan, the best first, each run with the draws of its forecast."""
    plan, book = plan_of(host_ms)
    judge = Judge(book.noise, PLAN_STEPS, seed=0)
    found = []
    for ranked in plan.ranking:
        one = ranked.choice
        found.append(_compared(f"{one.order.label}, {'+'.join(map(str, one.cut.counts))}", one, judge))
    return found


def plan_of(host_ms: float) -> tuple[Plan, CostBook]:
    """Returns a plan of the model in memory that is short, and its costs."""
    book = book_of(sigma=0.2, hop_ms=0.5, host_ms=host_ms)
    space = SearchSpace(
        devices=STAGES,
        stages=(STAGES,),
        microbatches=(MICROBATCHES,),
        memory_bytes=_LIMIT,
        top=TOP,
    )
    return make_plan(book, space), book


def book_of(*, sigma: float, hop_ms: float, host_ms: float) -> CostBook:
    """Returns the costs of a language model whose head weighs more than three layers."""
    return CostBook(
        layers=("embedding", *["layer"] * (6 * STAGES), "head"),
        entries=(CostEntry(types=_TYPES),),
        links=LinkCosts(latency_ms=hop_ms),
        noise=Noise.alike(sigma),
        task_ms=host_ms,
    )


def profiled_host_ms() -> float:
    """Returns the host's time per task in a run of ZB-H1: the median of its steps, in milliseconds."""
    from rrfp_jax.testing import emulate

    table = build_schedule("zb-h1", ScheduleRequest(num_stages=STAGES, num_microbatches=MICROBATCHES))
    book = book_of(sigma=0.0, hop_ms=0.0, host_ms=0.0)
    point = Point(shape=_SHAPE, family=LINEAR, chunks=1)
    cut = _cut(point, book, is_best=True, split=True)
    order = Ordering(schedule=table, consume=STRICT).resolve(cut.placement, cut.graph)
    durations_ms = np.repeat(cut.durations_ms, WARM_UP + _PROFILED, axis=0)
    run = emulate(order.arbiters(EMULATED_STEP), durations_ms, len(durations_ms))
    return max(0.0, median(_host_ms_of_steps(run.timeline, durations_ms)))


def _candidate(number: int, book: CostBook, *, window: int) -> tuple[PlanChoice, bool]:
    """Returns the choice of a setting, and whether its cut is the best."""
    family, name, consume = _ORDERS[number % len(_ORDERS)]
    is_best = bool((number // len(_ORDERS) + number) % 2)
    point = Point(shape=_SHAPE, family=family, chunks=1 if family == LINEAR else 2)
    if name in _HINTS:
        cut = _cut(point, book, is_best=is_best, split=name != "bf")
        ordering = Ordering(hint=name, window=window, backward="split" if cut.split else "fused")
        return _choice(cut, ordering, name, is_even=not is_best), is_best
    table = None if name == _SEARCHED else _named(name, point)
    cut = _cut(point, book, is_best=is_best, split=table is None or bool(table.graph.split))
    has_foresight = None if consume == STRICT or number < len(_ORDERS) else False
    ordering = Ordering(schedule=table or _searched(cut), consume=consume, foresight=has_foresight)
    return _choice(cut, ordering, name, is_even=not is_best, is_searched=table is None), is_best


def _choice(cut: CutModel, ordering: Ordering, name: str, *, is_even: bool, is_searched: bool = False) -> PlanChoice:
    return PlanChoice(
        shape=_SHAPE, cut=cut, is_even=is_even, ordering=ordering, order_name=name, is_searched=is_searched
    )


def _named(name: str, point: Point) -> ScheduleTable:
    request = ScheduleRequest(num_stages=STAGES, num_microbatches=MICROBATCHES)
    return build_schedule(name, replace(request, chunks_per_stage=2) if point.family == LOOPED else request)


def _searched(cut: CutModel) -> ScheduleTable:
    """Returns the best order without a name."""
    found = search_orders(cut, memory_for_activations(cut, [_LIMIT] * STAGES), budget=_BUDGET)
    return next(order.table for order in found if not order.is_named)


def _cut(point: Point, book: CostBook, *, is_best: bool, split: bool) -> CutModel:
    cut = best_cut if is_best else even_cut
    return cut(book.at(microbatch_size=1), point.placement, MICROBATCHES, split=split)


def _compared(words: str, one: PlanChoice, judge: Judge) -> Compared:
    """Returns a choice as forecast and as emulated, on a judge's draws. The first, without noise, warms up."""
    from rrfp_jax.testing import emulate

    cut, number = one.cut, judge.num_draws
    forecast_ms = median(judge.draws_ms(one, number))
    steps_ms = judge.steps_ms(cut, number)
    counted = steps_ms[1:] if len(steps_ms) > 1 else np.repeat(steps_ms, STEPS, axis=0)
    durations_ms = np.concatenate([np.repeat(steps_ms[:1], WARM_UP, axis=0), counted])
    run = emulate(
        one.order.arbiters(EMULATED_STEP), durations_ms, len(durations_ms), link_delays_ms=_delays_ms(cut) or None
    )
    host_ms = fmean(_host_ms_of_steps(run.timeline, durations_ms))
    return Compared(words, forecast_ms, median(run.step_ms[WARM_UP:]), cut.costs.task_ms, host_ms)


def _host_ms_of_steps(timeline: Timeline, durations_ms: Durations) -> list[float]:
    """Returns the host's milliseconds per task in each step, without the first steps, which compile programs."""
    from rrfp_jax.testing import dispatch_overhead_ms

    steps = [step for step in timeline.steps() if step >= WARM_UP]
    return [dispatch_overhead_ms(timeline.of_step(step), durations_ms) for step in steps]


def _delays_ms(cut: CutModel) -> dict[tuple[int, int], float]:
    """Returns the delays in milliseconds between neighbouring stages of the chain, both ways."""
    pairs = {pair: cut.links.latency_ms for pair in pairwise(cut.placement.stage_of_chunk) if pair[0] != pair[1]}
    return both_directions(pairs, STAGES) if cut.links.latency_ms else {}
