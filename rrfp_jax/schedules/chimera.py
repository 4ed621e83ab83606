"""Chimera: two copies of the model in opposite directions (Li and Hoefler, SC'21, arXiv 2107.06925), and a variant.

Stage s owns chunk s of the copy that goes down and chunk p + (p-1-s) of the copy that goes up; half of the microbatches
take each direction, so that the two fill each other's gaps. Both copies hold the same parameters (``graph.shared``):
weights take twice the memory, and their gradients are summed once per step.
"""

from dataclasses import replace

from rrfp_jax.schedules.registry import ScheduleRequest, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import PipelineGraph, Task, TaskKind, bidirectional, opposite_chains

_PLACEMENT = "two copies of p chunks in opposite directions"
_CONSTRAINTS = "an even number of stages and of microbatches"


@schedule(
    "chimera", placement=_PLACEMENT, source="Chimera, arXiv 2107.06925", chunks_per_stage=2, constraints=_CONSTRAINTS
)
def chimera(request: ScheduleRequest) -> ScheduleTable:
    """The published merge of both directions, and direct concatenation of units of p microbatches (sections 3.1, 3.5).

    With slots in which F and B last equally long, microbatch i of a direction's p/2 is on the direction's c-th chunk
    at slots c + 2i (F) and 2p-1-c+2i (B); the other direction's slots there have the other parity, or lie apart. The
    next unit starts 2p slots later, into the gaps that the first leaves in its drain. Raises ValueError for an odd
    number of stages or microbatches.
    """
    p, m = request.num_stages, request.num_microbatches
    _check_even("chimera", p, m)
    slots: list[dict[int, Task]] = [{} for _ in range(p)]
    for microbatch in range(m):
        unit, goes_up, i = _place_in_unit(p, microbatch, m)
        for c in range(p):
            stage, chunk = (p - 1 - c, c + p) if goes_up else (c, c)
            for kind, slot in ((TaskKind.F, c), (TaskKind.B, 2 * p - 1 - c)):
                at = slot + 2 * i + 2 * p * unit
                assert at not in slots[stage], "the two directions collide"
                slots[stage][at] = Task(kind, chunk, microbatch)
    orders = [[at[slot] for slot in sorted(at)] for at in slots]
    return ScheduleTable.from_orders("chimera", bidirectional(p), _graph(p, m), orders)


def asymmetric_chimera_parts(num_stages: int) -> tuple[int, ...]:
    """The relative size of every chunk: 1 in the first half of each direction, 2 in the second."""
    half = num_stages // 2
    return ((1,) * half + (2,) * half) * 2


@schedule(
    "asymmetric-chimera",
    placement=_PLACEMENT + ", cut 1:2",
    source="our construction after the idea in arXiv 2605.24006",
    chunks_per_stage=2,
    constraints=_CONSTRAINTS,
    chunk_parts=asymmetric_chimera_parts,
)
def asymmetric_chimera(request: ScheduleRequest) -> ScheduleTable:
    """Chimera whose chunks are cut 1:2: early chunks of both directions get half the layers of late ones.

    *Our construction*: the study names the idea (the two directions of a stage get 1:2 of its blocks) and gives no
    order. Early stages of a direction hold most activations, so they get less of the model; each stage's two chunks
    together hold as much as everywhere. Cut the model in the proportions of :func:`asymmetric_chimera_parts`. The order
    is Chimera's: list schedules in uneven slots idle more. Raises ValueError as Chimera does.
    """
    return replace(chimera(request), name="asymmetric-chimera")


def _graph(p: int, m: int) -> PipelineGraph:
    return opposite_chains(p, [i for i in range(m) if not _place_in_unit(p, i, m)[1]], m)


def _place_in_unit(p: int, microbatch: int, num_microbatches: int) -> tuple[int, bool, int]:
    """(unit, whether it goes up, number within its direction); the last unit may hold fewer than p microbatches."""
    unit, place = divmod(microbatch, p)
    half = min(p, num_microbatches - unit * p) // 2
    return unit, place >= half, place % half


def _check_even(name: str, p: int, m: int) -> None:
    for what, number in (("num_stages", p), ("num_microbatches", m)):
        if number % 2:
            raise ValueError(
                f"{name} sends half of the microbatches each way through the same stages, so {what} ({number}) must be "
                f"even: give {what}={number + 1}" + (f" or {number - 1}" if number > 1 else "")
            )
