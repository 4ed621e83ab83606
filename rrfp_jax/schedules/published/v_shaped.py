"""Schedules on the V: stage s owns chunk s on the way down and chunk 2p-1-s on the way back, a split backward.

The stage that starts first also ends first, and all stages hold equally much.

**DualPipe-V** is the V-shaped half of DualPipe (DeepSeek-V3, arXiv 2412.19437; "cut-in-half" variant by Sea AI Lab). In
its main phase it runs the forward of one microbatch and the backward of another as one overlapped pair, so that the
communication inside one hides behind the computation of the other. A stage here runs one task at a time: the pair is
*serialised*, forward first. What remains of the schedule is its order; the overlap gain is not modelled. The published
schedule mixes full and split backwards of one chunk; a full one is written as I with its W right behind it, which takes
the same time and frees the memory at the same moment.
"""

from typing import Any

from rrfp_jax.schedules.entry import schedule
from rrfp_jax.schedules.language import B, Described, F, I, Order, Stage, W, block, owed
from rrfp_jax.schedules.shapes import V

_CONTROLLABLE = "Pipeline Parallelism with Controllable Memory, arXiv 2405.15362"
_FACTS: dict[str, Any] = {"shape": V, "split_backward": True}


@schedule("zb-v", source="Zero Bubble, arXiv 2401.10241, section 6", **_FACTS)
def zb_v(s: Stage) -> Order:
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
def dual_pipe_v(s: Stage) -> Order:
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
