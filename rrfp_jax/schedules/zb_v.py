"""ZB-V: zero bubble on a V-shaped placement with 1F1B's memory (Qi et al., arXiv 2401.10241, section 6).

Stage s of p owns chunk s on the way down and chunk 2p-1-s on the way back, so that the stage that starts first also
ends first, and all stages hold equally much.
"""

from rrfp_jax.schedules.order import OrderBuilder
from rrfp_jax.schedules.registry import ScheduleRequest, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import TaskKind, chain, v_shaped

F, I, W = TaskKind.F, TaskKind.I, TaskKind.W  # noqa: E741 - the field's letters


@schedule(
    "zb-v",
    placement="V: stage s owns chunks s and 2p-1-s",
    source="Zero Bubble, arXiv 2401.10241, section 6",
    split_backward=True,
    chunks_per_stage=2,
)
def zb_v(request: ScheduleRequest) -> ScheduleTable:
    """Zero bubble at F = I = W from 2p-1 microbatches on; with fewer, the later ones are left out of the full table."""
    p, m = request.num_stages, request.num_microbatches
    orders = [_order(stage, p, max(m, 2 * p - 1)).up_to(m) for stage in range(p)]
    return ScheduleTable.from_orders("zb-v", v_shaped(p), chain(2 * p, m, split=True), orders)


def _order(stage: int, num_stages: int, num_microbatches: int) -> OrderBuilder:
    down, back = stage, 2 * num_stages - 1 - stage
    order = OrderBuilder()
    order.add((F, down), times=2 * (num_stages - stage) - 1)
    order.add((F, back), (F, down), times=stage)
    order.add((F, back), (I, back), (W, back), times=num_stages - stage)
    while order.count(F, back) < num_microbatches:
        if order.count(F, down) < num_microbatches:
            order.add((F, down))
        order.add((I, down), (W, down), (F, back), (I, back), (W, back))
    order.add((I, down), (I, back), times=stage)
    order.add((I, down), (W, down), times=num_stages - stage)
    for chunk in (back, down):
        order.add((W, chunk), times=num_microbatches - order.count(W, chunk))
    return order
