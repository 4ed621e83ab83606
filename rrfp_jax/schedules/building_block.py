"""V-Half and V-Min: V-shaped schedules with controllable memory (Qi et al., arXiv 2405.15362).

A *building block* lists the start slots of one microbatch's four passes F down, F back, I back, I down on every stage,
all passes one slot long. Repeated every six slots (F, I and W of two chunks) it fills the steady state without
collisions, and the time from F to W bounds the memory: the sooner the passes of a microbatch follow each other, the
fewer of them are in flight. The full schedule follows in five steps (section 3 and appendix of the paper):

1. repeat the block for every microbatch; each W goes into the first free slot after its I;
2. *reorder* warm-up and drain: a pass moves to the earliest free slot that its inputs allow and that does not raise the
   stage's peak beyond the largest peak of any stage so far;
3. *squeeze*: keep the order, run everything as soon as possible;
4. forget where W are, reorder the drain once more, and give W the free slots anew;
5. squeeze again; what remains is the order.

The steps work on slots, as the construction assumes F = I = W; execution with other times keeps the order.
"""

from collections.abc import Callable

from rrfp_jax.schedules.registry import ScheduleRequest, schedule
from rrfp_jax.schedules.slot_grid import F_BACK, F_DOWN, I_BACK, I_DOWN, WEIGHT, Pass, SlotGrid
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import Task, TaskKind, chain, v_shaped

_INTERVAL = 6
Block = Callable[[int, int], tuple[int, int, int, int]]


@schedule(
    "v-half",
    placement="V: stage s owns chunks s and 2p-1-s",
    source="Pipeline Parallelism with Controllable Memory, arXiv 2405.15362",
    split_backward=True,
    chunks_per_stage=2,
)
def v_half(request: ScheduleRequest) -> ScheduleTable:
    """About half of 1F1B's activations, (p+2)//2 microbatches, at about half of its bubble."""
    return _table("v-half", request, _v_half_block)


@schedule(
    "v-min",
    placement="V: stage s owns chunks s and 2p-1-s",
    source="Pipeline Parallelism with Controllable Memory, arXiv 2405.15362",
    split_backward=True,
    chunks_per_stage=2,
)
def v_min(request: ScheduleRequest) -> ScheduleTable:
    """About a third of 1F1B's activations, (p+4)//3 microbatches, at about two thirds of its bubble."""
    return _table("v-min", request, _v_min_block)


def _v_half_block(stage: int, p: int) -> tuple[int, int, int, int]:
    shift = 3 if p % 2 == 0 else 0
    return 2 * stage, 3 * p - stage - 2, 3 * p + shift + 2 * stage - 1, 6 * p + shift - stage - 2


def _v_min_block(stage: int, p: int) -> tuple[int, int, int, int]:
    shift = 2 if p % 3 == 0 else 0
    return stage, 2 * p - stage - 1, 2 * p + shift + stage, 4 * p + shift - stage - 1


def _table(name: str, request: ScheduleRequest, block: Block) -> ScheduleTable:
    p, m = request.num_stages, request.num_microbatches
    grid = SlotGrid(p, m, [_repeat(block(stage, p), m) for stage in range(p)])
    grid.fill_weights()
    steady_from = grid.slots[0][Pass(I_DOWN, 0)]
    steady_to = grid.slots[0][Pass(F_DOWN, m - 1)]
    grid.reorder(lambda slot: slot < steady_from or slot > steady_to)
    grid.squeeze()
    steady_to = grid.slots[0][Pass(F_DOWN, m - 1)]
    grid.drop_weights()
    grid.reorder(lambda slot: slot > steady_to)
    grid.fill_weights()
    grid.squeeze()
    orders = [_order(stage, p, grid.order(stage)) for stage in range(p)]
    return ScheduleTable.from_orders(name, v_shaped(p), chain(2 * p, m, split=True), orders)


def _repeat(block: tuple[int, int, int, int], num_microbatches: int) -> dict[Pass, int]:
    return {Pass(kind, i): start + _INTERVAL * i for kind, start in enumerate(block) for i in range(num_microbatches)}


def _order(stage: int, p: int, passes: list[Pass]) -> list[Task]:
    """Name the passes; the n-th W belongs to the n-th I."""
    down, back = stage, 2 * p - 1 - stage
    named = {
        F_DOWN: (TaskKind.F, down),
        F_BACK: (TaskKind.F, back),
        I_BACK: (TaskKind.I, back),
        I_DOWN: (TaskKind.I, down),
    }
    inputs = [one for one in passes if one.kind in (I_BACK, I_DOWN)]
    order = []
    for one in passes:
        if one.kind == WEIGHT:
            kind, microbatch = inputs[one.number]
            order.append(Task(TaskKind.W, named[kind][1], microbatch))
        else:
            order.append(Task(*named[one.kind], one.number))
    return order
