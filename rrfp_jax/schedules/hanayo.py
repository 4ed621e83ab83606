"""Hanayo: waves over the stages (Liu et al., SC'23, arXiv 2308.15762), by list scheduling.

One copy of the model goes down and up the stages ``W`` times, 2W chunks per stage, chunks at the turning points on the
same stage. It keeps Chimera's short gaps without its second copy of the weights.
"""

from collections.abc import Set

from rrfp_jax.schedules.list_schedule import list_orders
from rrfp_jax.schedules.registry import ScheduleRequest, chunks_per_stage, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import PipelineGraph, Task, TaskKind, chain, waves


@schedule(
    "hanayo",
    placement="waves: down and up the stages, chunks_per_stage / 2 times",
    source="Hanayo, arXiv 2308.15762",
    chunks_per_stage=2,
    fixed_chunks=False,
    constraints="an even number of chunks per stage (2 per wave)",
)
def hanayo(request: ScheduleRequest) -> ScheduleTable:
    """Waves of at most p microbatches under way: backwards first, then earlier microbatches, then deeper chunks.

    The order is the list schedule with these priorities in slots where F and B last equally long. With p microbatches
    it leaves the gaps of the published figures, 2(p-1) slots of a chunk per stage, for any number of waves; the next
    p microbatches follow as soon as one leaves. Raises ValueError for an odd number of chunks per stage.
    """
    p, m, v = request.num_stages, request.num_microbatches, chunks_per_stage("hanayo", request)
    if v % 2:
        raise ValueError(f"hanayo needs 2 chunks per stage and wave, not {v} in all: give chunks_per_stage={v + 1}")
    placement, graph = waves(p, v // 2), chain(v * p, m)
    orders = list_orders(placement, graph, BackwardFirst(graph, window=p), length=lambda _: 1)
    return ScheduleTable.from_orders("hanayo", placement, graph, orders)


class BackwardFirst:
    """A rule: backwards before forwards, earlier microbatches first, and forwards of later chunks first.

    Only entry is limited: at most ``window`` microbatches are between their first forward and their last backward, over
    the whole pipeline. Everything that has entered can always go on, so that nothing waits for ever.
    """

    def __init__(self, graph: PipelineGraph, *, window: int) -> None:
        self.window = window
        self.entered: set[int] = set()
        self.unfinished = [0] * graph.num_microbatches
        for task in graph.tasks():
            self.unfinished[task.microbatch] += 1

    def choose(self, stage: int, ready: Set[Task]) -> Task | None:  # noqa: ARG002 - all stages choose alike
        full = len(self.entered) >= self.window
        admissible = (task for task in ready if not full or task.microbatch in self.entered)
        task = min(admissible, key=lambda t: (t.kind is TaskKind.F, t.microbatch, -t.chunk), default=None)
        if task is not None:
            self.entered.add(task.microbatch)
        return task

    def finished(self, task: Task) -> None:
        self.unfinished[task.microbatch] -= 1
        if self.unfinished[task.microbatch] == 0:
            self.entered.remove(task.microbatch)
