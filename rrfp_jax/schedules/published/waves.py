"""Schedules that meet themselves on the stages: on the V, in Hanayo's waves, and in Chimera's two directions.

**On the V** stage s owns chunk s on the way down and chunk 2p-1-s on the way back, with a split backward. The stage
that starts first also ends first, and all stages hold equally much.

**DualPipe-V** is the V-shaped half of DualPipe (DeepSeek-V3, arXiv 2412.19437; "cut-in-half" variant by Sea AI Lab). In
its main phase it runs the forward of one microbatch and the backward of another as one overlapped pair, so that the
communication inside one hides behind the computation of the other. A stage here runs one task at a time: the pair is
*serialised*, forward first. The order of the schedule remains; the overlap gain is not modelled. The published schedule
mixes full and split backwards of one chunk; a full one is written as I with its W right behind it, which takes the same
time and frees the memory at the same moment.

**Hanayo** (Liu et al., SC'23, arXiv 2308.15762): one copy of the model goes down and up the stages W times, 2W chunks
per stage, chunks at the turning points on the same stage. It keeps Chimera's short gaps without its second copy of the
weights.

**Chimera** (Li and Hoefler, SC'21, arXiv 2107.06925): two copies of the model in opposite directions. Stage s owns
chunk s of the copy that goes down and chunk p + (p-1-s) of the copy that goes up; half of the microbatches take each
direction, so that the two fill each other's gaps. Both copies hold the same parameters (``graph.shared``): weights take
twice the memory, and their gradients are summed once per step."""

from typing import Any

from rrfp_jax.schedules.language import B, Described, F, I, Stage, TaskOrder, W, block, owed, rule, slots
from rrfp_jax.schedules.registry import schedule
from rrfp_jax.schedules.request import ALTERNATING, TWO_WAYS, WAVES, V, place_in_unit
from rrfp_jax.schedules.slots import EQUAL
from rrfp_jax.schedules.tasks import Task, TaskKind

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
def chimera(s: Stage) -> TaskOrder:
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
    """Returns the relative size of every chunk: 1 in the first half of each direction, 2 in the second."""
    half = num_stages // 2
    return ((1,) * half + (2,) * half) * 2


@schedule(
    "asymmetric-chimera",
    source="our construction after the idea in arXiv 2605.24006",
    chunk_parts=asymmetric_chimera_parts,
    **_TWO_WAYS,
)
def asymmetric_chimera(s: Stage) -> TaskOrder:
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


_CONTROLLABLE = "Pipeline Parallelism with Controllable Memory, arXiv 2405.15362"
_FACTS: dict[str, Any] = {"shape": V, "split_backward": True}


@schedule("zb-v", source="Zero Bubble, arXiv 2401.10241, section 6", **_FACTS)
def zb_v(s: Stage) -> TaskOrder:
    """1F1B's memory, and no bubble at F = I = W from 2p-1 microbatches on; with fewer, the later ones are left out."""
    down, back = s.chunks
    order = F[down] * (2 * (s.p - s.i) - 1) + (F[back] + F[down]) * s.i + (F[back] + B[back]) * (s.p - s.i)
    order += (F[down] + B[down] + F[back] + B[back]).until(F[back])
    order += (I[down] + I[back]) * s.i + (I[down] + W[down]) * (s.p - s.i) + W[back].rest + W[down].rest
    return order.written_for(2 * s.p - 1)


@schedule("v-half", source=_CONTROLLABLE, **_FACTS)
def v_half(s: Stage) -> Described:
    """About half of 1F1B's activations, (p+2)//2 microbatches, at about half of its bubble."""
    (down, back), p, i = s.chunks, s.p, s.i
    k = 3 if p % 2 == 0 else 0
    starts = {F[down]: 2 * i, F[back]: 3 * p - i - 2, I[back]: 3 * p + k + 2 * i - 1, I[down]: 6 * p + k - i - 2}
    return block(starts).every(6).packed()


@schedule("v-min", source=_CONTROLLABLE, **_FACTS)
def v_min(s: Stage) -> Described:
    """About a third of 1F1B's activations, (p+4)//3 microbatches, at about two thirds of its bubble."""
    (down, back), p, i = s.chunks, s.p, s.i
    k = 2 if p % 3 == 0 else 0
    starts = {F[down]: i, F[back]: 2 * p - i - 1, I[back]: 2 * p + k + i, I[down]: 4 * p + k - i - 1}
    return block(starts).every(6).packed()


@schedule(
    "dualpipe-v",
    source="DualPipe, arXiv 2412.19437, V-shaped variant; overlapped pairs serialised",
    constraints="at least 2 num_stages microbatches",
    **_FACTS,
)
def dual_pipe_v(s: Stage) -> TaskOrder:
    """The eight phases of the published order; in the drain W is left for gaps. From 2p microbatches on."""
    (down, back), after, here = s.chunks, s.p - 1 - s.i, s.i + 1
    _check_filled(s)
    order = F[down] * (2 * after) + (F[down] + F[back]) * here + (B[back] + F[back]) * after
    order += (F[down] + B[back] + F[back] + B[down]) * (s.m - 2 * s.p + here)
    order += (B[back] + F[back] + B[down]) * after
    order += (B[back] + B[down]) * (here // 2) + (B[back] + I[down]) * (here % 2) + (I[back] + I[down]) * (here // 2)
    return order + (owed + I[down]) * after + owed.rest


def _check_filled(s: Stage) -> None:
    if s.m < 2 * s.p:
        raise ValueError(
            f"dualpipe-v needs at least 2 * num_stages = {2 * s.p} microbatches to fill its two directions, not {s.m}: "
            f"give num_microbatches={2 * s.p} or take zb-v"
        )
