"""Hanayo: waves over the stages (Liu et al., SC'23, arXiv 2308.15762).

One copy of the model goes down and up the stages ``W`` times, 2W chunks per stage, chunks at the turning points on the
same stage. It keeps Chimera's short gaps without its second copy of the weights.
"""

from rrfp_jax.schedules.list_scheduling import ListScheduler, backward_first
from rrfp_jax.schedules.registry import ScheduleRequest, chunks_per_stage, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import chain, waves


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
    run = ListScheduler(placement, graph, length=lambda _: 1, priority=backward_first, window=p)
    return ScheduleTable.from_orders("hanayo", placement, graph, run.orders())
