"""Where the time of a step goes, so that two choices can be compared in words."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rrfp_jax.costs import CostBook, CutModel, LinkCosts
from rrfp_jax.costs.layer_costs import NONE
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.judging import Judge
from rrfp_jax.planning.search.strict_times import once_per_step_ms


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Milliseconds of a step that add up to what is compared."""

    work: float
    """Of an average stage, without what is computed again."""
    recomputed: float
    once: float
    """Sums of gradients and updates, of the stage where these take longest."""
    imbalance: float
    """How much more the fullest stage works than an average one."""
    communication: float
    """How much shorter the step would be if messages took no time."""
    bubble: float
    """What is left without noise: stages fill, drain and wait."""
    noise: float
    """How much longer steps with noise are."""

    def over(self, samples: float) -> "Parts":
        """The same in milliseconds per so many samples."""
        return Parts(**{name: getattr(self, name) / samples for name in self.__dataclass_fields__})


def parts_of(one: Candidate, book: CostBook, judge: Judge, num_draws: int) -> Parts:
    """By the draws that it was chosen by."""
    cut, nominal_ms = one.choice.cut, judge.nominal_ms(one)
    works = cut.stage_work_ms
    host_ms = cut.costs.task_ms * cut.num_microbatches * (3 if cut.split else 2)
    average = sum(works) / len(works) + host_ms * cut.placement.num_chunks / len(works)
    once = max(r + u for r, u in zip(*once_per_step_ms(cut), strict=True))
    recomputed = _recomputed_ms(one, book)
    silent = judge.nominal_ms(with_cut(one, _without_links(cut)))
    imbalance = max(works) - sum(works) / len(works)
    return Parts(
        work=average - recomputed,
        recomputed=recomputed,
        once=once,
        imbalance=imbalance,
        communication=nominal_ms - silent,
        bubble=silent - average - once - imbalance,
        noise=judge.times(one, num_draws).value(judge.objective) - nominal_ms,
    )


def with_cut(one: Candidate, cut: CutModel) -> Candidate:
    """The same order on other costs."""
    return replace(one, choice=replace(one.choice, cut=cut))


def _without_links(cut: CutModel) -> CutModel:
    links = replace(cut.costs.links, latency_ms=0.0, gb_per_s=None, control_ms=0.0)
    rate = cut.costs.links.replicas_gb_per_s or cut.costs.links.gb_per_s
    return replace(cut, costs=replace(cut.costs, links=replace(links, replicas_gb_per_s=rate)))


def _recomputed_ms(one: Candidate, book: CostBook) -> float:
    """Of an average stage: what the same layers take more than without rematerialisation, where that is known."""
    shape, cut = one.choice.shape, one.choice.cut
    if shape.remat == NONE:
        return 0.0
    try:
        plain = book.at(microbatch_size=shape.microbatch_size, tensor=shape.tensor)
    except ValueError:
        return 0.0
    return max(0.0, (sum(cut.stage_work_ms) - sum(replace(cut, costs=plain).stage_work_ms)) / shape.num_stages)


def faster_links(links: LinkCosts, factor: float) -> LinkCosts:
    """Links that take so many times as long."""
    return replace(
        links,
        latency_ms=links.latency_ms * factor,
        control_ms=links.control_ms * factor,
        gb_per_s=None if links.gb_per_s is None else links.gb_per_s / factor,
        replicas_gb_per_s=None if links.replicas_gb_per_s is None else links.replicas_gb_per_s / factor,
    )


def largest_first(one: Parts, other: Parts) -> Iterator[tuple[str, float, float]]:
    """By name, what both take of each part, where the other loses most first."""
    names = sorted(one.__dataclass_fields__, key=lambda name: getattr(one, name) - getattr(other, name))
    yield from ((name, getattr(one, name), getattr(other, name)) for name in names)
