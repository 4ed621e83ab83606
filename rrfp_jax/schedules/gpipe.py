"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from rrfp_jax.schedules.registry import ScheduleRequest, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import Task, TaskKind, chain, linear


@schedule("gpipe", placement="one chunk per stage", source="GPipe, arXiv 1811.06965")
def gpipe(request: ScheduleRequest) -> ScheduleTable:
    """Every stage runs F of all microbatches, then B of all microbatches, both in ascending order."""
    p, m = request.num_stages, request.num_microbatches
    orders = [[Task(kind, stage, i) for kind in (TaskKind.F, TaskKind.B) for i in range(m)] for stage in range(p)]
    return ScheduleTable.from_orders("gpipe", linear(p), chain(p, m), orders)
