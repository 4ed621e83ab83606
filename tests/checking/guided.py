"""Settings in which a table guides the stages: random valid tables, their peaks, footprints and foresight."""

from itertools import accumulate
from random import Random

from rrfp_jax.core import ForesightRules, schedule_hint
from rrfp_jax.schedules import PipelineGraph, Placement, Task
from tests.model_checker import Setting
from tests.model_checker.catalogue import PIPELINE_ONLY
from tests.model_checker.operations import Operations

Rows = tuple[tuple[Task, ...], ...]


def random_rows(graph: PipelineGraph, placement: Placement, random: Random, *, ordered: bool = False) -> Rows:
    """A valid table: one drawn order of all tasks in which every dependency goes forward, cut into stages."""
    before = {task: _dependencies(graph, task, ordered=ordered) for task in graph.tasks()}
    after = {task: [] for task in before}
    for task, needed in before.items():
        for dependency in needed:
            after[dependency].append(task)
    ready, order = [task for task, needed in before.items() if not needed], []
    while ready:
        task = ready.pop(random.randrange(len(ready)))
        order.append(task)
        for dependent in after[task]:
            before[dependent].remove(task)
            if not before[dependent]:
                ready.append(dependent)
    return tuple(tuple(task for task in order if task.chunk in chunks) for chunks in placement.chunks_of_stage)


def _dependencies(graph, task, *, ordered):
    before = {needed for needed in graph.dependencies(task) if needed.microbatch >= 0}
    if ordered and graph.has_backward(task.chunk) and task.kind is graph.accumulating_kind(task.chunk):
        earlier = [m for m in graph.microbatches(task.chunk) if m < task.microbatch]
        before |= {Task(task.kind, task.chunk, m) for m in earlier[-1:]}
    return before


def peak(graph: PipelineGraph, row: tuple[Task, ...]) -> int:
    """The most units of memory that a row holds."""
    effects = map(Operations(graph).effect, row)
    return max(accumulate(change for takes, frees in effects for change in (takes, -frees)), default=0)


def guided(graph, placement, rows, *, extra=0, footprint=True, foresight=True, window=2, weights_last=False, **more):
    """Every stage follows its row; ``extra`` activations more than its peak."""
    return Setting(
        graph=graph,
        placement=placement,
        windows=(window,) * placement.num_stages,
        policies=tuple(schedule_hint(row, weights_last=weights_last) for row in rows),
        rules=more.pop("rules", PIPELINE_ONLY),
        footprints=tuple(peak(graph, row) + extra * Operations(graph).unit for row in rows) if footprint else (),
        foresight=ForesightRules() if foresight else None,
        **more,
    )


def by_table(table, **more) -> Setting:
    return guided(table.graph, table.placement, table.orders, **more)
