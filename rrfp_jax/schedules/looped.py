"""Schedules on the looped placement: interleaved 1F1B and breadth-first.

Both cut the model into ``v`` chunks per stage, chunk ``c`` on stage ``c mod p``, which divides the fill and drain by
``v``.
"""

from rrfp_jax.schedules.order import alternate
from rrfp_jax.schedules.registry import ScheduleRequest, chunks_per_stage, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import Task, TaskKind, chain, looped


@schedule(
    "interleaved-1f1b",
    placement="looped: chunk c on stage c mod p",
    source="Megatron-LM, arXiv 2104.04473",
    chunks_per_stage=2,
    fixed_chunks=False,
    constraints="at least 2 chunks per stage; num_microbatches divisible by num_stages",
)
def interleaved_one_f_one_b(request: ScheduleRequest) -> ScheduleTable:
    """Megatron-LM's order (Narayanan et al., SC'21, section 2.2).

    Microbatches go in groups of p through the stage's chunks in turn, backwards through them in reverse; stage s runs
    2(p-1-s) + (v-1)p warm-up forwards. Raises ValueError unless p divides the number of microbatches and v > 1.
    """
    p, m, v = request.num_stages, request.num_microbatches, chunks_per_stage("interleaved-1f1b", request)
    if v == 1:
        raise ValueError("interleaved-1f1b with 1 chunk per stage is 1f1b: take that, or give chunks_per_stage=2")
    if m % p:
        below, above = m - m % p, m - m % p + p
        use = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"interleaved-1f1b needs num_microbatches ({m}) divisible by num_stages ({p}): use {use} instead of {m}"
        )
    orders = []
    for stage in range(p):
        passes = [(group + i, loop) for group in range(0, m, p) for loop in range(v) for i in range(p)]
        forwards = [Task(TaskKind.F, stage + p * loop, i) for i, loop in passes]
        backwards = [Task(TaskKind.B, stage + p * (v - 1 - loop), i) for i, loop in passes]
        orders.append(alternate(forwards, backwards, 2 * (p - 1 - stage) + (v - 1) * p))
    return ScheduleTable.from_orders("interleaved-1f1b", looped(p, v), chain(p * v, m), orders)


@schedule(
    "breadth-first",
    placement="looped: chunk c on stage c mod p",
    source="Breadth-First Pipeline Parallelism, arXiv 2211.05953",
    chunks_per_stage=2,
    fixed_chunks=False,
)
def breadth_first(request: ScheduleRequest) -> ScheduleTable:
    """All microbatches through a chunk before the next chunk of the stage, backwards in reverse (Lamy-Poirier)."""
    p, m, v = request.num_stages, request.num_microbatches, chunks_per_stage("breadth-first", request)
    orders = [
        [Task(TaskKind.F, stage + p * loop, i) for loop in range(v) for i in range(m)]
        + [Task(TaskKind.B, stage + p * loop, i) for loop in reversed(range(v)) for i in range(m)]
        for stage in range(p)
    ]
    return ScheduleTable.from_orders("breadth-first", looped(p, v), chain(p * v, m), orders)
