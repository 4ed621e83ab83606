"""The ideal slot table: every task as soon as its stage's order and its inputs allow, with given lengths.

This is the second of three levels of comparison: a closed formula (``formulas.py``), the ideal table (here), and
execution by the real core in virtual time (the simulator). A table has no timing of its own, so its bubble depends on
the slot lengths: say them beside every number.

The start of a task is the longest path to it in the graph whose edges are the dependencies (plus ``hop`` where they
cross stages) and the stage's order; the execution below visits the tasks in a topological order of that graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rrfp_jax.schedules.operations import COMPUTE
from rrfp_jax.schedules.table import ScheduleTable, execution_order, relative_sizes
from rrfp_jax.schedules.tasks import Task, TaskKind
from rrfp_jax.schedules.timeline import Span, Timeline

if TYPE_CHECKING:
    from rrfp_jax.schedules.language.stage import Stage


@dataclass(frozen=True)
class SlotLengths:
    """Lengths of tasks by kind, in any unit. A full backward takes the sum of its halves; an operation has its own
    length, ``ms``, in the same unit."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    def __call__(self, task: Task) -> float:
        halves = {TaskKind.F: self.forward, TaskKind.I: self.input_gradient, TaskKind.W: self.weight_gradient}
        return halves.get(task.kind, self.input_gradient + self.weight_gradient)


EQUAL = SlotLengths()
"""F = I = W = 1, so a full backward takes 2."""
BACKWARD_AS_FORWARD = SlotLengths(1.0, 0.5, 0.5)
"""A full backward as long as a forward: the slot of many published tables."""


@dataclass(frozen=True)
class SlotTable:
    """A table with times: ``spans[task]`` is (start, end), in the unit of the lengths."""

    table: ScheduleTable
    spans: dict[Task, tuple[float, float]]

    @cached_property
    def timeline(self) -> Timeline:
        """The spans as a recorded step, one second per unit."""
        stage_of = self.table.placement.stage_of_chunk
        lane = self.table.graph.lane
        spans = [
            Span(0, stage_of[task.chunk], task, start, end, lane(task.kind))
            for task, (start, end) in self.spans.items()
        ]
        return Timeline(self.table.num_stages, spans)

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end over all stages. The timeline has the bubble."""
        return self.timeline.makespan_s()

    def aligned(self, slot: float = 1.0) -> ScheduleTable:
        """Returns the table with empty cells: column k starts at ``k * slot``, and empty cells follow a longer task.

        Raises ValueError if a start is no multiple of the slot, or the column of a task is taken: by one that runs at
        the same time on an engine, or that takes no time.
        """
        rows = []
        for order in self.table.orders:
            row: list[Task | None] = []
            for task in order:
                start = self.spans[task][0] / slot
                if start != int(start):
                    raise ValueError(f"{task} starts at {start} slots of {slot}: give a slot that divides all lengths")
                if start < len(row):
                    raise ValueError(f"{task} has no cell of its own, since slot {start:g} is taken: draw the table")
                row += [*[None] * (int(start) - len(row)), task]
            rows.append(tuple(row))
        return ScheduleTable(self.table.name, self.table.placement, self.table.graph, tuple(rows))


def execute(table: ScheduleTable, length: Callable[[Task], float] = EQUAL, *, hop: float = 0.0) -> SlotTable:
    """Runs the orders strictly and as soon as possible, and returns the times.

    ``length`` gives the time of a task, ``hop`` the time between the end of a task and the start of a dependent one on
    another stage. Operations take their own ``ms``, in the same unit, each as soon as possible after those before it on
    its engine. Of operations that run once per step, only those for which others wait run here. Memory that operations
    move does not count. Raises ValueError if the table deadlocks.
    """
    stage_of = table.placement.stage_of_chunk
    finished, position = execution_order(table.graph, table.orders)
    if any(done < len(order) for done, order in zip(position, table.orders, strict=True)):
        table.validate()
    spans: dict[Task, tuple[float, float]] = {}
    free: dict[tuple[int, str], float] = {}
    own = {op.letter: op.ms for op in table.graph.ops}

    def run(task: Task) -> None:
        stage = stage_of[task.chunk]
        engine = (stage, table.graph.lane(task.kind))
        # R and U are no part of a table; an operation once per step is none either, but others may wait for it, so it
        # runs here as soon as the first of them asks.
        needed = [d for d in table.graph.dependencies(task) if d.microbatch >= 0 or d.kind in own]
        for once in needed:
            if once not in spans:
                run(once)
        start = free.get(engine, 0.0)
        for before in needed:
            start = max(start, spans[before][1] + (hop if stage_of[before.chunk] != stage else 0.0))
        free[engine] = start + (own[task.kind] if task.kind in own else length(task))
        spans[task] = (start, free[engine])

    for task in finished:
        run(task)
    return SlotTable(table, spans)


def per_stage(
    pipeline: "ScheduleTable | Stage", lengths: Callable[[Task], float], chunk_parts: Sequence[float] = ()
) -> Callable[[Task], float]:
    """Returns the lengths of a whole stage, cut for its chunks: equally, or in the proportions of ``chunk_parts``.

    So that schedules with different numbers of chunks are compared at the same work per microbatch and model. Chunks
    that keep parts of an activation take such parts of the time. The whole backward of a frozen chunk takes as long as
    its input gradient; an operation takes its own ``ms``.
    """
    graph, stage_of = pipeline.graph, pipeline.placement.stage_of_chunk
    own = {op.letter: op.ms for op in graph.ops}
    passes = [graph.kept_per_microbatch(chunks) / graph.memory_unit for chunks in pipeline.placement.chunks_of_stage]
    sizes = relative_sizes(chunk_parts, graph.num_chunks)
    if graph.weights:
        sizes = tuple(size * weight for size, weight in zip(sizes, graph.weights, strict=True))
    frozen = graph.frozen

    def length(task: Task) -> float:
        if task.kind is TaskKind.B and task.chunk in frozen:
            return length(task._replace(kind=TaskKind.I))
        if task.kind in own:
            return own[task.kind]
        return lengths(task) * sizes[task.chunk] / passes[stage_of[task.chunk]]

    return length


def drawing(slots: SlotTable, slot: float = 1.0) -> str:
    """Returns the table as text, one line per stage and one column per slot, to compare with a paper's figure by eye.

    Where there are engines beside compute, each has a line of its own under its stage's, and all lines begin with their
    names. A task that takes no time is not visible.
    """
    table, rows = slots.table, dict[tuple[int, str], list[Task]]()
    for task in slots.spans:
        row = (table.placement.stage_of_chunk[task.chunk], table.graph.lane(task.kind))
        rows.setdefault(row, []).append(task)
    width = max(len(str(task)) for task in slots.spans) + 1
    num_columns = round(max(end for _, end in slots.spans.values()) / slot)
    names = {(stage, lane): f"stage {stage}" if lane == COMPUTE else f"  {lane}" for stage, lane in rows}
    margin = max(map(len, names.values())) + 2 if any(lane != COMPUTE for _, lane in rows) else 0
    lines = []
    for stage, lane in sorted(rows, key=lambda row: (row[0], row[1] != COMPUTE, row[1])):
        cells = [""] * num_columns
        for task in rows[stage, lane]:
            start, end = (round(time / slot) for time in slots.spans[task])
            cells[start:end] = [str(task) if column == start else "-" * (width - 1) for column in range(start, end)]
        name = names[stage, lane].ljust(margin) if margin else ""
        lines.append((name + "".join(cell.ljust(width) for cell in cells)).rstrip())
    return "\n".join(lines) + "\n"
