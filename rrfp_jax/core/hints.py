"""Hints: how a stage ranks the tasks that are ready now (RRFP paper, section 5 and appendix A).

A hint is a rule of the schedule language (:mod:`rrfp_jax.schedules.language.rule`) as a running stage asks it:

* ``rank(task)`` orders the tasks within their lane (forwards; B and I; W; R and U), the smallest first;
* ``choose(state, heads)`` picks one of the lanes' heads, the best admissible task of each lane, and returns the next
  state. The arbiter keeps that state only if it dispatches the choice.

A stage *consumes* a hint in one of two ways, and both drive the same arbiter. :func:`ready` skips absent tasks
(RRFP). :func:`strict`, the baseline, takes a table's entries one after another and waits for each; R and U follow the
table, and an operation that runs once per step comes right before the task that waits for it, or last. Strict
consumption ignores the window: a table has a peak of its own, to be compared with the window before the start.

``BF`` is the paper's Algorithm 1: rounds in which one B runs if any is ready, then one F if any is ready; among
forwards the smaller chunk first, among backwards the larger; ties go to the smaller microbatch. With a split backward I
stands for B, and where neither I nor F can run one W runs and the next round begins (the paper's BFW).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from rrfp_jax.core.plan import LANE, NUM_LANES, StagePlan
from rrfp_jax.schedules import Pair, Task, TaskKind
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
    """The order that it ranks by, where there is one. Name and row together determine each hint of this module."""

    @classmethod
    def of(cls, name: str, ranking: Rule) -> "Hint":
        """Returns a rule as a hint, whose turn is the state; kinds in no lane come last, R and U behind them.

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
    """Returns the choice by turns: for each turn, the lanes to look at, the best first, each with the turn that
    follows."""

    def choose(state: int, heads: Heads) -> Choice:
        for lane, turn in by_turn[state]:
            head = heads[lane]
            if head is not None:
                return head, turn
        return None, ROUND_START

    return choose


def _last_rank(task: Task) -> Rank:
    """Returns the rank of R, from the last chunk to the first as backwards complete them, or of U, from the first to
    the last."""
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
"""Forwards prefer the larger chunk too, which finishes the microbatches that have begun."""

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
"""The names of the hints that :func:`schedule_hint` makes."""


def schedule_hint(order: Iterable[Task], *, weights_last: bool = False) -> Hint:
    """Returns the hint that ranks by position in ``order``, one stage's row of a table; other tasks rank last.

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
    """Returns a hint that needs no table, or a rule as ``FILE.py:NAME``; raises ValueError naming the known ones."""
    if is_in_file(name):
        return Hint.of(name, rule_in_file(name))
    if name not in HINTS:
        raise ValueError(
            f"hint {name!r} is unknown: choose one of {', '.join([*HINTS, SCHEDULE])}, or FILE.py:NAME of a rule"
        )
    return HINTS[name]


@dataclass(frozen=True, eq=False)
class Consumption:
    """A hint and the way to consume it: an order of the plan's tasks, and the choice of the next ready task."""

    hint: Hint
    """The ranking of the tasks; for ``strict`` it holds the table's row."""
    choose: Callable[[int, Heads], Choice]
    initial: int
    is_strict: bool
    pairs: frozenset[Pair] = frozenset()
    """For ``strict``, the entries next to each other that run as one program, where a stage makes pairs."""

    def order(self, plan: StagePlan) -> tuple[int, ...]:
        """Returns the step's tasks (as node numbers) in hint order: lane after lane for ``ready``, one sequence for
        ``strict``.

        ``choose`` sees positions in this order. The tasks of engines beside compute, which it never sees, come
        last.
        """
        lanes, rank = plan.lanes, self.hint.rank
        ranked = {node: (rank(task), 0) for node, task in plan.present()}
        for node in plan.once:
            ranked[node] = _ahead_of_followers(node, plan, ranked)
        return tuple(node for *_, node in sorted((lanes[node] < 0, *key, node) for node, key in ranked.items()))


def _ahead_of_followers(node: int, plan: StagePlan, ranked: dict[int, tuple[Rank, int]]) -> tuple[Rank, int]:
    """Returns the rank of an operation that runs once per step, which no row names: right before the first task that
    waits for it, or behind all others."""
    found = [
        _ahead_of_followers(after, plan, ranked) if after in plan.once else ranked[after]
        for after in plan.dependents[node]
        if after in ranked
    ]
    if found:
        first, ahead = min(found)
        return first, ahead - 1
    return max(ranked.values())[0], 1


def ready(hint: Hint) -> Consumption:
    """Returns the consumption that runs the best task of those that are ready and admissible."""
    return Consumption(hint, hint.choose, hint.initial, is_strict=False)


def strict(order: tuple[Task, ...], pairs: frozenset[Pair] = frozenset()) -> Consumption:
    """Returns the consumption that runs the entries of ``order`` one after another, waiting for each; then R and U.

    ``pairs``: the entries next to each other that run as one program, where the stage makes pairs.
    """
    return Consumption(schedule_hint(order), _choose_next, 0, is_strict=True, pairs=pairs)


def _choose_next(position: int, heads: Heads) -> Choice:
    # The hint's state counts the dispatched entries, and so is the position of the next one.
    return (position, position + 1) if position in heads else (None, position)
