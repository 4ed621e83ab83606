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
from typing import NamedTuple

from rrfp_jax.schedules.published.looped import gis_group_size
from rrfp_jax.schedules.published.one_chunk import eager_windows
from rrfp_jax.schedules.registry import chunks_per_stage
from rrfp_jax.schedules.request import ScheduleRequest
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
    g: int = 0
    """Microbatches of a group, for GIS."""

    @classmethod
    def of(cls, name: str, request: ScheduleRequest, lengths: SlotLengths) -> "Sizes":
        """The sizes of a request for a schedule; ``lengths`` are those of a whole stage.

        Raises ValueError where the schedule cannot have its chunks or groups.
        """
        return cls(
            p=request.num_stages,
            m=request.num_microbatches,
            v=chunks_per_stage(name, request),
            f=lengths.forward,
            i=lengths.input_gradient,
            w=lengths.weight_gradient,
            windows=eager_windows(request.num_stages, request.window),
            g=gis_group_size(request.num_stages, request.num_microbatches, request.group_size) if name == "gis" else 0,
        )

    @property
    def b(self) -> float:
        return self.i + self.w

    @property
    def work(self) -> float:
        """Of a stage in a step."""
        return self.m * (self.f + self.b)


class Condition(NamedTuple):
    """For which sizes and lengths a formula holds, in words and as a test."""

    text: str
    holds: Callable[[Sizes], bool]


@dataclass(frozen=True)
class BubbleFormula:
    """Idle time per stage, in the unit of the lengths."""

    schedule: str
    text: str
    bubble: Callable[[Sizes], float]
    where: Condition
    published: bool = True
    """Whether it is the paper's; else ours, read off the ideal tables."""

    def rate(self, sizes: Sizes) -> float | None:
        """The bubble rate; None where the formula does not hold."""
        if not self.where.holds(sizes):
            return None
        bubble = self.bubble(sizes)
        return bubble / (bubble + sizes.work)


@dataclass(frozen=True)
class PeakFormula:
    """Activations of a stage at its peak: exact where it holds, an upper bound always."""

    schedule: str
    text: str
    peak: Callable[[Sizes, int], float]
    where: Condition


def _fill_and_drain(s: Sizes) -> float:
    return (s.p - 1) * (s.f + s.b)


def _equal(s: Sizes) -> bool:
    return s.f == s.i == s.w


def _half_groups(s: Sizes) -> bool:
    return 2 * s.g == s.p and s.f - s.i <= s.w <= s.i


def _interleaved_split_fill(s: Sizes) -> float:
    return (s.p - 1) * (s.f + s.i) / s.v


def _gis_wait(s: Sizes) -> float:
    """Of all changes of chunk together, beyond what groups of p wait."""
    if s.g == s.p:
        return 0.0
    return (s.v - 1) / s.v * max((s.p - s.g) * s.f, s.p * (s.f + s.i) - s.g * (s.f + s.b))


def _interleaved_peak(s: Sizes, stage: int) -> float:
    return min(s.m, (2 * (s.p - 1 - stage) + (s.v - 1) * s.p + 1) / s.v)


_ALWAYS = Condition("always", lambda _: True)
_FULL = Condition("m >= p", lambda s: s.m >= s.p)
_SMALL_W = Condition("m >= p, W <= F, W <= I", lambda s: s.m >= s.p and s.w <= min(s.f, s.i))
_LARGEST_STAGE = Condition("m >= 2p, largest stage", lambda s: s.m >= 2 * s.p)

BUBBLES: tuple[BubbleFormula, ...] = (
    BubbleFormula("gpipe", "(p-1)(F+I+W)", _fill_and_drain, _ALWAYS),
    BubbleFormula("1f1b", "(p-1)(F+I+W)", _fill_and_drain, _ALWAYS),
    BubbleFormula(
        "eager-1f1b",
        "(p-1)(F+I+W)",
        _fill_and_drain,
        Condition(
            "window of stage s at least p-s, and larger than that of stage s+1 (or m)",
            lambda s: (
                all(w >= min(s.m, s.p - stage) for stage, w in enumerate(s.windows))
                and all(w > after or w >= s.m for w, after in pairwise(s.windows))
            ),
        ),
    ),
    BubbleFormula(
        "interleaved-1f1b", "(p-1)(F+I+W)/v", lambda s: _fill_and_drain(s) / s.v, Condition("v > 1", lambda s: s.v > 1)
    ),
    BubbleFormula(
        "1f1b-split",
        "(p-1)(F+I), the least for a last stage that holds one microbatch",
        lambda s: (s.p - 1) * (s.f + s.i),
        _ALWAYS,
        published=False,
    ),
    BubbleFormula("gis", "(p-1)(F+I)/v", _interleaved_split_fill, Condition("g = p", lambda s: s.g == s.p)),
    BubbleFormula(
        "gis",
        "((p-1)(F+I) + (v-1)(p-g)(F+I-W))/v",
        lambda s: _interleaved_split_fill(s) + (s.v - 1) * (s.p - s.g) * (s.f + s.i - s.w) / s.v,
        Condition("F = I = W; or g = p/2, F-I <= W <= I", lambda s: _equal(s) or _half_groups(s)),
    ),
    BubbleFormula(
        "gis",
        "((p-1)(F+I) + (v-1) max((p-g)F, p(F+I) - g(F+I+W)))/v, or (p-1)(F+I)/v with g = p",
        lambda s: _interleaved_split_fill(s) + _gis_wait(s),
        Condition(
            "none of F, I and W longer than the others together, or g = p",
            lambda s: s.g == s.p or 2 * max(s.f, s.i, s.w) <= s.f + s.i + s.w,
        ),
        published=False,
    ),
    BubbleFormula("breadth-first", "(p-1)(F+I+W)/v", lambda s: _fill_and_drain(s) / s.v, _FULL),
    BubbleFormula("zb-h1", "(p-1)(F+I-W)", lambda s: (s.p - 1) * (s.f + s.i - s.w), _SMALL_W),
    BubbleFormula(
        "zb-h2",
        "(p-1) max(0, F+I-2W)",
        lambda s: (s.p - 1) * max(0.0, s.f + s.i - 2 * s.w),
        Condition("m >= 2p-1, W <= F, W <= I", lambda s: s.m >= 2 * s.p - 1 and s.w <= min(s.f, s.i)),
    ),
    BubbleFormula(
        "zb-v", "0", lambda _: 0.0, Condition("F = I = W, m >= 2p-1", lambda s: _equal(s) and s.m >= 2 * s.p - 1)
    ),
    BubbleFormula(
        "v-half",
        "(p-1)(F+I+W)/2",
        lambda s: _fill_and_drain(s) / 2,
        Condition(
            "F = I = W, large p and m (an approximation: half of 1F1B's)", lambda s: _equal(s) and s.m >= 2 * s.p
        ),
    ),
    BubbleFormula(
        "v-half",
        "(3p-7)F/2 for even p > 2, (3p-4)F/2 for odd p > 1",
        lambda s: (3 * s.p - (4 if s.p % 2 else 7)) * s.f / 2,
        Condition("F = I = W, m >= 2p, p > 2", lambda s: _equal(s) and s.m >= 2 * s.p and s.p > 2),
        published=False,
    ),
    BubbleFormula(
        "v-min",
        "2(p-1)(F+I+W)/3",
        lambda s: 2 * _fill_and_drain(s) / 3,
        Condition(
            "F = I = W, large p and m (an approximation: two thirds of 1F1B's)", lambda s: _equal(s) and s.m >= 2 * s.p
        ),
    ),
    BubbleFormula(
        "v-min",
        "(4p-5)F/2, or (4p-7)F/2 where 3 divides p",
        lambda s: (4 * s.p - (5 if s.p % 3 else 7)) * s.f / 2,
        Condition("F = I = W, m >= 2p, p > 1", lambda s: _equal(s) and s.m >= 2 * s.p and s.p > 1),
        published=False,
    ),
    BubbleFormula(
        "dualpipe-v",
        "(p-1)(F+2I-W)/2",
        lambda s: (s.p - 1) * (s.f + 2 * s.i - s.w) / 2,
        Condition("m >= 2p, the overlapped pair as long as its parts", lambda s: s.m >= 2 * s.p),
    ),
    BubbleFormula(
        "dualpipe-v",
        "(p-1)(F+I-W)/2",
        lambda s: (s.p - 1) * (s.f + s.i - s.w) / 2,
        Condition("m >= 2p, W <= I <= F", lambda s: s.m >= 2 * s.p and s.w <= s.i <= s.f),
        published=False,
    ),
    BubbleFormula(
        "chimera",
        "(p-2)/(2m+p-2) of the time",
        lambda s: (s.p - 2) * s.f,
        Condition("B = F, p divides m", lambda s: s.f == s.b and s.m % s.p == 0),
    ),
    BubbleFormula(
        "chimera",
        "(p-2)/(3m/2+p-2) of the time",
        lambda s: 2 * (s.p - 2) * s.f,
        Condition("B = 2F, m = p (more microbatches need forward doubling)", lambda s: s.b == 2 * s.f and s.m == s.p),
    ),
    BubbleFormula(
        "chimera",
        "(p-2)(B + (m/p-1)(B-F))",
        lambda s: (s.p - 2) * (s.b + (s.m / s.p - 1) * (s.b - s.f)),
        Condition("B >= F, p divides m", lambda s: s.b >= s.f and s.m % s.p == 0),
        published=False,
    ),
    BubbleFormula(
        "hanayo",
        "(2p-2)/(3pW+p-1) of the time, W = v/2 waves",
        lambda s: s.work * (2 * s.p - 2) / (3 * s.p * s.v / 2 - (s.p - 1)),
        Condition("B = 2F, m = p", lambda s: s.b == 2 * s.f and s.m == s.p),
    ),
    BubbleFormula(
        "hanayo",
        "2(p-1)B/v",
        lambda s: 2 * (s.p - 1) * s.b / s.v,
        Condition(
            "B >= F, m = p; or B = F, p divides m",
            lambda s: (s.b >= s.f and s.m == s.p) or (s.b == s.f and s.m % s.p == 0),
        ),
        published=False,
    ),
)


PEAKS: tuple[PeakFormula, ...] = (
    PeakFormula("gpipe", "m", lambda s, _: s.m, _ALWAYS),
    PeakFormula("1f1b", "min(p-s, m)", lambda s, stage: min(s.p - stage, s.m), _ALWAYS),
    PeakFormula("eager-1f1b", "min(window(s), m)", lambda s, stage: min(s.windows[stage], s.m), _ALWAYS),
    PeakFormula("interleaved-1f1b", "min(m, (2(p-1-s) + (v-1)p + 1)/v)", _interleaved_peak, _ALWAYS),
    PeakFormula("1f1b-split", "min(p-s, m)", lambda s, stage: min(s.p - stage, s.m), _ALWAYS),
    PeakFormula("interleaved-1f1b-split", "min(m, (2(p-1-s) + (v-1)p + 1)/v)", _interleaved_peak, _ALWAYS),
    PeakFormula(
        "gis", "min(m, (g(v-1) + p-s)/v)", lambda s, stage: min(s.m, (s.g * (s.v - 1) + s.p - stage) / s.v), _ALWAYS
    ),
    PeakFormula("breadth-first", "m", lambda s, _: s.m, _ALWAYS),
    PeakFormula("zb-h1", "min(p, m)", lambda s, _: min(s.p, s.m), _ALWAYS),
    PeakFormula("zb-h2", "min(2p-1, m)", lambda s, _: min(2 * s.p - 1, s.m), _ALWAYS),
    PeakFormula("zb-v", "p", lambda s, _: min(s.p, s.m), Condition("m >= 2p-1", lambda s: s.m >= 2 * s.p - 1)),
    PeakFormula("v-half", "(p+2)//2", lambda s, _: (s.p + 2) // 2, _LARGEST_STAGE),
    PeakFormula("v-min", "(p+4)//3", lambda s, _: (s.p + 4) // 3, _LARGEST_STAGE),
    PeakFormula("dualpipe-v", "p + 1/2", lambda s, _: s.p + 0.5, Condition("m > 2p", lambda s: s.m > 2 * s.p)),
    PeakFormula(
        "chimera",
        "p/2 + 1 + min(s, p-1-s)",
        lambda s, stage: min(s.m, s.p / 2 + 1 + min(stage, s.p - 1 - stage)),
        _FULL,
    ),
    PeakFormula("hanayo", "p - (p-1-s)/v", lambda s, stage: min(s.m, s.p - (s.p - 1 - stage) / s.v), _FULL),
)


def bubble_formulas(name: str) -> tuple[BubbleFormula, ...]:
    """The bubble formulas of a schedule, the paper's first; empty where it is found by search."""
    return tuple(formula for formula in BUBBLES if formula.schedule == name)


def peak_formula(name: str) -> PeakFormula | None:
    """The peak formula of a schedule, if it has one."""
    return next((formula for formula in PEAKS if formula.schedule == name), None)
