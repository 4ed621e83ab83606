"""Ratios of hop to forward at which communication turns a ranking over, so that the schedule behind is ahead.

The ranking is the ideal table's, in which nothing communicates. Two tables run strictly cross between two ratios of the
study; between these their difference is continuous and in pieces linear, and regula falsi finds the crossing in a few
more runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from experiments.systems.cells import Case, CaseResult, Setting, run
from experiments.systems.records import Hop
from rrfp_jax.core import STRICT
from rrfp_jax.simulation import Communication

TIE = 1e-3
"""Fraction below which steps count as equal."""
_PRECISION = 0.005
"""Precision of the ratio."""
_NO_HOP = 1e-6
"""Ratio below which a hop takes no time. A ranking that turns over even there is due to who is occupied by a hop."""
_CROSSED = 1e-5
"""Largest lead that counts as a crossing."""
_MOST_RUNS = 40


class Lead(NamedTuple):
    """Fraction of its own step by which a schedule is faster than another, at a ratio."""

    ratio: float
    lead: float


@dataclass(frozen=True, kw_only=True)
class TurnoverJob:
    """Two schedules of one size that change places between two ratios."""

    ahead: Case
    """Case that is ahead by the ideal table."""
    behind: Case
    communication: Communication
    low: Lead
    high: Lead

    @property
    def size(self) -> int:
        """Estimate of the amount of work."""
        return self.ahead.num_stages * self.ahead.num_microbatches


@dataclass(frozen=True, kw_only=True)
class Turnover:
    """Ratio from which ``behind`` is faster, run strictly, up to the next ratio of the study at least."""

    ahead: Case
    behind: Case
    communication: Communication
    ratio: float


def turnover_jobs(
    results: Sequence[CaseResult], hops: Mapping[int, Sequence[Hop]], communications: Sequence[Communication]
) -> Iterator[TurnoverJob]:
    """Yields the first change of places of every two schedules of one size, where there is one.

    ``hops`` holds the hops of the study, by number of stages.
    """
    fitting = [one for one in results if one.ideal is not None]
    for ahead, behind in permutations(fitting, 2):
        if ahead.case[1:] != behind.case[1:] or not _is_ahead(_ideal_step(ahead), _ideal_step(behind)):
            continue
        for communication in communications:
            bracket = _bracket(ahead, behind, communication, sorted(hops[ahead.case.num_stages]))
            if bracket is not None:
                low, high = bracket
                yield TurnoverJob(ahead=ahead.case, behind=behind.case, communication=communication, low=low, high=high)


def find_turnover(job: TurnoverJob) -> Turnover:
    """Runs both schedules at ratios between, until the crossing is known."""

    def lead(ratio: float) -> float:
        setting = Setting(Hop(ratio, 0.0), job.communication, STRICT)
        return run(job.behind, setting).step / run(job.ahead, setting).step - 1

    ratio = crossing(lead, job.low, job.high)
    return Turnover(ahead=job.ahead, behind=job.behind, communication=job.communication, ratio=ratio)


def crossing(lead: Callable[[float], float], low: Lead, high: Lead) -> float:
    """Returns the ratio at which ``lead``, positive at ``low`` and negative at ``high``, crosses 0; 0 if there is none.

    The search is regula falsi, and bisection where that has narrowed the ratio down too little.
    """
    is_slow, ratio = False, low.ratio
    for _ in range(_MOST_RUNS):
        if high.ratio < _NO_HOP:
            return 0.0
        width = high.ratio - low.ratio
        if width <= _PRECISION * high.ratio:
            break
        ratio = low.ratio + width * (0.5 if is_slow else low.lead / (low.lead - high.lead))
        here = Lead(ratio, lead(ratio))
        if abs(here.lead) <= _CROSSED:
            break
        low, high = (here, high) if here.lead > 0 else (low, here)
        is_slow = high.ratio - low.ratio > width / 2
    return ratio


def _bracket(
    ahead: CaseResult, behind: CaseResult, communication: Communication, hops: Sequence[Hop]
) -> tuple[Lead, Lead] | None:
    """Returns the two neighbouring ratios between which the one that is ahead falls behind."""
    steps = [{setting: done.step for setting, done in one.executed} for one in (ahead, behind)]
    low = Lead(0.0, _ideal_step(behind) / _ideal_step(ahead) - 1)
    for hop in hops:
        first, second = (of_one[Setting(hop, communication, STRICT)] for of_one in steps)
        here = Lead(hop.ratio, second / first - 1)
        if _is_ahead(second, first):
            return low, here
        if here.lead > 0:
            low = here
    return None


def _ideal_step(result: CaseResult) -> float:
    assert result.ideal is not None
    return result.ideal.step


def _is_ahead(step: float, other: float) -> bool:
    return step < other * (1 - TIE)
