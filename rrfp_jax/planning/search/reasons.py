"""Why one choice lost to another, in a sentence with the figures of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.costs import CostBook
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.judging import Judge
from rrfp_jax.planning.search.parts import Parts, largest_first, parts_of
from rrfp_jax.planning.search.tables import TriedTable
from rrfp_jax.planning.search.wishes import Wishes

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


@dataclass(kw_only=True)
class Reasons:
    """What the sentences are made of."""

    book: CostBook
    wishes: Wishes
    judge: Judge
    memory_bytes: int | None
    tables: Sequence[TriedTable]
    num_draws: int
    """By which choices are compared at least."""
    _known: dict[int, Parts] = field(default_factory=dict)

    def why_lost(self, before: Candidate, one: Candidate) -> str:
        """What the one before has that this one lacks."""
        number = max(self.num_draws, min(self.judge.num_known(before), self.judge.num_known(one)))
        longer, error = self.judge.difference(before, one, number)
        if longer <= error:
            return "equal: no difference" + ("" if self.judge.noise.is_none else " beyond the noise")
        samples = one.choice.shape.batch_size
        ahead, behind = (self._parts(each).over(each.choice.shape.batch_size / samples) for each in (before, one))
        name, of_one, of_other = next(largest_first(ahead, behind))
        told = _WORDS[name].format(of_other, of_one)
        return told + (self._for_lack_of_memory(before, one) if name in ("bubble", "noise") else "")

    def _parts(self, one: Candidate) -> Parts:
        if id(one) not in self._known:
            self._known[id(one)] = parts_of(one, self.book, self.judge, self.num_draws)
        return self._known[id(one)]

    def _for_lack_of_memory(self, before: Candidate, one: Candidate) -> str:
        """The quickest table on this cut that would be ahead, if memory had room for it."""
        if self.memory_bytes is None:
            return ""
        cut, limit = one.choice.cut, self.judge.value(before, self.num_draws)
        ahead = [table for table in self.tables if table.cut is cut and table.value < limit]
        for table in sorted(ahead, key=lambda table: table.value):
            needed = table.least_bytes(self.wishes)
            if needed is not None and needed > self.memory_bytes:
                return (
                    f"; for lack of memory: {table.table.name} would take "
                    f"{table.value * one.choice.shape.batch_size:.4g} ms, and needs {format_bytes(needed)} of "
                    f"{format_bytes(self.memory_bytes)}"
                )
        return ""
