"""From a description to a table.

Operations that a description does not name are put into its rows by their own ``lead``
(:mod:`rrfp_jax.schedules.with_operations`).

A description is a pure function of a :class:`~rrfp_jax.schedules.language.stage.Stage`. One that a user wrote is called
twice for every stage, and both calls must give the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import CodeType
from typing import Any, TypeVar

from rrfp_jax.schedules.language.choice import Quickest
from rrfp_jax.schedules.language.order import Order
from rrfp_jax.schedules.language.rule import Rule
from rrfp_jax.schedules.language.stage import Described, Mistake, Stage
from rrfp_jax.schedules.language.starts import block
from rrfp_jax.schedules.slots import execute
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.schedules.users_code import Endless, bounded, in_line, is_users, told
from rrfp_jax.schedules.validation import some
from rrfp_jax.schedules.with_operations import with_operations
from rrfp_jax.tasks import Per

Description = Callable[[Stage], Described]
T = TypeVar("T")


def table_of(name: str, describe: Description, stages: Sequence[Stage]) -> ScheduleTable:
    """The validated table. Raises ValueError, naming stage and place, for what is wrong in the description."""

    def made() -> ScheduleTable:
        return _table(name, stages, [_called(name, describe, stage) for stage in stages])

    table = made()
    again = made() if is_users(_code(describe)) else table
    for stage, (row, other) in enumerate(zip(table.orders, again.orders, strict=True)):
        differing = next((n for n, (a, b) in enumerate(zip_longest(row, other)) if a != b), None)
        if differing is not None:
            raise ValueError(
                f"schedule {name!r}, stage {stage}: called twice, it gives other orders from {differing} on: let it "
                "depend on the stage alone"
            )
    return table.validate()


def _code(describe: Description) -> CodeType | None:
    code: CodeType | None = getattr(getattr(describe, "func", describe), "__code__", None)
    return code


def _called(name: str, describe: Description, stage: Stage) -> Described:
    made: Any = located(name, stage.i, lambda: bounded(lambda: describe(stage), _code(describe)))
    if isinstance(made, Described):
        return made
    remedies: dict[type, str] = {
        Rule: "a rule, which says what a running stage starts: add .frozen() for a table",
        block: "a block of one microbatch: add .every(slots)",
        list: "a list: write given(...) around it",
    }
    what = remedies.get(type(made), f"{made!r}: return an order, for example rounds(F.ahead(1), B)")
    raise ValueError(f"schedule {name!r}, stage {stage.i} gives {what}")


def located(name: str, stage: int | None, made: Callable[[], T]) -> T:
    """What a function gives. What it raises becomes a ValueError that names the schedule and the stage, unless that is
    None and unknown."""
    try:
        return made()
    except Mistake as mistake:
        at = mistake.stage if stage is None else stage
        raise ValueError(f"schedule {name!r}, stage {at}: {mistake}") from mistake
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and not in_line(error):
            raise  # a sentence of this library's
        place = f"schedule {name!r}" if stage is None else f"schedule {name!r}, stage {stage}"
        raise ValueError(f"{place}: {error if isinstance(error, Endless) else told(error)}") from error


def _table(name: str, stages: Sequence[Stage], made: Sequence[Described]) -> ScheduleTable:
    first = made[0]
    family = Order if isinstance(first, Order) else type(first)
    for i, each in enumerate(made):
        if not isinstance(each, family):
            raise ValueError(
                f"schedule {name!r}, stage {i} gives a {type(each).__name__}, stage 0 a {type(first).__name__}: "
                "make the orders of all stages in one way"
            )
    quick = [each for each in made if isinstance(each, Quickest)]
    if quick:
        many = [len(one.alternatives) for one in quick]
        if min(many) < max(many):
            fewest = many.index(min(many))
            raise ValueError(
                f"schedule {name!r}, stage {fewest} chooses among fewer orders than others: give all alike"
            )
        tables = [_table(name, stages, each) for each in zip(*(one.alternatives for one in quick), strict=True)]
        length, hop = stages[0].lengths, stages[0].asked.comm_ms
        best = min(tables, key=lambda table: execute(table, length, hop=hop).makespan)
        return best if best is tables[0] else replace(best, hint=tables[0])
    graph = stages[0].graph
    if isinstance(first, Order):
        rows = [located(name, s.i, partial(order.on, s)) for s, order in zip(stages, made, strict=True)]  # type: ignore[attr-defined]
    else:  # operations go into the finished rows
        stages = [replace(stage, graph=replace(graph, ops=())) for stage in stages]
        for s, each in zip(stages, made, strict=True):
            located(name, s.i, partial(each.check, s, first))
        rows = located(name, None, partial(first.orders, stages, made))
    named = {task.kind for row in rows for task in row} if graph.ops else set()
    unnamed = [op for op in graph.ops if op.letter not in named and op.per is Per.MICROBATCH]
    graph = replace(graph, ops=tuple(op for op in graph.ops if op not in unnamed))
    for stage, row in zip(stages, rows, strict=True):
        if len(row) >= graph.num_tasks(stage.chunks):
            continue  # whatever it may hold instead of a task, validation refuses
        there = set(row)
        missing = [task for task in graph.tasks(stage.chunks) if task not in there]
        if missing:
            raise ValueError(f"schedule {name!r}, stage {stage.i} leaves out {some(missing)}: {first.remedy(missing)}")
    table = ScheduleTable.from_orders(name, stages[0].placement, graph, rows)
    return with_operations(table, unnamed) if unnamed else table
