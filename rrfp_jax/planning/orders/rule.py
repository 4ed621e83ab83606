"""Rules that rank tasks.

``T`` is the time of a microbatch on the fullest stage, ``head`` the time of a task on the way of its microbatch when
nothing holds it up. A rule's key is ``T m + head(task)``, as microbatches follow each other in the building blocks of
controllable memory (arXiv 2405.15362), with changes: backwards come earlier by a part of the way forth, as in 1F1B,
which prefers them; W come later by some T, as in the zero-bubble schedules (arXiv 2401.10241); F of deeper chunks come
earlier; microbatches follow in groups, as in interleaved 1F1B (arXiv 2104.04473). A chunk may be given a window in
proportion to the time for which it holds a microbatch at least; and a stage waits for better tasks with some patience.
"""

from dataclasses import dataclass, fields
from math import inf

import numpy as np

from rrfp_jax.planning.orders.dispatch import Keys, Manner
from rrfp_jax.planning.orders.problem import Problem
from rrfp_jax.planning.orders.windows import Share, windows


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A way to rank tasks, and to run the ranking."""

    lag: float = 4.0
    """W come so many periods after their I; infinite: they only fill."""
    share: Share | None = None
    """How the room is shared out to the chunks of a stage; None: first come, first served."""
    patience: float = 0.0
    pull: float = 0.5
    """Backwards come earlier by so many parts of the way forth."""
    keeps_reserve: bool = True
    group: int = 1
    """Microbatches that follow each other closely."""
    deepen: float = 0.0
    """F come earlier by so many parts of their head."""

    @property
    def words(self) -> str:
        """For people, what differs from the plainest rule."""
        plain = Rule()
        told = [
            f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return "rule" + (" with " if told else "") + ", ".join(told)


def manner(problem: Problem, rule: Rule) -> Manner:
    """How the ranking of a rule is run."""
    return Manner(rule.patience, rule.keeps_reserve, windows(problem, rule.share))


def keys(problem: Problem, rule: Rule) -> Keys:
    """The keys of a rule, in nanoseconds."""
    ways, m = problem.num_ways, problem.num_microbatches
    head, period = problem.heads, problem.period
    microbatch = np.arange(problem.num_tasks) % m
    close = microbatch % rule.group
    found = head + period * (microbatch - close + close * problem.num_stages / problem.num_chunks)
    found[:ways] -= rule.deepen * head[:ways]
    found[ways : 2 * ways] -= rule.pull * head[ways : 2 * ways].min()
    if problem.is_split:
        found[2 * ways :] += found.max() if rule.lag == inf else rule.lag * period
    return found
