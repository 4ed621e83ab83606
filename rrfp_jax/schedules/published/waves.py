"""Schedules that meet themselves on the stages: Hanayo's waves, and Chimera's two directions.

**Hanayo** (Liu et al., SC'23, arXiv 2308.15762): one copy of the model goes down and up the stages W times, 2W chunks
per stage, chunks at the turning points on the same stage. It keeps Chimera's short gaps without its second copy of the
weights.

**Chimera** (Li and Hoefler, SC'21, arXiv 2107.06925): two copies of the model in opposite directions. Stage s owns
chunk s of the copy that goes down and chunk p + (p-1-s) of the copy that goes up; half of the microbatches take each
direction, so that the two fill each other's gaps. Both copies hold the same parameters (``graph.shared``): weights take
twice the memory, and their gradients are summed once per step."""

from typing import Any

from rrfp_jax.schedules.entry import schedule
from rrfp_jax.schedules.language import B, Described, F, Order, Stage, rule, slots
from rrfp_jax.schedules.shapes import ALTERNATING, TWO_WAYS, WAVES, place_in_unit
from rrfp_jax.schedules.slots import EQUAL
from rrfp_jax.tasks import Task, TaskKind

_TWO_WAYS: dict[str, Any] = {"shape": TWO_WAYS, "constraints": "an even number of stages and of microbatches"}


@schedule(
    "hanayo",
    shape=WAVES,
    source="Hanayo, arXiv 2308.15762",
    constraints="an even number of chunks per stage (2 per wave)",
)
def hanayo(s: Stage) -> Described:
    """Waves of at most p microbatches under way: backwards first, then earlier microbatches, then deeper chunks.

    The order is the list schedule with these priorities in slots where F and B last equally long. With p microbatches
    it leaves the gaps of the published figures, 2(p-1) slots of a chunk per stage, for any number of waves; the next
    p microbatches follow as soon as one leaves. Raises ValueError for an odd number of chunks per stage.
    """
    return rule(B, F, key=("microbatch", "-chunk")).frozen(under_way=s.p)


@schedule("chimera", source="Chimera, arXiv 2107.06925", **_TWO_WAYS)
def chimera(s: Stage) -> Order:
    """The published merge of both directions, and direct concatenation of units of p microbatches (sections 3.1, 3.5).

    With slots in which F and B last equally long, microbatch n of a direction's p/2 is on the direction's c-th chunk
    at slots c + 2n (F) and 2p-1-c+2n (B); the other direction's slots there have the other parity, or lie apart. The
    next unit starts 2p slots later, into the gaps that the first leaves in its drain.
    """

    def at(task: Task) -> int:
        unit, goes_up, n = place_in_unit(s.p, s.m, task.microbatch)
        c = task.chunk - s.p * goes_up
        return 2 * s.p * unit + 2 * n + (c if task.kind is TaskKind.F else 2 * s.p - 1 - c)

    return slots(at)


def asymmetric_chimera_parts(num_stages: int) -> tuple[int, ...]:
    """The relative size of every chunk: 1 in the first half of each direction, 2 in the second."""
    half = num_stages // 2
    return ((1,) * half + (2,) * half) * 2


@schedule(
    "asymmetric-chimera",
    source="our construction after the idea in arXiv 2605.24006",
    chunk_parts=asymmetric_chimera_parts,
    **_TWO_WAYS,
)
def asymmetric_chimera(s: Stage) -> Order:
    """Chimera whose chunks are cut 1:2: early chunks of both directions get half the layers of late ones.

    *Our construction*: the study names the idea (the two directions of a stage get 1:2 of its blocks) and gives no
    order. Early stages of a direction hold most activations, so they get less of the model; each stage's two chunks
    together hold as much as everywhere. Cut the model in the proportions of :func:`asymmetric_chimera_parts`. The order
    is Chimera's: rules in uneven slots idle more.
    """
    return chimera(s)


@schedule(
    "greedy-chimera",
    shape=ALTERNATING,
    source="Chimera's directions merged greedily, as in arXiv 2605.24006",
    constraints=_TWO_WAYS["constraints"],
)
def greedy_chimera(s: Stage) -> Described:
    """Chimera's directions, microbatches alternating, merged as a list schedule in slots with B = 2F.

    With 8 stages and 16 microbatches stages idle for 26% of the time, as the study found. At most 2p microbatches are
    under way.
    """
    return rule(B, F, key=("microbatch", "-chunk")).frozen(lengths=EQUAL, under_way=2 * s.p)
