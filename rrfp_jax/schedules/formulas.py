"""Closed formulas for bubble and peak memory.

Units: the lengths F, I, W of one microbatch on one *whole stage* (all its chunks), in any unit; a full backward B is
I + W. The bubble is the idle time of the stage with the longest span, between its first start and last end, so that a
parallelogram has none; its rate is bubble / (bubble + m (F + I + W)). Peaks count activations of one microbatch on a
whole stage.

Every formula says for which sizes and lengths it holds. *Published* ones are the papers', as we know them; *ours* are
read off the ideal tables that this package generates, and tested against them. Where both exist they may disagree: that
is a finding, see docs/schedules.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from rrfp_jax.schedules.one_f_one_b import eager_windows
from rrfp_jax.schedules.registry import ScheduleRequest, chunks_per_stage
from rrfp_jax.schedules.slots import SlotLengths


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What formulas are about, in the letters of the papers."""

    p: int
    """Stages."""
    m: int
    """Microbatches."""
    v: int
    """Chunks per stage."""
    f: float
    i: float
    w: float
    """F, I and W of one microbatch on a whole stage."""
    windows: tuple[int, ...] = ()
    """Of eager 1F1B, per stage."""

    @classmethod
    def of(cls, name: str, request: ScheduleRequest, lengths: SlotLengths) -> "Sizes":
        """The sizes of a request for a schedule; ``lengths`` are those of a whole stage."""
        return cls(
            p=request.num_stages,
            m=request.num_microbatches,
            v=chunks_per_stage(name, request),
            f=lengths.forward,
            i=lengths.input_gradient,
            w=lengths.weight_gradient,
            windows=eager_windows(request.num_stages, request.window),
        )

    @property
    def b(self) -> float:
        return self.i + self.w

    @property
    def work(self) -> float:
        """Of a stage in a step."""
        return self.m * (self.f + self.b)


@dataclass(frozen=True, kw_only=True)
class BubbleFormula:
    """Idle time per stage, in the unit of the lengths."""

    schedule: str
    text: str
    bubble: Callable[[Sizes], float]
    published: bool
    """Whether it is the paper's; else ours, read off the ideal tables."""
    holds: Callable[[Sizes], bool]
    validity: str

    def rate(self, sizes: Sizes) -> float | None:
        """The bubble rate; None where the formula does not hold."""
        if not self.holds(sizes):
            return None
        bubble = self.bubble(sizes)
        return bubble / (bubble + sizes.work)


@dataclass(frozen=True, kw_only=True)
class PeakFormula:
    """Activations of a stage at its peak: exact where ``holds``, an upper bound always."""

    schedule: str
    text: str
    peak: Callable[[Sizes, int], float]
    holds: Callable[[Sizes], bool]
    validity: str


def _equal(s: Sizes) -> bool:
    return s.f == s.i == s.w


def _formula(
    schedule: str,
    text: str,
    bubble: Callable[[Sizes], float],
    holds: Callable[[Sizes], bool] = lambda _: True,
    validity: str = "always",
    *,
    published: bool = True,
) -> BubbleFormula:
    return BubbleFormula(
        schedule=schedule, text=text, bubble=bubble, published=published, holds=holds, validity=validity
    )


BUBBLES: tuple[BubbleFormula, ...] = (
    _formula("gpipe", "(p-1)(F+I+W)", lambda s: (s.p - 1) * (s.f + s.b)),
    _formula("1f1b", "(p-1)(F+I+W)", lambda s: (s.p - 1) * (s.f + s.b)),
    _formula(
        "eager-1f1b",
        "(p-1)(F+I+W)",
        lambda s: (s.p - 1) * (s.f + s.b),
        lambda s: (
            all(w >= min(s.m, s.p - stage) for stage, w in enumerate(s.windows))
            and all(w > after or w >= s.m for w, after in pairwise(s.windows))
        ),
        "window of stage s at least p-s, and larger than that of stage s+1 (or m)",
    ),
    _formula("interleaved-1f1b", "(p-1)(F+I+W)/v", lambda s: (s.p - 1) * (s.f + s.b) / s.v, lambda s: s.v > 1, "v > 1"),
    _formula(
        "breadth-first", "(p-1)(F+I+W)/v", lambda s: (s.p - 1) * (s.f + s.b) / s.v, lambda s: s.m >= s.p, "m >= p"
    ),
    _formula(
        "zb-h1",
        "(p-1)(F+I-W)",
        lambda s: (s.p - 1) * (s.f + s.i - s.w),
        lambda s: s.m >= s.p and s.w <= min(s.f, s.i),
        "m >= p, W <= F, W <= I",
    ),
    _formula(
        "zb-h2",
        "(p-1) max(0, F+I-2W)",
        lambda s: (s.p - 1) * max(0.0, s.f + s.i - 2 * s.w),
        lambda s: s.m >= 2 * s.p - 1 and s.w <= min(s.f, s.i),
        "m >= 2p-1, W <= F, W <= I",
    ),
    _formula("zb-v", "0", lambda _: 0.0, lambda s: _equal(s) and s.m >= 2 * s.p - 1, "F = I = W, m >= 2p-1"),
    _formula(
        "v-half",
        "(p-1)(F+I+W)/2",
        lambda s: (s.p - 1) * (s.f + s.b) / 2,
        lambda s: _equal(s) and s.m >= 2 * s.p,
        "F = I = W, large p and m (an approximation: half of 1F1B's)",
    ),
    _formula(
        "v-half",
        "(3p-7)F/2 for even p > 2, (3p-4)F/2 for odd p > 1",
        lambda s: (3 * s.p - (4 if s.p % 2 else 7)) * s.f / 2,
        lambda s: _equal(s) and s.m >= 2 * s.p and s.p > 2,
        "F = I = W, m >= 2p, p > 2",
        published=False,
    ),
    _formula(
        "v-min",
        "2(p-1)(F+I+W)/3",
        lambda s: 2 * (s.p - 1) * (s.f + s.b) / 3,
        lambda s: _equal(s) and s.m >= 2 * s.p,
        "F = I = W, large p and m (an approximation: two thirds of 1F1B's)",
    ),
    _formula(
        "v-min",
        "(4p-5)F/2, or (4p-7)F/2 where 3 divides p",
        lambda s: (4 * s.p - (5 if s.p % 3 else 7)) * s.f / 2,
        lambda s: _equal(s) and s.m >= 2 * s.p and s.p > 1,
        "F = I = W, m >= 2p, p > 1",
        published=False,
    ),
    _formula(
        "dualpipe-v",
        "(p-1)(F+2I-W)/2",
        lambda s: (s.p - 1) * (s.f + 2 * s.i - s.w) / 2,
        lambda s: s.m >= 2 * s.p,
        "m >= 2p, the overlapped pair as long as its parts",
    ),
    _formula(
        "dualpipe-v",
        "(p-1)(F+I-W)/2",
        lambda s: (s.p - 1) * (s.f + s.i - s.w) / 2,
        lambda s: s.m >= 2 * s.p and s.w <= s.i <= s.f,
        "m >= 2p, W <= I <= F",
        published=False,
    ),
    _formula(
        "chimera",
        "(p-2)/(2m+p-2) of the time",
        lambda s: (s.p - 2) * s.f,
        lambda s: s.f == s.b and s.m % s.p == 0,
        "B = F, p divides m",
    ),
    _formula(
        "chimera",
        "(p-2)/(3m/2+p-2) of the time",
        lambda s: 2 * (s.p - 2) * s.f,
        lambda s: s.b == 2 * s.f and s.m == s.p,
        "B = 2F, m = p (more microbatches need forward doubling)",
    ),
    _formula(
        "chimera",
        "(p-2)(B + (m/p-1)(B-F))",
        lambda s: (s.p - 2) * (s.b + (s.m / s.p - 1) * (s.b - s.f)),
        lambda s: s.b >= s.f and s.m % s.p == 0,
        "B >= F, p divides m",
        published=False,
    ),
    _formula(
        "hanayo",
        "(2p-2)/(3pW+p-1) of the time, W = v/2 waves",
        lambda s: s.work * (2 * s.p - 2) / (3 * s.p * s.v / 2 - (s.p - 1)),
        lambda s: s.b == 2 * s.f and s.m == s.p,
        "B = 2F, m = p",
    ),
    _formula(
        "hanayo",
        "2(p-1)B/v",
        lambda s: 2 * (s.p - 1) * s.b / s.v,
        lambda s: (s.b >= s.f and s.m == s.p) or (s.b == s.f and s.m % s.p == 0),
        "B >= F, m = p; or B = F, p divides m",
        published=False,
    ),
)


def _peak(
    schedule: str,
    text: str,
    peak: Callable[[Sizes, int], float],
    holds: Callable[[Sizes], bool] = lambda _: True,
    validity: str = "always",
) -> PeakFormula:
    return PeakFormula(schedule=schedule, text=text, peak=peak, holds=holds, validity=validity)


PEAKS: tuple[PeakFormula, ...] = (
    _peak("gpipe", "m", lambda s, _: s.m),
    _peak("1f1b", "min(p-s, m)", lambda s, stage: min(s.p - stage, s.m)),
    _peak("eager-1f1b", "min(window(s), m)", lambda s, stage: min(s.windows[stage], s.m)),
    _peak(
        "interleaved-1f1b",
        "min(m, (2(p-1-s) + (v-1)p + 1)/v)",
        lambda s, stage: min(s.m, (2 * (s.p - 1 - stage) + (s.v - 1) * s.p + 1) / s.v),
    ),
    _peak("breadth-first", "m", lambda s, _: s.m),
    _peak("zb-h1", "min(p, m)", lambda s, _: min(s.p, s.m)),
    _peak("zb-h2", "min(2p-1, m)", lambda s, _: min(2 * s.p - 1, s.m)),
    _peak("zb-v", "p", lambda s, _: min(s.p, s.m), lambda s: s.m >= 2 * s.p - 1, "m >= 2p-1"),
    _peak("v-half", "(p+2)//2", lambda s, _: (s.p + 2) // 2, lambda s: s.m >= 2 * s.p, "m >= 2p, largest stage"),
    _peak("v-min", "(p+4)//3", lambda s, _: (s.p + 4) // 3, lambda s: s.m >= 2 * s.p, "m >= 2p, largest stage"),
    _peak("dualpipe-v", "p + 1/2", lambda s, _: s.p + 0.5, lambda s: s.m > 2 * s.p, "m > 2p"),
    _peak(
        "chimera",
        "p/2 + 1 + min(s, p-1-s)",
        lambda s, stage: min(s.m, s.p / 2 + 1 + min(stage, s.p - 1 - stage)),
        lambda s: s.m >= s.p,
        "m >= p",
    ),
    _peak(
        "hanayo",
        "p - (p-1-s)/v",
        lambda s, stage: min(s.m, s.p - (s.p - 1 - stage) / s.v),
        lambda s: s.m >= s.p,
        "m >= p",
    ),
)


def bubble_formulas(name: str) -> tuple[BubbleFormula, ...]:
    """The bubble formulas of a schedule, the paper's first; empty where it is found by search."""
    return tuple(formula for formula in BUBBLES if formula.schedule == name)


def peak_formula(name: str) -> PeakFormula | None:
    """The peak formula of a schedule, if it has one."""
    return next((formula for formula in PEAKS if formula.schedule == name), None)
