"""The registry: how a description gets a name, in the library or in a user's file, and how a table is built from it.

A description is a pure function of a :class:`~rrfp_jax.schedules.language.stage.Stage`. One that a user wrote is called
twice for every stage, both calls must give the same order, and its code is bounded and explained. Operations that a
description does not name are put into its rows by their own ``lead`` (:mod:`rrfp_jax.schedules.table`)::

    @schedule("my-schedule", shape=ONE_EACH, source="where it is published")
    def my_schedule(s: Stage) -> TaskOrder:
        return rounds(F.ahead(s.p - 1 - s.i), B)
"""

import difflib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from inspect import isfunction
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

from rrfp_jax.field_rules import typed
from rrfp_jax.schedules.graph import sliced_chain
from rrfp_jax.schedules.language.blocks import block
from rrfp_jax.schedules.language.orders import TaskOrder
from rrfp_jax.schedules.language.rule import Rule
from rrfp_jax.schedules.language.stage import Described, Mistake, Quickest, Stage, WholeBackward
from rrfp_jax.schedules.operations import Op, Per
from rrfp_jax.schedules.request import ANY, ScheduleRequest, ScheduleShape, sharded
from rrfp_jax.schedules.slots import execute
from rrfp_jax.schedules.table import ScheduleTable, some, with_operations
from rrfp_jax.schedules.tasks import Pair, linear

Description = Callable[[Stage], Described]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """One schedule and the facts that a user should know before asking for it."""

    name: str
    describe: Description
    source: str = "yours"
    shape: ScheduleShape = ANY
    """Placement of the chunks and the graph, where a request brings none."""
    split_backward: bool | None = None
    """Whether the backward runs as I and W; None: where the description names one of them."""
    weights_fill: bool = False
    """Whether W stand where a stage would idle, so that as a hint they rank behind all F and I."""
    from_times: bool = False
    """Whether it is made from the profiled times that are asked for with it; others are the same for all times."""
    has_groups: bool = False
    """Whether a ``group_size`` may be asked for."""
    any_graph: bool = False
    """Whether it orders the chunks of any graph on any placement; the others make a placement and a chain."""
    ops: tuple[Op, ...] | Callable[[Stage], Iterable[Op]] = ()
    """Operations that the pipeline has with this schedule; or a function of the first stage that returns them."""
    constraints: str = "none"
    chunk_parts: Callable[[int], tuple[int, ...]] | None = None
    """Relative sizes of the chunks for a number of stages; None: equal."""

    def chunks_for(self, request: ScheduleRequest) -> int:
        """Returns the chunks per stage that a request means. Raises ValueError if the schedule cannot have them."""
        asked, own = request.chunks_per_stage, self.shape.chunks_per_stage
        if asked is None or (self.any_graph and request.placement is not None):
            return own
        if self.shape.fixed_chunks and asked != own:
            raise ValueError(
                f"schedule {self.name!r} has {own} chunks per stage, not {asked}: give chunks_per_stage={own}"
            )
        return asked

    def slices_for(self, request: ScheduleRequest) -> int:
        """Returns the slices of a sequence that a request means. Raises ValueError if the schedule has none."""
        if request.slices is None:
            return request.num_stages if self.shape.is_sliced else 1
        if request.slices > 1 and not (self.shape.is_sliced or self.any_graph):
            able = ", ".join(sorted(each.name for each in KNOWN.values() if each.any_graph or each.shape.is_sliced))
            raise ValueError(f"schedule {self.name!r} runs sequences whole: leave slices out, or take {able}")
        return request.slices

    def stages(self, request: ScheduleRequest, *, split: bool = False) -> list[Stage]:
        """Returns the stages with which the description is called."""
        p, m, v = request.num_stages, request.num_microbatches, self.chunks_for(request)
        if request.graph is None:
            placement = _located(self.name, None, lambda: self.shape.placement(p, v))
            graph = _located(self.name, None, lambda: self.shape.graph(p, v, m))
            slices = self.slices_for(request)
            graph, placement = sliced_chain(graph, slices), placement.repeated(slices)
        else:
            placement, graph = request.placement or linear(request.graph.num_chunks), request.graph
        split_chunks = frozenset(range(graph.num_chunks)) if split else frozenset()
        graph = replace(graph, split=split_chunks)
        own = self.ops
        if callable(own):
            own = _checked(self.name, _located(self.name, 0, partial(own, Stage(0, placement, graph, request))))
        graph = replace(graph, ops=(*graph.ops, *own))
        return [Stage(i, placement, graph, request) for i in range(p)]

    def table(self, request: ScheduleRequest) -> ScheduleTable:
        """Returns the validated table. Raises ValueError with the remedy where the sizes do not fit the schedule."""
        try:
            stages = self.stages(request, split=bool(self.split_backward))
            return table_of(self.name, self.describe, stages, weights_fill=self.weights_fill)
        except ValueError as error:
            # A description that names I or W without saying so beforehand means a split backward.
            if self.split_backward is not None or not isinstance(error.__cause__, WholeBackward):
                raise
            stages = self.stages(request, split=True)
            return table_of(self.name, self.describe, stages, weights_fill=self.weights_fill)


D = TypeVar("D", bound=Description)
KNOWN: dict[str, ScheduleEntry] = {}
"""All schedules that have a name everywhere."""
_collecting = [KNOWN]


def schedule(name: str, **facts: Any) -> Callable[[D], D]:
    """Registers a description; ``facts`` are the other fields of its entry. Without a shape it takes any graph."""

    def register(describe: D) -> D:
        if name in _collecting[-1]:
            raise ValueError(f"schedule {name!r} is registered twice: give one of them another name")
        if not isinstance(facts.get("shape", ANY), ScheduleShape):
            raise ValueError(
                f"schedule {name!r} has the shape {facts['shape']!r}: give one of rrfp_jax.schedules.request"
            )
        if not callable(facts.get("ops", ())):
            _checked(name, facts.get("ops", ()))
        entry = ScheduleEntry(name=name, describe=describe, **{"any_graph": "shape" not in facts} | facts)
        _collecting[-1][name] = entry
        return describe

    return register


def _checked(name: str, ops: Iterable[Any]) -> tuple[Op, ...]:
    found = tuple(ops)
    wrong = next((op for op in found if not isinstance(op, Op)), None)
    if wrong is not None:
        raise ValueError(f"schedule {name!r} has {wrong!r} among its operations: give Op(...)")
    return found


def schedule_names() -> tuple[str, ...]:
    """Returns all names of schedules, sorted."""
    return tuple(sorted(KNOWN))


def is_schedule(name: str) -> bool:
    """Whether this is the name of a schedule, or a ``FILE.py:NAME`` that is no rule."""
    return name in KNOWN or _FANNED.fullmatch(name) is not None or (is_in_file(name) and not is_rule(name))


def schedule_entry(name: str | Description) -> ScheduleEntry:
    """Returns the entry of a schedule: by its name, as ``vocabulary:2`` where a stage sends the stream to 2 others, as
    ``FILE.py:NAME``, or by the function that describes it.

    Raises ValueError, with the known names, where there is none or a file cannot be imported.
    """
    if callable(name):
        known = (entry for entry in KNOWN.values() if entry.describe is name)
        return next(known, ScheduleEntry(name=getattr(name, "__name__", "mine"), describe=name, any_graph=True))
    if is_in_file(name):
        found = _named(name)
        if isinstance(found, Rule):
            raise ValueError(f"{name} is a rule: give it as a hint, or describe a table with its .frozen()")
        return replace(found, name=name)
    if (fanned := _FANNED.fullmatch(name)) is not None:
        return replace(KNOWN[fanned[1]], name=name, shape=sharded(int(fanned[2])))
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"there is no schedule {name!r}: {meant}the schedules are {', '.join(schedule_names())}; "
            "one of your own is FILE.py:NAME"
        )
    return KNOWN[name]


def chunks_per_stage(name: str, request: ScheduleRequest) -> int:
    """Returns the chunks per stage that a request means. Raises ValueError if the schedule cannot have them."""
    return schedule_entry(name).chunks_for(request)


@typed
def build_schedule(name: str | Description, request: ScheduleRequest) -> ScheduleTable:
    """Returns the validated table of a schedule, which is named as for :func:`schedule_entry`.

    Raises ValueError with the remedy where the sizes do not fit it.
    """
    entry = schedule_entry(name)
    entry.chunks_for(request)
    entry.slices_for(request)
    if request.group_size is not None and not entry.has_groups:
        grouped = ", ".join(each.name for each in KNOWN.values() if each.has_groups)
        raise ValueError(
            f"schedule {entry.name!r} has no groups of microbatches: leave group_size out, or take {grouped}"
        )
    if request.graph is not None and not entry.any_graph:
        raise ValueError(
            f"schedule {entry.name!r} makes a chain of chunks and its own placement: leave graph and placement out, or "
            f"take {', '.join(schedules_of_any_graph())}"
        )
    return replace(entry.table(request), for_microbatches=partial(_rebuilt, name, request))


def _rebuilt(name: str | Description, request: ScheduleRequest, num_microbatches: int) -> ScheduleTable:
    graph = None if request.graph is None else replace(request.graph, num_microbatches=num_microbatches)
    return build_schedule(name, replace(request, num_microbatches=num_microbatches, graph=graph))


def schedules_of_any_graph() -> tuple[str, ...]:
    """Returns the names of the schedules that order the chunks of any graph on any placement, sorted."""
    return tuple(name for name in schedule_names() if KNOWN[name].any_graph)


_FANNED = re.compile(r"(vocabulary):(\d{1,5})")
_IN_FILE = re.compile(r"(.+\.py)(?::(.*))?")


def is_in_file(name: str) -> bool:
    """Whether a name has the form ``FILE.py:NAME``."""
    return _IN_FILE.fullmatch(name) is not None


def rule_in_file(name: str) -> Rule:
    """Returns the rule of this name. Raises ValueError as for a schedule."""
    found = _named(name)
    if not isinstance(found, Rule):
        raise ValueError(f"{name} is a schedule, not a rule: give it as one")
    return found


def is_rule(name: str) -> bool:
    """Whether a name ``FILE.py:NAME`` names a rule."""
    return is_in_file(name) and isinstance(_named(name), Rule)


def _named(name: str) -> ScheduleEntry | Rule:
    match = _IN_FILE.fullmatch(name)
    assert match is not None
    path, word = match.group(1), match.group(2) or ""
    try:
        found = _contents(path, Path(path).stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read schedule {name}: {why}: give the path of a Python file") from error
    if word not in found:
        near = difflib.get_close_matches(word, found, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        there = f"it describes {', '.join(found)}" if found else "it has no function of a stage"
        raise ValueError(f"{path} has no schedule {word!r}: {meant}write {path}:NAME; {there}")
    return found[word]


@lru_cache(maxsize=64)
def _contents(path: str, _: int) -> dict[str, ScheduleEntry | Rule]:
    """Returns the schedules and rules of a file by name. The second argument is its time of change."""
    text = Path(path).read_text(encoding="utf-8")
    # Not an ordinary import: the file need not lie on sys.path, and must be read anew when it has changed. In
    # sys.modules all the same, since dataclasses and pickle look a class's module up there.
    module = ModuleType(f"rrfp_schedules_{Path(path).stem}")
    sys.modules[module.__name__] = module
    registered: dict[str, ScheduleEntry] = {}
    _collecting.append(registered)  # the file's schedules are not known by their names everywhere
    try:
        with _beside(Path(path).resolve().parent):
            exec(compile(text, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import {path}: {_told(error)}") from error
    finally:
        _collecting.pop()
    of_function = {entry.describe: entry for entry in registered.values()}
    found: dict[str, ScheduleEntry | Rule] = {**registered}
    for name, value in vars(module).items():
        if isinstance(value, Rule):
            found.setdefault(name, value)
        elif isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            found.setdefault(name, of_function.get(value) or ScheduleEntry(name=name, describe=value, any_graph=True))
    return found


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Lets the context import modules from the folder, and forgets them at its end: another file's may have the same
    names."""
    known = set(sys.modules)
    sys.path.append(str(folder))  # last: a file named like a module, such as random.py, does not take its place
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).parent == folder:
                del sys.modules[name]


# -- from a description to a table -------------------------------------------------------------------------------------


def table_of(name: str, describe: Description, stages: Sequence[Stage], *, weights_fill: bool = False) -> ScheduleTable:
    """Returns the validated table. Raises ValueError, naming stage and place, for a mistake in the description."""
    code: CodeType | None = getattr(getattr(describe, "func", describe), "__code__", None)
    is_users = code is not None and not code.co_filename.startswith(_OTHERS)
    remedies: dict[type, str] = {
        Rule: "a rule, which says what a running stage starts: add .frozen() for a table",
        block: "a block of one microbatch: add .every(slots)",
        list: "a list: write given(...) around it",
    }

    def made() -> ScheduleTable:
        described = []
        for stage in stages:
            call = partial(describe, stage)
            one: Any = _located(name, stage.i, partial(_bounded, call) if is_users else call)
            if not isinstance(one, Described):
                what = remedies.get(type(one), f"{one!r}: return an order, for example rounds(F.ahead(1), B)")
                raise ValueError(f"schedule {name!r}, stage {stage.i} gives {what}")
            described.append(one)
        return _table(name, stages, described)

    # A description that draws random numbers, or keeps state between calls, would give each process of a run another
    # table. The golden tests show that the library's own do neither.
    table = made()
    again = made() if is_users else table
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


def _located(name: str, stage: int | None, made: Callable[[], _T]) -> _T:
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
        raise ValueError(f"{place}: {error if isinstance(error, _Endless) else _told(error)}") from error


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
    graph, pairs = stages[0].graph, frozenset[Pair]()
    if isinstance(first, TaskOrder):
        both = [_located(name, s.i, partial(order.with_pairs, s)) for s, order in zip(stages, made, strict=True)]  # type: ignore[attr-defined]
        rows, pairs = [row for row, _ in both], frozenset[Pair]().union(*(found for _, found in both))
    else:  # operations go into the finished rows
        stages = [replace(stage, graph=replace(graph, ops=())) for stage in stages]
        for s, each in zip(stages, made, strict=True):
            _located(name, s.i, partial(each.check, s, first))
        rows = _located(name, None, partial(first.orders, stages, made))
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
    table = replace(table, pairs=pairs) if pairs else table
    return with_operations(table, unnamed) if unnamed else table


MOST_LINES = 5_000_000
"""The largest number of lines that one call of a description may run, which takes some seconds."""
_OTHERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
"""Beginnings of the names of files with code of this library, of Python, or of no file."""


class _Endless(Exception):
    """Raised when a call has run more lines than it may."""


def _bounded(call: Callable[[], _T]) -> _T:
    """Returns the result of a user's function. Raises :class:`_Endless` once it has run :data:`MOST_LINES` lines.

    The library's own code has no bound, and neither has a call that a debugger follows.
    """
    if sys.gettrace() is not None:
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


def _told(error: BaseException) -> str:
    """Returns the error's type and text, and the line of the user's code that raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}"
    return f"{type(error).__name__}{_in_line(error)}: {error}"


def _in_line(error: BaseException) -> str:
    """Returns the last line of the user's code that an error passed, as text; empty if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OTHERS)]
    return f" in line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
