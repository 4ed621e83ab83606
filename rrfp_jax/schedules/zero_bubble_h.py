"""ZB-H1 and ZB-H2: the handcrafted zero-bubble schedules (Qi et al., arXiv 2401.10241, section 2).

Both are 1F1B with a split backward. W waits until the stage would otherwise idle in the cool-down: a stage that warms
up with few forwards defers many W, so that every stage holds equally many microbatches. ZB-H1 keeps the memory of
1F1B's first stage; ZB-H2 doubles the warm-up, and at equal F, I and W has no bubble at all but the parallelogram's.
"""

from rrfp_jax.schedules.registry import ScheduleRequest, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import Task, TaskKind, chain, linear


@schedule("zb-h1", placement="one chunk per stage", source="Zero Bubble, arXiv 2401.10241", split_backward=True)
def zb_h1(request: ScheduleRequest) -> ScheduleTable:
    """p-1-s warm-up F on stage s, then F and I in turn, W(i-s) right after I(i), the remaining W last."""
    return _table("zb-h1", request, depth=1)


@schedule("zb-h2", placement="one chunk per stage", source="Zero Bubble, arXiv 2401.10241", split_backward=True)
def zb_h2(request: ScheduleRequest) -> ScheduleTable:
    """2(p-1-s) warm-up F on stage s, then F and I in turn, W(i-2s) right after I(i), the remaining W last."""
    return _table("zb-h2", request, depth=2)


def _table(name: str, request: ScheduleRequest, depth: int) -> ScheduleTable:
    p, m = request.num_stages, request.num_microbatches
    orders = [_order(stage, m, num_warmup=depth * (p - 1 - stage), deferred=depth * stage) for stage in range(p)]
    return ScheduleTable.from_orders(name, linear(p), chain(p, m, split=True), orders)


def _order(stage: int, num_microbatches: int, *, num_warmup: int, deferred: int) -> list[Task]:
    num_warmup = min(num_warmup, num_microbatches)
    order = [Task(TaskKind.F, stage, i) for i in range(num_warmup)]
    for i in range(num_microbatches + deferred):
        if i + num_warmup < num_microbatches:
            order.append(Task(TaskKind.F, stage, i + num_warmup))
        if i < num_microbatches:
            order.append(Task(TaskKind.I, stage, i))
        if 0 <= i - deferred < num_microbatches:
            order.append(Task(TaskKind.W, stage, i - deferred))
    return order
