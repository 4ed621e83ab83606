"""DualPipe-V: the V-shaped half of DualPipe (DeepSeek-V3, arXiv 2412.19437; "cut-in-half" variant by Sea AI Lab).

In its main phase it runs the forward of one microbatch and the backward of another as one overlapped pair, so that the
communication inside one hides behind the computation of the other. A stage here runs one task at a time: the pair is
*serialised*, forward first. What remains of the schedule is its order; the overlap gain is not modelled.

The published schedule mixes full and split backwards of one chunk. Chunks here are either split or not: a full
backward is written as I with its W right behind it, which takes the same time and frees the memory at the same moment.
"""

from collections import deque

from rrfp_jax.schedules.order import OrderBuilder
from rrfp_jax.schedules.registry import ScheduleRequest, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import TaskKind, chain, v_shaped

F, I, W = TaskKind.F, TaskKind.I, TaskKind.W  # noqa: E741 - the field's letters


@schedule(
    "dualpipe-v",
    placement="V: stage s owns chunks s and 2p-1-s",
    source="DualPipe, arXiv 2412.19437, V-shaped variant; overlapped pairs serialised",
    split_backward=True,
    chunks_per_stage=2,
    constraints="at least 2 num_stages microbatches",
)
def dual_pipe_v(request: ScheduleRequest) -> ScheduleTable:
    """The eight phases of the published order; raises ValueError with fewer than 2 p microbatches."""
    p, m = request.num_stages, request.num_microbatches
    if m < 2 * p:
        raise ValueError(
            f"dualpipe-v needs at least 2 * num_stages = {2 * p} microbatches to fill its two directions, not {m}: "
            f"give num_microbatches={2 * p} or take zb-v"
        )
    orders = [_order(stage, p, m).tasks for stage in range(p)]
    return ScheduleTable.from_orders("dualpipe-v", v_shaped(p), chain(2 * p, m, split=True), orders)


class _DeferredOrder(OrderBuilder):
    """An order whose I may leave its W for later."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: deque[int] = deque()

    def backward(self, chunk: int, *, defer: bool = False) -> None:
        self.add((I, chunk))
        if defer:
            self.deferred.append(chunk)
        else:
            self.add((W, chunk))

    def weight(self) -> None:
        """The oldest W left for later, if any."""
        if self.deferred:
            self.add((W, self.deferred.popleft()))


def _order(stage: int, num_stages: int, num_microbatches: int) -> OrderBuilder:
    down, back = stage, 2 * num_stages - 1 - stage
    after, before = num_stages - 1 - stage, stage + 1
    order = _DeferredOrder()
    order.add((F, down), times=2 * after)
    order.add((F, down), (F, back), times=before)
    for _ in range(after):
        order.backward(back)
        order.add((F, back))
    for _ in range(num_microbatches - 2 * num_stages + before):
        order.add((F, down))
        order.backward(back)
        order.add((F, back))
        order.backward(down)
    for _ in range(after):
        order.backward(back)
        order.add((F, back))
        order.backward(down)
    _drain(order, down, back, before, after)
    return order


def _drain(order: _DeferredOrder, down: int, back: int, before: int, after: int) -> None:
    """The last backwards; in the second half of the first phase W is left for the gaps of the second."""
    for i in range(2 * before):
        order.backward(back if i % 2 == 0 else down, defer=i >= before)
    for _ in range(after):
        order.weight()
        order.backward(down, defer=True)
    while order.deferred:
        order.weight()
