"""Turns the description of a schedule into a table, and bounds and explains the code of users.

Operations that a description does not name are put into its rows by their own ``lead``
(:mod:`rrfp_jax.schedules.table`).

A description is a pure function of a :class:`~rrfp_jax.schedules.language.stage.Stage`. One that a user wrote is called
twice for every stage, and both calls must give the same order.
"""

import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from rrfp_jax.schedules.language._order import TaskOrder
from rrfp_jax.schedules.language.blocks import block
from rrfp_jax.schedules.language.rule import Rule
from rrfp_jax.schedules.language.stage import Described, Mistake, Quickest, Stage
from rrfp_jax.schedules.operations import Per
from rrfp_jax.schedules.slots import execute
from rrfp_jax.schedules.table import ScheduleTable, with_operations
from rrfp_jax.schedules.validation import some

Description = Callable[[Stage], Described]
_T = TypeVar("_T")


def table_of(name: str, describe: Description, stages: Sequence[Stage], *, weights_fill: bool = False) -> ScheduleTable:
    """Returns the validated table. Raises ValueError, naming stage and place, for a mistake in the description."""

    def made() -> ScheduleTable:
        return _table(name, stages, [_called(name, describe, stage) for stage in stages])

    # A description that draws random numbers, or keeps state between calls, would give each process of a run another
    # table. The golden tests show that the library's own do neither.
    table = made()
    again = made() if _is_users(_code(describe)) else table
    for stage, (row, other) in enumerate(zip(table.orders, again.orders, strict=True)):
        differing = next((n for n, (a, b) in enumerate(zip_longest(row, other)) if a != b), None)
        if differing is not None:
            raise ValueError(
                f"schedule {name!r}, stage {stage}: called twice, it gives other orders from {differing} on: let it "
                "depend on the stage alone"
            )
    if weights_fill:
        table = replace(table, weights_fill=True, hint=table.hint and replace(table.hint, weights_fill=True))
    return table.validate()


def _code(describe: Description) -> CodeType | None:
    code: CodeType | None = getattr(getattr(describe, "func", describe), "__code__", None)
    return code


def _called(name: str, describe: Description, stage: Stage) -> Described:
    made: Any = located(name, stage.i, lambda: _bounded(lambda: describe(stage), _code(describe)))
    if isinstance(made, Described):
        return made
    remedies: dict[type, str] = {
        Rule: "a rule, which says what a running stage starts: add .frozen() for a table",
        block: "a block of one microbatch: add .every(slots)",
        list: "a list: write given(...) around it",
    }
    what = remedies.get(type(made), f"{made!r}: return an order, for example rounds(F.ahead(1), B)")
    raise ValueError(f"schedule {name!r}, stage {stage.i} gives {what}")


def located(name: str, stage: int | None, made: Callable[[], _T]) -> _T:
    """Returns the function's result. An error becomes a ValueError that names the schedule and, if known, the stage."""
    try:
        return made()
    except Mistake as mistake:
        at = mistake.stage if stage is None else stage
        raise ValueError(f"schedule {name!r}, stage {at}: {mistake}") from mistake
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and not _in_line(error):
            raise  # raised by this library, whose errors name place and remedy themselves
        place = f"schedule {name!r}" if stage is None else f"schedule {name!r}, stage {stage}"
        raise ValueError(f"{place}: {error if isinstance(error, _Endless) else told(error)}") from error


def _table(name: str, stages: Sequence[Stage], made: Sequence[Described]) -> ScheduleTable:
    first = made[0]
    family = TaskOrder if isinstance(first, TaskOrder) else type(first)
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
        # The first of equal ones: min() keeps it, and as a hint the first alternative ranks in any case.
        best = min(tables, key=lambda table: execute(table, length, hop=hop).makespan)
        return best if best is tables[0] else replace(best, hint=tables[0])
    graph = stages[0].graph
    if isinstance(first, TaskOrder):
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


MOST_LINES = 5_000_000
"""The largest number of lines that one call of a description may run, which takes some seconds."""
_OTHERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
"""Beginnings of the names of files with code of this library, of Python, or of no file."""


class _Endless(Exception):
    """Raised when a call has run more lines than it may."""


def _is_users(code: CodeType | None) -> bool:
    """Whether a function with this code is neither this library's nor Python's."""
    return code is not None and not code.co_filename.startswith(_OTHERS)


def _bounded(call: Callable[[], _T], code: CodeType | None) -> _T:
    """Returns the call's result. Raises :class:`_Endless` once the user's code has run :data:`MOST_LINES` lines.

    ``code`` is the code of the called function. The library's own code has no bound, and neither has a call that a
    debugger follows.
    """
    if not _is_users(code) or sys.gettrace() is not None:
        return call()
    left = MOST_LINES

    def follow(_: FrameType, event: str, __: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise _Endless(f"it has run {MOST_LINES} lines and goes on: let its loops end")
        return follow

    # A trace function is the only way to stop a loop in code that never comes back.
    sys.settrace(lambda frame, *_: None if frame.f_code.co_filename.startswith(_OTHERS) else follow)
    try:
        return call()
    finally:
        sys.settrace(None)


def told(error: BaseException) -> str:
    """Returns the error's type and text, and the line of the user's code that raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}"
    return f"{type(error).__name__}{_in_line(error)}: {error}"


def _in_line(error: BaseException) -> str:
    """Returns the last line of the user's code that an error passed, as text; empty if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OTHERS)]
    return f" in line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
