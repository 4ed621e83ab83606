"""Hints: how a stage ranks the tasks that are ready now (RRFP paper, section 5 and appendix A).

A hint is a tiny policy with two parts:

* ``rank(task)`` orders the tasks within their lane (forwards; B and I; W; R and U), the smallest first;
* ``choose(state, heads)`` picks one of the lanes' heads, the best admissible task of each lane, and gives the next
  state. The arbiter keeps that state only if it dispatches the choice.

``BF`` is the paper's Algorithm 1: rounds in which one B runs if any is ready, then one F if any is ready; among
forwards the smaller chunk first, among backwards the larger; ties go to the smaller microbatch. With a split backward I
stands for B, and where neither I nor F can run one W runs and the next round begins (the paper's BFW).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rrfp_jax.tasks import Task, TaskKind

Heads = tuple[int | None, int | None, int | None, int | None]
"""The best admissible task of each lane, as its position in the hint's order, or None."""
Choice = tuple[int | None, int]
"""The chosen position, if any, and the hint's state after its dispatch."""
Rank = tuple[int, ...]

ROUND_START = 0
SECOND_TURN = 1


@dataclass(frozen=True, eq=False)
class Hint:
    """A named ranking of ready tasks."""

    name: str
    rank: Callable[[Task], Rank]
    choose: Callable[[int, Heads], Choice]
    initial: int = ROUND_START
    row: tuple[Task, ...] | None = None
    """The order that it ranks by, where there is one; with the name it tells all of a hint of this module."""


def _last_rank(task: Task) -> Rank:
    """Each R from the last chunk to the first, as backwards complete them; then each U from the first to the last."""
    return (2, task.chunk) if task.kind is TaskKind.U else (1, -task.chunk)


def _backward_rank(task: Task) -> Rank:
    if task.kind is TaskKind.W:
        return (task.microbatch, -task.chunk)
    if task.kind in (TaskKind.R, TaskKind.U):
        return _last_rank(task)
    return (-task.chunk, task.microbatch)


def _shallow_rank(task: Task) -> Rank:
    """Forwards: smaller chunk first; backwards: larger chunk first; W: oldest microbatch first."""
    return (task.chunk, task.microbatch) if task.kind is TaskKind.F else _backward_rank(task)


def _deep_rank(task: Task) -> Rank:
    """As the above, but forwards also prefer the larger chunk, which finishes what has begun."""
    return (-task.chunk, task.microbatch) if task.kind is TaskKind.F else _backward_rank(task)


def _otherwise(heads: Heads) -> Choice:
    """Where neither a forward nor a backward can run: a weight gradient, or the tasks of the step's end."""
    _, _, weight, last = heads
    return (weight if weight is not None else last), ROUND_START


def _choose_bf(turn: int, heads: Heads) -> Choice:
    forward, backward, _, _ = heads
    if turn == SECOND_TURN and forward is not None:
        return forward, ROUND_START
    if backward is not None:
        return backward, SECOND_TURN
    if forward is not None:
        return forward, ROUND_START
    return _otherwise(heads)


def _choose_fb(turn: int, heads: Heads) -> Choice:
    forward, backward, _, _ = heads
    if turn == SECOND_TURN and backward is not None:
        return backward, ROUND_START
    if forward is not None:
        return forward, SECOND_TURN
    if backward is not None:
        return backward, ROUND_START
    return _otherwise(heads)


def _choose_backward_first(_: int, heads: Heads) -> Choice:
    forward, backward = heads[:2]
    if backward is not None:
        return backward, ROUND_START
    if forward is not None:
        return forward, ROUND_START
    return _otherwise(heads)


def _choose_forward_first(_: int, heads: Heads) -> Choice:
    forward, backward = heads[:2]
    if forward is not None:
        return forward, ROUND_START
    if backward is not None:
        return backward, ROUND_START
    return _otherwise(heads)


def _choose_smallest(_: int, heads: Heads) -> Choice:
    return min((head for head in heads if head is not None), default=None), ROUND_START


BF = Hint("bf", _shallow_rank, _choose_bf)
BFW = Hint("bfw", _shallow_rank, _choose_bf)
"""The paper's name for BF on a split backward: the same ranking, and asking for it splits the backward."""
BF_DEEP = Hint("bf-deep", _deep_rank, _choose_bf)
FB = Hint("fb", _shallow_rank, _choose_fb)
B_PRIORITY = Hint("b-priority", _shallow_rank, _choose_backward_first)
F_PRIORITY = Hint("f-priority", _shallow_rank, _choose_forward_first)

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
    """Look up a hint that needs no table; raises ValueError naming the known ones."""
    if name not in HINTS:
        raise ValueError(f"hint {name!r} is unknown: choose one of {', '.join([*HINTS, SCHEDULE])}")
    return HINTS[name]
