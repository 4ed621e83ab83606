"""Settings in which a table guides the stages: random valid tables, their peaks, footprints and foresight."""

from itertools import accumulate
from random import Random

from rrfp_jax.arbitration import ForesightRules, schedule_hint
from rrfp_jax.checking import Setting
from rrfp_jax.checking.catalogue import PIPELINE_ONLY
from rrfp_jax.tasks import PipelineGraph, Placement, Task, TaskKind

Rows = tuple[tuple[Task, ...], ...]


def random_rows(graph: PipelineGraph, placement: Placement, random: Random, *, ordered: bool = False) -> Rows:
    """A valid table: one drawn order of all tasks in which every dependency goes forward, cut into stages."""
    left, order = set(graph.tasks()), []
    while left:
        ready = sorted(task for task in left if _is_ready(graph, task, left, ordered=ordered))
        task = ready[random.randrange(len(ready))]
        left.remove(task)
        order.append(task)
    return tuple(tuple(task for task in order if task.chunk in chunks) for chunks in placement.chunks_of_stage)


def _is_ready(graph, task, left, *, ordered):
    before = set(graph.dependencies(task))
    if ordered and graph.has_backward(task.chunk) and task.kind is graph.accumulating_kind(task.chunk):
        before |= {Task(task.kind, task.chunk, m) for m in range(task.microbatch)}
    return before.isdisjoint(left)


def peak(graph: PipelineGraph, row: tuple[Task, ...]) -> int:
    """The most activations that a row holds."""
    trained = [task for task in row if graph.has_backward(task.chunk)]
    takes = ((t.kind is TaskKind.F) - (t.kind is graph.accumulating_kind(t.chunk)) for t in trained)
    return max(accumulate(takes), default=0)


def guided(graph, placement, rows, *, extra=0, footprint=True, foresight=True, window=2, **more) -> Setting:
    """Every stage follows its row; ``extra`` activations more than its peak."""
    return Setting(
        graph=graph,
        placement=placement,
        windows=(window,) * placement.num_stages,
        policies=tuple(map(schedule_hint, rows)),
        rules=more.pop("rules", PIPELINE_ONLY),
        footprints=tuple(peak(graph, row) + extra for row in rows) if footprint else (),
        foresight=ForesightRules() if foresight else None,
        **more,
    )


def by_table(table, **more) -> Setting:
    return guided(table.graph, table.placement, table.orders, **more)
