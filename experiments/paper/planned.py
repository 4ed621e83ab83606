"""Choices with more and more freedom in the same memory, and the time of a step of each in some noise."""

from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

import numpy as np

from experiments.order_cases import Case, encoder_and_lm, gemma_like, homogeneous
from experiments.paper.scene import SLOW_LINK, SLOW_LINK_PARTS, SLOW_STAGE, SLOW_STAGE_FACTOR
from rrfp_jax.core import READY, STRICT, Ordering, StepRules
from rrfp_jax.costs import CostBook, CostEntry, Noise
from rrfp_jax.planner.best_cut import even_cut
from rrfp_jax.planner.judging import Judge, step_bound_ms
from rrfp_jax.planner.order_search import named_orders
from rrfp_jax.planner.records import PlanChoice
from rrfp_jax.planner.search import make_plan
from rrfp_jax.planner.search_space import SearchSpace, points_of, shapes_of
from rrfp_jax.schedules import schedule_names
from rrfp_jax.simulation import Links, Machine, both_directions, simulate
from rrfp_jax.simulation.costs import Durations

CASES = {case.name: case for case in (homogeneous(8), gemma_like(42), encoder_and_lm(44))}
LOGNORMAL = "lognormal:"
DRAWS = 8
"""Number of draws by which a plan chooses where it knows of noise."""
LEARNT = 2
"""Number of steps in which averages are learnt, before those that count."""
METHODS = ("1f1b, even cut", "named table, even cut", "named table, best cut", "plan, strict", "plan, ready")


class Planned(NamedTuple):
    """Result of a method in one model."""

    one: PlanChoice
    bound_ms: float
    """Lower bound for its cut, without noise."""


def planned(model: str, sigma: float, stages: int, microbatches: int) -> dict[str, Planned]:
    """Returns the choice of each method, by name."""
    case = CASES[model]
    book = CostBook(
        layers=case.costs.layers,
        entries=(CostEntry(types=case.costs.types),),
        links=case.costs.links,
        noise=Noise.alike(sigma),
    )

    def space(consume: str, schedules: tuple[str, ...] | None = None) -> SearchSpace:
        return SearchSpace(
            devices=stages,
            stages=(stages,),
            microbatches=(microbatches,),
            memory_bytes=case.limit,
            consumptions=(consume,),
            schedules=schedules,
            top=1,
        )

    strict, ready = (make_plan(book, space(consume), draws=DRAWS).ranking[0] for consume in (STRICT, READY))
    only_named = make_plan(book, space(STRICT, tuple(schedule_names())), draws=DRAWS)
    dealt = list(on_even_cuts(case, book, space(STRICT)))
    judge = Judge(book.noise, DRAWS, seed=0)
    fitting = [one for one in dealt if one.fits(case.limit)]
    even = min(fitting, key=lambda one: judge.value(one, DRAWS))
    plain = next(one for one in dealt if one.order_name == "1f1b")
    planned_ones = (only_named.named or only_named.ranking[0], strict, ready)
    chosen = (plain, even, *(ranked.choice for ranked in planned_ones))
    return {name: Planned(one, step_bound_ms(one.cut)) for name, one in zip(METHODS, chosen, strict=True)}


def step_ms(one: PlanChoice, jitter: str, steps: int, seed: int) -> float:
    """Returns the mean interval between the ends of simulated steps, on draws that depend on nothing but their seed."""
    cut, stages = one.cut, one.shape.num_stages
    durations_ms = cut.durations_ms.copy()
    if jitter == SLOW_STAGE:
        durations_ms[:, list(cut.placement.chunks_of_stage[stages // 2])] *= SLOW_STAGE_FACTOR
    forward_ms = float(cut.durations_ms[0, :, :, 0].mean(axis=1).sum()) / stages
    middle = {(stages // 2 - 1, stages // 2): SLOW_LINK_PARTS * forward_ms} if jitter == SLOW_LINK else {}
    links = Links(latency_ms=cut.links.latency_ms, extra_ms=both_directions(middle, stages))
    drawn_ms: Durations = Noise.alike(_sigma(jitter)).draws(durations_ms, steps, np.random.default_rng((seed, LEARNT)))
    all_ms = np.concatenate([np.repeat(durations_ms, LEARNT, axis=0), drawn_ms])
    arbiters = one.order.arbiters(StepRules())
    run = simulate(arbiters, cut.simulated_costs(all_ms), machine=Machine(links=links), num_steps=len(all_ms))
    return fmean(run.step_ms[LEARNT:])


def on_even_cuts(case: Case, book: CostBook, space: SearchSpace) -> Iterator[PlanChoice]:
    """Yields every named table, strictly consumed, on layers dealt out evenly; those that do not fit, too."""
    (shape,) = shapes_of(book, space)
    for point in points_of(shape, book, space):
        for split in (True, False):
            cut = even_cut(case.costs, point.placement, shape.num_microbatches, split=split)
            for found in named_orders(cut, None):
                ordering = Ordering(schedule=found.table, consume=STRICT)
                yield PlanChoice(shape=shape, cut=cut, is_even=True, ordering=ordering, order_name=found.name)


def _sigma(jitter: str) -> float:
    return float(jitter.removeprefix(LOGNORMAL)) if jitter.startswith(LOGNORMAL) else 0.0
