"""The search for a good rule: field by field, from a few rules on."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from math import inf
from typing import Any, NamedTuple

import numpy as np

from rrfp_jax.planning.orders.found import PER_ORDER, Pool
from rrfp_jax.planning.orders.problem import Problem
from rrfp_jax.planning.orders.rule import Rule, keys, manner
from rrfp_jax.planning.orders.windows import Share


def choices(problem: Problem) -> dict[str, tuple[Any, ...]]:
    """The values that are tried of each field."""
    p = problem.num_stages
    found: dict[str, tuple[Any, ...]] = {"patience": (0.0, 0.25, 0.5, 1.0, 2.0), "pull": (0.0, 0.5, 1.0)}
    if problem.is_split:
        found = {"lag": (0.0, 0.5, 1.0, 2.0, 4.0, inf)} | found
    if problem.num_chunks > p:
        found["share"] = (None, *(Share(more=more, power=power) for more in (0.0, 0.5, 1.0) for power in (1.0, 0.5)))
        found |= {"keeps_reserve": (True, False), "group": tuple({1, -(-p // 2), p}), "deepen": (0.0, 0.5, -0.5)}
    return found


_STARTS = (Rule(), Rule(lag=1.0, patience=0.5), Rule(lag=inf, pull=0.0), Rule(lag=0.0, pull=1.0))


def search_rules(pool: Pool, goes_on: Callable[[], bool]) -> None:
    """From each of some rules on: the best value of each field in turn, until none is better."""
    known: dict[Rule, float] = {}
    values, runs = choices(pool.problem), _Runs(pool)

    def judge(rule: Rule, present: float) -> float:
        if rule not in known:
            known[rule] = runs.makespan(rule, max(present, pool.cutoff))
        return known[rule]

    for start in _STARTS:
        rule, is_better = start, goes_on()
        best = judge(rule, inf) if is_better else inf
        while is_better:
            is_better = False
            for name, of_field in values.items():
                for other in (replace(rule, **{name: value}) for value in of_field):
                    if other not in known and not goes_on():
                        return
                    if (makespan := judge(other, best)) < best:
                        rule, best, is_better = other, makespan, True


class _Run(NamedTuple):
    makespan: float
    """Infinite where it got stuck, or would have lasted longer than its cutoff."""
    cutoff: float
    tasks: int
    """What it cost."""


class _Runs:
    """What came of rules. Many rank all tasks alike; they are run once, and cost as if each were."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.met: dict[object, _Run] = {}

    def makespan(self, rule: Rule, cutoff: float) -> float:
        """Infinite where the rule gets stuck, or lasts longer."""
        pool = self.pool
        ranks, of_rule = keys(pool.problem, rule), manner(pool.problem, rule)
        same = blake2b(np.argsort(ranks, kind="stable").tobytes()).digest(), of_rule
        met = self.met.get(same)
        if met is not None and (met.makespan < inf or cutoff <= met.cutoff):
            pool.count(met.tasks)
            return met.makespan
        before = pool.tasks
        made = pool.dispatch(ranks, of_rule, rule.words, cutoff=cutoff, rule=rule)
        makespan = inf if made is None else made.makespan
        self.met[same] = _Run(makespan, cutoff, pool.tasks - before - PER_ORDER)
        return makespan
