"""What a change of the machine would give the best choice, and what therefore limits it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.costs import CutModel
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.executed import with_same_decisions
from rrfp_jax.planning.search.judging import Judge
from rrfp_jax.planning.search.parts import faster_links, with_cut
from rrfp_jax.planning.search.records import Sensitivity

GIB = 2**30
_SHORTER = 0.9
_MOST_STAGES = 16
"""Of more stages those with most work are looked at."""
_DRAWS = 8
"""On which decisions are the same; they are simulated once."""


def sensitivities(
    one: Candidate,
    judge: Judge,
    num_draws: int,
    with_more_memory: Callable[[], float] | None,
    should_stop: Callable[[], bool],
) -> list[Sensitivity]:
    """Each stage 10% faster, links 10% faster, and 1 GiB more, by the draws that it was chosen by.

    Stages and links by the same decisions on each draw, which other times would change by chance. ``with_more_memory``
    searches again, and gives milliseconds per sample, to be compared by ``num_draws``; None: memory is no limit.
    """
    samples, present = one.choice.shape.batch_size, judge.value(one, num_draws)
    found: list[Sensitivity] = []

    def note(words: str, gain: float) -> None:
        found.append(Sensitivity(change=words, step_ms=present * (1 - gain) * samples, gain=gain))

    value_of = _value(one, judge)
    unchanged = value_of(one.choice.cut)
    for words, changed in _changed(one.choice.cut):
        if should_stop():
            return found
        note(words, 1 - value_of(changed) / unchanged)
    if with_more_memory is not None and not should_stop():
        note(f"{format_bytes(GIB)} more per device", 1 - min(present, with_more_memory()) / present)
    return found


def _value(one: Candidate, judge: Judge) -> Callable[[CutModel], float]:
    """What is made small, on other costs of the same cut."""
    if one.is_strict:
        return lambda cut: judge.value(with_cut(one, cut), judge.num_draws)
    times_ms = with_same_decisions(one, judge, _DRAWS)
    return lambda cut: float(judge.objective.of(times_ms(cut)))


def bottleneck(found: list[Sensitivity]) -> str:
    """What gives most."""
    if not found:
        return ""
    best = max(found, key=lambda each: each.gain)
    if best.gain < 0.001:
        return "no single change of a stage, of the links or of memory would make a step shorter"
    return f"{best.change} would give {best.gain:.1%}, more than any other change"


def _changed(cut: CutModel) -> Iterator[tuple[str, CutModel]]:
    stages = range(cut.placement.num_stages)
    present = cut.stage_factors or (1.0,) * len(stages)
    fullest = sorted(stages, key=lambda stage: -cut.stage_work_ms[stage])[:_MOST_STAGES]
    for stage in sorted(fullest):
        factors = tuple(each * (_SHORTER if at == stage else 1.0) for at, each in enumerate(present))
        yield f"stage {stage} 10% faster", replace(cut, stage_factors=factors)
    if len(stages) > 1:
        yield "links 10% faster", replace(cut, costs=replace(cut.costs, links=faster_links(cut.costs.links, _SHORTER)))
