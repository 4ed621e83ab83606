"""Hints: how a stage ranks the tasks that are ready now (RRFP paper, section 5 and appendix A).

A hint is a rule of the schedule language (:mod:`rrfp_jax.schedules.language.rule`) as a running stage asks it:

* ``rank(task)`` orders the tasks within their lane (forwards; B and I; W; R and U), the smallest first;
* ``choose(state, heads)`` picks one of the lanes' heads, the best admissible task of each lane, and gives the next
  state. The arbiter keeps that state only if it dispatches the choice.

``BF`` is the paper's Algorithm 1: rounds in which one B runs if any is ready, then one F if any is ready; among
forwards the smaller chunk first, among backwards the larger; ties go to the smaller microbatch. With a split backward I
stands for B, and where neither I nor F can run one W runs and the next round begins (the paper's BFW).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from rrfp_jax.core.plan import LANE, NUM_LANES
from rrfp_jax.schedules import Task, TaskKind
from rrfp_jax.schedules.language import B, F, Rule, W, rule, turns
from rrfp_jax.schedules.registry import is_in_file, rule_in_file

Heads = tuple[int | None, int | None, int | None, int | None]
"""The best admissible task of each lane, as its position in the hint's order, or None."""
Choice = tuple[int | None, int]
"""The chosen position, if any, and the hint's state after its dispatch."""
Rank = tuple[int, ...]

ROUND_START = 0


@dataclass(frozen=True, eq=False)
class Hint:
    """A named ranking of ready tasks."""

    name: str
    rank: Callable[[Task], Rank]
    choose: Callable[[int, Heads], Choice]
    initial: int = ROUND_START
    row: tuple[Task, ...] | None = None
    """The order that it ranks by, where there is one; with the name it tells all of a hint of this module."""

    @classmethod
    def of(cls, name: str, ranking: Rule) -> "Hint":
        """A rule as a hint, whose turn is the state; kinds in no lane come last, R and U behind them.

        Raises ValueError for a rule with a row, which :func:`schedule_hint` ranks by.
        """
        if ranking.row:
            raise ValueError(f"hint {name!r} ranks by an order: make it with schedule_hint")

        def rank(task: Task) -> Rank:
            return _last_rank(task) if task.kind in (TaskKind.R, TaskKind.U) else ranking.key(task)

        named = [[(LANE[TaskKind(kinds[0])], turn) for kinds, turn in lanes] for lanes in ranking.by_turn()]
        rest = [[(n, ROUND_START) for n in range(NUM_LANES) if n not in dict(lanes)] for lanes in named]
        return cls(name, rank, _in_lanes(tuple((*lanes, *last) for lanes, last in zip(named, rest, strict=True))))


@cache  # so that hints which choose alike do so by one function
def _in_lanes(by_turn: tuple[tuple[tuple[int, int], ...], ...]) -> Callable[[int, Heads], Choice]:
    """For each turn, the lanes in which to look for a head, the best first, and whose turn is next."""

    def choose(state: int, heads: Heads) -> Choice:
        for lane, turn in by_turn[state]:
            head = heads[lane]
            if head is not None:
                return head, turn
        return None, ROUND_START

    return choose


def _last_rank(task: Task) -> Rank:
    """Each R from the last chunk to the first, as backwards complete them; then each U from the first to the last."""
    return (2, task.chunk) if task.kind is TaskKind.U else (1, -task.chunk)


def _choose_smallest(_: int, heads: Heads) -> Choice:
    best = None
    for head in heads:
        if head is not None and (best is None or head < best):
            best = head
    return best, ROUND_START


_SHALLOW = {"F": ("chunk", "microbatch"), "B": ("-chunk", "microbatch"), "W": ("microbatch", "-chunk")}
"""Forwards: smaller chunk first; backwards: larger chunk first; W: oldest microbatch first."""
_DEEP = _SHALLOW | {"F": ("-chunk", "microbatch")}
"""As the above, but forwards also prefer the larger chunk, which finishes what has begun."""

BF = Hint.of("bf", rule(turns(B, F), W, **_SHALLOW))
BFW = Hint.of("bfw", rule(turns(B, F), W, **_SHALLOW))
"""The paper's name for BF on a split backward: the same ranking, and asking for it splits the backward."""
BF_DEEP = Hint.of("bf-deep", rule(turns(B, F), W, **_DEEP))
FB = Hint.of("fb", rule(turns(F, B), W, **_SHALLOW))
B_PRIORITY = Hint.of("b-priority", rule(B, F, W, **_SHALLOW))
F_PRIORITY = Hint.of("f-priority", rule(F, B, W, **_SHALLOW))

HINTS = {hint.name: hint for hint in (BF, BFW, BF_DEEP, FB, B_PRIORITY, F_PRIORITY)}
"""The hints that need no table, by name; ``schedule`` is made from a table by :func:`schedule_hint`."""
SCHEDULE = "schedule"
SCHEDULE_WEIGHTS_LAST = "schedule, W last"
"""What :func:`schedule_hint` calls its hints."""


def schedule_hint(order: Iterable[Task], *, weights_last: bool = False) -> Hint:
    """Rank by position in ``order``, one stage's row of a table; tasks that it does not hold rank last.

    ``weights_last``: each W of the row ranks behind its F and I, for a table that has W where the stage would idle.
    """
    row = tuple(order)
    if weights_last:
        ranked = sorted(row, key=lambda task: task.kind is TaskKind.W)
        return replace(schedule_hint(ranked), name=SCHEDULE_WEIGHTS_LAST, row=row)
    place = {task: position for position, task in enumerate(row)}
    last = len(place)

    def rank(task: Task) -> Rank:
        if task.kind in (TaskKind.R, TaskKind.U):
            return (place.get(task, last), *_last_rank(task), 0)
        return (place.get(task, last), 0, task.chunk, task.microbatch)

    return Hint(SCHEDULE, rank, _choose_smallest, row=row)


def hint_by_name(name: str) -> Hint:
    """Look up a hint that needs no table, or a rule as ``FILE.py:NAME``; raises ValueError naming the known ones."""
    if is_in_file(name):
        return Hint.of(name, rule_in_file(name))
    if name not in HINTS:
        raise ValueError(
            f"hint {name!r} is unknown: choose one of {', '.join([*HINTS, SCHEDULE])}, or FILE.py:NAME of a rule"
        )
    return HINTS[name]
