"""What a change of the machine would give the best choice, and what therefore limits it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.judging import Judge
from rrfp_jax.planning.search.parts import faster_links, with_cut
from rrfp_jax.planning.search.records import Sensitivity

GIB = 2**30
_SHORTER = 0.9
_MOST_STAGES = 16
"""Of more stages those with most work are looked at."""


def sensitivities(
    one: Candidate,
    judge: Judge,
    num_draws: int,
    with_more_memory: Callable[[], float] | None,
    should_stop: Callable[[], bool],
) -> list[Sensitivity]:
    """Each stage 10% faster, links 10% faster, and 1 GiB more, by the draws that it was chosen by.

    ``with_more_memory`` searches again, and gives milliseconds per sample; None: memory is no limit.
    """
    samples = one.choice.shape.batch_size
    present = judge.value(one, num_draws)
    found: list[Sensitivity] = []
    for words, changed in _changed(one):
        if should_stop():
            return found
        value = judge.value(changed, num_draws)
        found.append(Sensitivity(change=words, step_ms=value * samples, gain=1 - value / present))
    if with_more_memory is not None and not should_stop():
        value = min(present, with_more_memory())
        words = f"{format_bytes(GIB)} more per device"
        found.append(Sensitivity(change=words, step_ms=value * samples, gain=1 - value / present))
    return found


def bottleneck(found: list[Sensitivity]) -> str:
    """What gives most."""
    if not found:
        return ""
    best = max(found, key=lambda each: each.gain)
    if best.gain < 0.001:
        return "no single change of a stage, of the links or of memory would make a step shorter"
    return f"{best.change} would give {best.gain:.1%}, more than any other change"


def _changed(one: Candidate) -> Iterator[tuple[str, Candidate]]:
    cut = one.choice.cut
    stages = range(cut.placement.num_stages)
    present = cut.stage_factors or (1.0,) * len(stages)
    fullest = sorted(stages, key=lambda stage: -cut.stage_work_ms[stage])[:_MOST_STAGES]
    for stage in sorted(fullest):
        factors = tuple(each * (_SHORTER if at == stage else 1.0) for at, each in enumerate(present))
        yield f"stage {stage} 10% faster", with_cut(one, replace(cut, stage_factors=factors))
    if len(stages) > 1:
        quicker = replace(cut.costs, links=faster_links(cut.costs.links, _SHORTER))
        yield "links 10% faster", with_cut(one, replace(cut, costs=quicker))
