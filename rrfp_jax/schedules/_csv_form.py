"""Tables as CSV, in the form of ``torch.distributed.pipelining`` ("compute only").

One line per stage, one cell per slot, ``2F5`` for chunk 2 (torch says stage), forward, microbatch 5; kinds F, B, I and
W; an empty cell is a bubble. ``PipelineScheduleMulti._dump_csv`` writes this form and ``_load_csv`` reads it. Torch's
compound cell ``(1F2;0B1)OVERLAP_F_B`` is a pair, and a B of a chunk whose other backwards are split (DualPipe-V) is I
and W. Communication and sharding cells of torch's lowered form (SEND_F, UNSHARD, ...) are left out, which the log
notes: here stages send their outputs by themselves, and a chunk's parameters are always there.

A row also names the operations of the table's graph (:mod:`rrfp_jax.schedules.operations`), such as ``0O3``, each where
it is issued. No cell holds their dependencies, engines and memory: the graph that has them, or they themselves, must be
given to read them.
"""

import csv
import io
import logging
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import overload

from rrfp_jax.readable import shown
from rrfp_jax.record_files import read_bounded
from rrfp_jax.schedules.graph import PipelineGraph, chain, opposite_chains
from rrfp_jax.schedules.operations import Op, operations_in
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.schedules.tasks import BUILT_IN, Pair, Placement, Task, TaskKind

_log = logging.getLogger(__name__)
_SIGNATURE = "# hash of the rows: "
_MOST_BYTES, _MOST_ROWS, _LONGEST_CELL = 1 << 24, 1 << 14, 200
_OVERLAPPED = re.compile(r"\((.+)\)OVERLAP_F_B")
_LOWERED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def to_csv(table: ScheduleTable) -> str:
    text, seconds = io.StringIO(), {pair.first: pair.second for pair in table.pairs}

    def cells(row: Sequence[Task | None]) -> Iterator[str]:
        for task, behind in zip_longest(row, row[1:]):
            if task is not None and behind is not None and seconds.get(task) == behind:
                yield f"({task};{behind})OVERLAP_F_B"
            elif task is None or task not in joined:
                yield "" if task is None else str(task)

    joined = {seconds[a] for row in table.rows for a, b in pairwise(row) if a in seconds and seconds[a] == b}
    csv.writer(text, lineterminator="\n").writerows(map(cells, table.rows))
    return text.getvalue()


def write_csv(table: ScheduleTable, path: str | Path, *, signed: bool = False) -> None:
    """Writes the table to a file that torch.distributed.pipelining can load.

    ``signed``: a first line tells the hash of the rows, by which :func:`read_csv` notices changes; torch cannot read
    that line.
    """
    head = f"{_SIGNATURE}{table.fingerprint}\n" if signed else ""
    Path(path).write_text(head + to_csv(table), encoding="utf-8")


def read_csv(
    path: str | Path,
    *,
    placement: Placement | None = None,
    graph: PipelineGraph | None = None,
    ops: Sequence[Op] = (),
) -> ScheduleTable:
    """Reads and validates a table, which is named after its file. Raises ValueError as :func:`from_csv` does."""
    path = Path(path)
    try:
        text = read_bounded(path, _MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read schedule {path}: {error.strerror}: give the path of a CSV table") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read schedule {path}: it is not UTF-8 text") from error
    if text.count("\n") > _MOST_ROWS:
        raise ValueError(f"schedule {path} has more than {_MOST_ROWS} lines: give one line per stage")
    signature, _, rows = text.partition("\n") if text.startswith(_SIGNATURE) else ("", "", text)
    table = from_csv(rows, name=path.stem, placement=placement, graph=graph, ops=ops)
    if signature and signature.strip() != f"{_SIGNATURE}{table.fingerprint}":
        raise ValueError(
            f"schedule {path} has rows with the hash {table.fingerprint}, and its first line tells another: bring back "
            "the table that was planned, or remove that line to take this one"
        )
    return table


def from_csv(
    text: str,
    *,
    name: str = "csv",
    placement: Placement | None = None,
    graph: PipelineGraph | None = None,
    ops: Sequence[Op] = (),
) -> ScheduleTable:
    """Reads and validates a table.

    Without ``placement``, a chunk lives on the row that holds its tasks. Without ``graph``, the chunks form a chain
    that every microbatch passes; or two opposite chains with tied parameters, if the second half of the chunks lies on
    the stages of the first in reverse and no microbatch appears in both. Chunks with I or W have a split backward, also
    in a ``graph`` that splits none. ``ops`` are further operations, of which the table gets those that its rows name
    (:func:`rrfp_jax.schedules.operations.operations_in`). Raises ValueError, naming row and column, for a cell that is
    not a task, for operations that nobody gave, and whatever :meth:`ScheduleTable.validate` finds.
    """
    given = () if graph is None else graph.ops
    ops = [op for op in ops if op.letter not in {each.letter for each in given}]
    own = frozenset(op.letter for op in (*given, *ops))
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(
            f"table {name!r} is no CSV ({error}): write one line per stage, for example 0F0,0F1,0B0"
        ) from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()  # a last line without any cell is the file's end, not a stage
    joined = list[tuple[Task, Task]]()
    rows = tuple(tuple(_cells(name, stage, line, own, joined)) for stage, line in enumerate(lines))
    lowered = sorted({word for match in _LOWERED.finditer(text) if (word := match.group(1)) not in own})
    if lowered:
        _log.info("table %r: its %s are left out, stages send and keep what they need", name, ", ".join(lowered))
    tasks_of_stages = [[task for task in row if task is not None] for row in rows]
    tasks = [task for row in tasks_of_stages for task in row]
    if not tasks:
        raise ValueError(f"table {name!r} holds no task: write one line per stage, for example 0F0,0F1,0B0,0B1")
    for what, largest in (("chunk", max(t.chunk for t in tasks)), ("microbatch", max(t.microbatch for t in tasks))):
        if largest >= len(tasks):  # refused before anything makes lists of this length
            raise ValueError(
                f"table {name!r} names {what} {shown(largest)} and holds {len(tasks)} tasks: number them from 0 "
                "without gaps"
            )
    unknown = sorted({str(task.kind) for task in tasks}.difference(BUILT_IN, own))
    if unknown:
        raise ValueError(
            f"table {name!r} names operations {', '.join(unknown)}, and no cell says what they wait for or where they "
            "run: give a graph that has them, or leave these cells out"
        )
    placement = placement or _placement(name, rows)
    if len(rows) != placement.num_stages:
        raise ValueError(
            f"table {name!r} has {len(rows)} lines for {placement.num_stages} stages: write one line per stage"
        )
    if graph is None or not graph.split:
        split = frozenset(task.chunk for task in tasks if task.kind in (TaskKind.I, TaskKind.W))
        graph = replace(graph or _graph(placement, tasks), split=split)
    graph = replace(graph, ops=(*graph.ops, *operations_in(tasks_of_stages, ops))) if ops else graph
    pairs = frozenset(Pair(next(_halved(a, graph)), next(_halved(b, graph))) for a, b in joined)
    halved = tuple(tuple(part for task in row for part in _halved(task, graph)) for row in rows)
    return ScheduleTable(name, placement, graph, halved, pairs).validate()


def _cells(
    name: str, stage: int, line: Sequence[str], own: Container[str], joined: list[tuple[Task, Task]]
) -> Iterator[Task | None]:
    """Yields the tasks of one line; adds those of compound cells to ``joined``. Raises ValueError, naming row and
    column, for a cell that is none."""
    for column, cell in enumerate(line):
        if not cell:
            yield None
            continue
        place = f"table {name!r}, stage {stage}, column {column}"
        if len(cell) > _LONGEST_CELL:
            raise ValueError(f"{place}: {shown(cell)} is not a task: write one, such as 2F5")
        lowered = _LOWERED.fullmatch(cell.strip())
        if lowered and lowered.group(1) not in own:
            continue
        overlapped, tasks = _OVERLAPPED.fullmatch(cell.strip()), list[Task]()
        for text in map(str.strip, overlapped.group(1).split(";") if overlapped else [cell]):
            if not text:
                yield None
                continue
            try:
                task = Task.parse(text)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            if task.kind in (TaskKind.R, TaskKind.U):
                raise ValueError(f"{place}: {text!r} runs once per step and is not part of a table: remove it")
            tasks.append(task)
            yield task
        if overlapped and len(tasks) == 2:
            joined.append((tasks[0], tasks[1]))


@overload
def _halved(task: Task, graph: PipelineGraph) -> Iterator[Task]: ...
@overload
def _halved(task: None, graph: PipelineGraph) -> Iterator[None]: ...
def _halved(task: Task | None, graph: PipelineGraph) -> Iterator[Task | None]:
    """Yields a cell: I and W for a B of a split chunk."""
    if task is not None and task.kind is TaskKind.B and task.chunk in graph.split:
        yield task._replace(kind=TaskKind.I)
        yield task._replace(kind=TaskKind.W)
    else:
        yield task


def _placement(name: str, rows: Sequence[Sequence[Task | None]]) -> Placement:
    stage_of_chunk: dict[int, int] = {}
    for stage, row in enumerate(rows):
        for task in row:
            if task is not None and stage_of_chunk.setdefault(task.chunk, stage) != stage:
                raise ValueError(
                    f"table {name!r}: chunk {task.chunk} appears on stages {stage_of_chunk[task.chunk]} and {stage}: "
                    "keep all tasks of a chunk on one line"
                )
    gaps = sorted(set(range(max(stage_of_chunk) + 1)) - set(stage_of_chunk))
    if gaps:
        raise ValueError(f"table {name!r} has no task of chunks {gaps}: number the chunks from 0 without gaps")
    return Placement(tuple(stage_of_chunk[c] for c in range(len(stage_of_chunk))))


def _graph(placement: Placement, tasks: Sequence[Task]) -> PipelineGraph:
    num_microbatches = max(task.microbatch for task in tasks) + 1
    half, odd = divmod(placement.num_chunks, 2)
    halves = [{t.microbatch for t in tasks if (t.chunk >= half) == up} for up in (False, True)]
    down, up = placement.stage_of_chunk[:half], placement.stage_of_chunk[half:]
    # A copy lies on the stages of the original, backwards as in Chimera or mirrored as the second V of BitPipe.
    ways = (down[::-1], tuple(placement.num_stages - 1 - stage for stage in down))
    mirrored = not odd and set(down) == set(up) and up in ways
    if mirrored and halves[0].isdisjoint(halves[1]):
        return opposite_chains(half, halves[0], num_microbatches)
    return chain(placement.num_chunks, num_microbatches)
