"""Five published schedules that the registry does not have, as a user writes them in a file of one's own."""

from rrfp_jax.schedules import schedule
from rrfp_jax.schedules.language import B, Described, F, I, Stage, TaskOrder, W, owed, rounds, rule
from rrfp_jax.schedules.request import ALTERNATING, LOOPED


@schedule("dapple", source="DAPPLE, arXiv 2007.01045: policy B, with memory for as many microbatches as stages")
def dapple(s: Stage) -> TaskOrder:
    """As many warm-up forwards as two per hop and memory allow."""
    return rounds(F.ahead(min(2 * (s.p - s.i) - 1, s.p) - 1), B)


@schedule("gems", shape=ALTERNATING, source="GEMS, SC'20, as Chimera (arXiv 2107.06925) describes it")
def gems(s: Stage) -> Described:
    """Two directions, and no more than two microbatches under way."""
    return rule(B, F, key="microbatch").frozen(under_way=2)


@schedule("wide-groups", shape=LOOPED, source="Llama 3, arXiv 2407.21783, section 3.3: groups of more than p")
def wide_groups(s: Stage) -> TaskOrder:
    """Interleaved 1F1B in groups of 2p, which hide the way between stages."""
    groups = [range(first, first + 2 * s.p) for first in range(0, s.m, 2 * s.p)]
    forwards = [(c, m) for group in groups for c in s.chunks for m in group]
    backwards = [(c, m) for group in groups for c in s.chunks[::-1] for m in group]
    warm_up = 2 * (s.p - 1 - s.i) + (len(s.chunks) - 1) * 2 * s.p
    return rounds(F.over(forwards).ahead(warm_up), B.over(backwards))


@schedule("interleaved-zero-bubble", shape=LOOPED, source="torch's ScheduleInterleavedZeroBubble")
def interleaved_zero_bubble(s: Stage) -> TaskOrder:
    """Groups of p through the chunks, one warm-up forward per hop, and W late by the stage's number."""
    forwards = [(c, g + i) for g in range(0, s.m, s.p) for c in s.chunks for i in range(s.p)]
    backwards = [(c, g + i) for g in range(0, s.m, s.p) for c in s.chunks[::-1] for i in range(s.p)]
    warm_up = (len(s.chunks) - 1) * s.p + s.p - 1 - s.i
    return rounds(F.over(forwards).ahead(warm_up), I.over(backwards), W.over(backwards).behind(s.i))


@schedule("dualpipe", shape=ALTERNATING, source="DualPipe, arXiv 2412.19437; its pairs serialised, forward first")
def dual_pipe(s: Stage) -> TaskOrder:
    """Eight steps over two directions; ``near`` is the one that starts closer to the stage."""
    near, far = s.chunks if s.i < s.p // 2 else s.chunks[::-1]
    here = min(s.i, s.p - 1 - s.i) + 1
    after = s.p // 2 - here
    order = F[near] * (2 * after) + (F[near] + F[far]) * here + (B[far] + F[far]) * after
    order += (F[near] + B[far] + F[far] + B[near]) * (s.m // 2 - s.p + here) + (B[far] + F[far] + B[near]) * after
    order += (B[far] + B[near]) * (here // 2) + (B[far] + I[near]) * (here % 2) + (I[far] + I[near]) * (here // 2)
    return order + (owed + I[near]) * after + owed.rest
