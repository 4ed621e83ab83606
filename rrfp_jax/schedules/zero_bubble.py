"""The handcrafted zero-bubble schedules: ZB-H1, ZB-H2 and ZB-V (Qi et al., arXiv 2401.10241, sections 2 and 6).

ZB-H1 and ZB-H2 are 1F1B with a split backward. W waits until the stage would otherwise idle in the cool-down: a stage
that warms up with few forwards defers many W, so that every stage holds equally many microbatches. ZB-H1 keeps the
memory of 1F1B's first stage; ZB-H2 doubles the warm-up, and at equal F, I and W has no bubble at all but the
parallelogram's. Both order the chunks of any graph (:mod:`rrfp_jax.schedules.graph_order`).

ZB-V keeps 1F1B's memory on a V-shaped placement: stage s of p owns chunk s on the way down and chunk 2p-1-s on the way
back, so that the stage that starts first also ends first, and all stages hold equally much.
"""

from typing import Any

from rrfp_jax.schedules.graph_order import in_turn
from rrfp_jax.schedules.order import OrderBuilder
from rrfp_jax.schedules.registry import ScheduleRequest, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import TaskKind, chain, v_shaped

F, I, W = TaskKind.F, TaskKind.I, TaskKind.W  # noqa: E741 - the field's letters


_FACTS: dict[str, Any] = {
    "placement": "one chunk per stage",
    "source": "Zero Bubble, arXiv 2401.10241",
    "split_backward": True,
    "any_graph": True,
}


@schedule("zb-h1", **_FACTS)
def zb_h1(request: ScheduleRequest) -> ScheduleTable:
    """p-1-s warm-up F on stage s, then F and I in turn, W(i-s) right after I(i), the remaining W last."""
    return in_turn("zb-h1", request, reach=1, split=True)


@schedule("zb-h2", **_FACTS)
def zb_h2(request: ScheduleRequest) -> ScheduleTable:
    """2(p-1-s) warm-up F on stage s, then F and I in turn, W(i-2s) right after I(i), the remaining W last."""
    return in_turn("zb-h2", request, reach=2, split=True)


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
    orders = [_v_order(stage, p, max(m, 2 * p - 1)).up_to(m) for stage in range(p)]
    return ScheduleTable.from_orders("zb-v", v_shaped(p), chain(2 * p, m, split=True), orders)


def _v_order(stage: int, num_stages: int, num_microbatches: int) -> OrderBuilder:
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
