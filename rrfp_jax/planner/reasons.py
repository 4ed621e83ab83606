"""The reason why one choice lost to another, in a sentence with the figures of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.layer_costs import NONE
from rrfp_jax.planner.candidates import PlanCandidate, TriedTable
from rrfp_jax.planner.judging import Judge
from rrfp_jax.planner.search_space import SearchSpace
from rrfp_jax.planner.step_times import once_per_step_ms

_WORDS = {
    "work": "work: an average stage works {0:.4g} ms, {1:.4g} ms in the one before",
    "recomputed": "recomputation: it takes {0:.4g} ms of each stage, {1:.4g} ms in the one before",
    "once": "sums of gradients and updates: they take {0:.4g} ms, {1:.4g} ms in the one before",
    "imbalance": "imbalance of the cut: the fullest stage works {0:.4g} ms more than an average one, {1:.4g} ms in the "
    "one before",
    "communication": "communication: messages make the step {0:.4g} ms longer, {1:.4g} ms in the one before",
    "bubble": "bubble: stages fill, drain and wait for {0:.4g} ms, {1:.4g} ms in the one before",
    "noise": "variability: it makes the step {0:.4g} ms longer, {1:.4g} ms in the one before",
}
"""A sentence for each part of a step."""


def step_parts_ms(one: PlanCandidate, book: CostBook, judge: Judge, num_draws: int) -> dict[str, float]:
    """Returns the milliseconds of the parts of a step, which add up to the mean by which it was compared.

    ``work`` is that of an average stage without ``recomputed``; ``once`` are sums of gradients and updates where they
    take longest; ``imbalance`` is the work of the fullest stage beyond an average one; ``communication`` is how much
    shorter the step would be if messages took no time; ``bubble`` is the rest of a step without noise; and ``noise`` is
    how much longer steps with noise are.
    """
    cut, nominal_ms = one.choice.cut, judge.nominal_ms(one)
    works = cut.stage_work_ms
    host_ms = cut.costs.task_ms * cut.num_microbatches * (3 if cut.split else 2)
    average = sum(works) / len(works) + host_ms * cut.placement.num_chunks / len(works)
    once = max(r + u for r, u in zip(*once_per_step_ms(cut), strict=True))
    recomputed = _recomputed_ms(one, book)
    silent = judge.nominal_ms(replace(one, choice=replace(one.choice, cut=_without_links(cut))))
    imbalance = max(works) - sum(works) / len(works)
    return {
        "work": average - recomputed,
        "recomputed": recomputed,
        "once": once,
        "imbalance": imbalance,
        "communication": nominal_ms - silent,
        "bubble": silent - average - once - imbalance,
        "noise": float(judge.draws_ms(one, num_draws).mean()) - nominal_ms,
    }


def _without_links(cut: CutModel) -> CutModel:
    links = replace(cut.costs.links, latency_ms=0.0, gb_per_s=None, control_ms=0.0)
    # Sums of gradients stay as they are: they have a part of their own.
    rate = cut.costs.links.replicas_gb_per_s or cut.costs.links.gb_per_s
    return replace(cut, costs=replace(cut.costs, links=replace(links, replicas_gb_per_s=rate)))


def _recomputed_ms(one: PlanCandidate, book: CostBook) -> float:
    """Returns the milliseconds of an average stage beyond those of the same layers without rematerialisation."""
    shape, cut = one.choice.shape, one.choice.cut
    if shape.remat == NONE:
        return 0.0
    try:
        plain = book.at(microbatch_size=shape.microbatch_size, tensor=shape.tensor)
    except ValueError:  # nothing is known of them
        return 0.0
    return max(0.0, (sum(cut.stage_work_ms) - sum(replace(cut, costs=plain).stage_work_ms)) / shape.num_stages)


@dataclass
class Reasons:
    """Finds the sentences for the candidates of a search."""

    book: CostBook
    space: SearchSpace
    judge: Judge
    memory_bytes: int | None
    tables: Sequence[TriedTable]
    num_draws: int
    """The least number of draws by which choices are compared."""
    _known: dict[int, dict[str, float]] = field(default_factory=dict)

    def why_lost(self, before: PlanCandidate, one: PlanCandidate) -> str:
        """Returns the largest advantage of the candidate before, in words."""
        number = max(self.num_draws, min(self.judge.num_known(before), self.judge.num_known(one)))
        longer, error = self.judge.difference(before, one, number)
        if longer <= error:
            return "equal: no difference" + ("" if self.judge.noise.is_none else " beyond the noise")
        # Steps may have different numbers of samples: the parts of both are those of as many as the loser has.
        ahead, behind = self._parts_ms(before), self._parts_ms(one)
        times = one.choice.shape.batch_size / before.choice.shape.batch_size
        name = max(behind, key=lambda part: behind[part] - ahead[part] * times)
        told = _WORDS[name].format(behind[name], ahead[name] * times)
        return told + (self._for_lack_of_memory(before, one) if name in ("bubble", "noise") else "")

    def _parts_ms(self, one: PlanCandidate) -> dict[str, float]:
        if id(one) not in self._known:
            self._known[id(one)] = step_parts_ms(one, self.book, self.judge, self.num_draws)
        return self._known[id(one)]

    def _for_lack_of_memory(self, before: PlanCandidate, one: PlanCandidate) -> str:
        """Returns the quickest table on this cut that would be ahead, if memory sufficed for it."""
        if self.memory_bytes is None:
            return ""
        cut, limit = one.choice.cut, self.judge.value(before, self.num_draws)
        ahead = [table for table in self.tables if table.cut is cut and table.value < limit]
        for table in sorted(ahead, key=lambda table: table.value):
            needed = table.least_bytes(self.space)
            if needed is not None and needed > self.memory_bytes:
                return (
                    f"; for lack of memory: {table.table.name} would take "
                    f"{table.value * one.choice.shape.batch_size:.4g} ms, and needs {format_bytes(needed)} of "
                    f"{format_bytes(self.memory_bytes)}"
                )
        return ""
