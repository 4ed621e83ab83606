"""Closed formulas for bubble and peak memory.

Units: the lengths F, I, W of one microbatch on one *whole stage* (all its chunks), in any unit; a full backward B is
I + W. The bubble is the idle time of the stage with the longest span, between its first start and last end, so that a
parallelogram has none; its rate is bubble / (bubble + m (F + I + W)). Peaks count activations of one microbatch on a
whole stage.

Every formula says for which sizes and lengths it holds. *Published* ones are the papers', as we know them; *ours* are
read off the ideal tables that this package generates, and tested against them. Where both exist they may disagree: that
is a finding, see experiments/paper/schedules.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from rrfp_jax.schedules.published import eager_windows, gis_group_size
from rrfp_jax.schedules.registry import build_schedule, schedule_entry
from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.slots import SlotLengths, execute, per_stage


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The variables of the formulas, in the letters of the papers."""

    p: int
    """Number of stages."""
    m: int
    """Number of microbatches."""
    v: int
    """Number of chunks per stage."""
    f: float
    i: float
    w: float
    """F, I and W of one microbatch on a whole stage."""
    windows: tuple[int, ...] = ()
    """Windows of eager 1F1B, per stage."""
    g: int = 0
    """Number of microbatches in a group of GIS."""
    n: int = 1
    """Number of slices of a sequence."""

    @classmethod
    def of(cls, name: str, request: ScheduleRequest, lengths: SlotLengths) -> "Sizes":
        """Returns the sizes of a request for a schedule; ``lengths`` are those of a whole stage.

        Raises ValueError where the schedule cannot have its chunks or groups.
        """
        return cls(
            p=request.num_stages,
            m=request.num_microbatches,
            v=schedule_entry(name).chunks_for(request),
            n=schedule_entry(name).slices_for(request),
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
        """The work of a stage in a step."""
        return self.m * (self.f + self.b)

    @property
    def fill(self) -> float:
        """The time that a pipeline with one chunk per stage takes to fill and to drain."""
        return (self.p - 1) * (self.f + self.b)

    @property
    def split_fill(self) -> float:
        """The time to fill and to drain with v chunks per stage, without the W."""
        return (self.p - 1) * (self.f + self.i) / self.v

    @property
    def is_equal(self) -> bool:
        return self.f == self.i == self.w


class Condition(NamedTuple):
    """The sizes and lengths for which a formula holds, in words and as a test."""

    text: str
    holds: Callable[[Sizes], bool]


_ALWAYS = Condition("always", lambda _: True)


@dataclass(frozen=True)
class BubbleFormula:
    """Idle time per stage, in the unit of the lengths."""

    schedule: str
    text: str
    bubble: Callable[[Sizes], float]
    where: Condition = _ALWAYS
    published: bool = True
    """Whether the formula is the paper's; else it is ours, read off the ideal tables."""

    def rate(self, sizes: Sizes) -> float | None:
        """Returns the bubble rate; None where the formula does not hold."""
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
    """The peak as a function of the sizes and the stage."""
    where: Condition = _ALWAYS


def _long(text: str, *, least: int = 0) -> Condition:
    """Returns the condition of equal lengths, a steady state, and more than ``least`` stages."""
    return Condition(text, lambda s: s.is_equal and s.m >= 2 * s.p and s.p > least)


def _gis_wait(s: Sizes) -> float:
    """Returns the time that all changes of chunk wait beyond the wait of groups of p."""
    longest = max((s.p - s.g) * s.f, s.p * (s.f + s.i) - s.g * (s.f + s.b))
    return 0.0 if s.g == s.p else (s.v - 1) / s.v * longest


def _windows_shrink(s: Sizes) -> bool:
    enough = all(w >= min(s.m, s.p - stage) for stage, w in enumerate(s.windows))
    return enough and all(w > after or w >= s.m for w, after in pairwise(s.windows))


def _looped_slices_peak(s: Sizes, stage: int) -> float:
    later = (s.p - 1 - stage) / (s.n * s.v)
    return min(s.m, 1 + later if s.v == 1 else 1 + 2 * later)


def _interleaved_peak(s: Sizes, stage: int) -> float:
    return min(s.m, (2 * (s.p - 1 - stage) + (s.v - 1) * s.p + 1) / s.v)


_FULL = Condition("m >= p", lambda s: s.m >= s.p)
_LARGEST_STAGE = Condition("m >= 2p, largest stage", lambda s: s.m >= 2 * s.p)
_SMALL_W = Condition("m >= p, W <= F, W <= I", lambda s: s.m >= s.p and s.w <= min(s.f, s.i))
_SMALL_W_LONG = Condition("m >= 2p-1, W <= F, W <= I", lambda s: s.m >= 2 * s.p - 1 and s.w <= min(s.f, s.i))
_SHRINKING = Condition("window of stage s at least p-s, and larger than that of stage s+1 (or m)", _windows_shrink)
_SMALL_GROUPS = Condition(
    "F = I = W; or g = p/2, F-I <= W <= I", lambda s: s.is_equal or (2 * s.g == s.p and s.f - s.i <= s.w <= s.i)
)
_NONE_LONG = Condition(
    "none of F, I and W longer than the others together, or g = p",
    lambda s: s.g == s.p or 2 * max(s.f, s.i, s.w) <= s.f + s.b,
)
_ALIKE = Condition("m >= 2p, the overlapped pair as long as its parts", lambda s: s.m >= 2 * s.p)
_DESCENDING = Condition("m >= 2p, W <= I <= F", lambda s: s.m >= 2 * s.p and s.w <= s.i <= s.f)
_DOUBLE = Condition("B = 2F, m = p", lambda s: s.b == 2 * s.f and s.m == s.p)
_NO_DOUBLING = _DOUBLE._replace(text="B = 2F, m = p (more microbatches need forward doubling)")
_SAME = Condition("B = F, p divides m", lambda s: s.f == s.b and s.m % s.p == 0)
_LONGER = Condition("B >= F, p divides m", lambda s: s.b >= s.f and s.m % s.p == 0)
_ONE_UNIT = Condition("B >= F, m = p; or B = F, p divides m", lambda s: _SAME.holds(s) or (s.b >= s.f and s.m == s.p))
_HALF = _long("F = I = W, large p and m (an approximation: half of 1F1B's)")
_TWO_THIRDS = _long("F = I = W, large p and m (an approximation: two thirds of 1F1B's)")
_STEADY = Condition("F = I = W, m >= 2p-1", lambda s: s.is_equal and s.m >= 2 * s.p - 1)

_ROUND = Condition("n >= p, or v = 1", lambda s: s.n >= s.p or s.v == 1)

_Rows = tuple[tuple[str, str, Callable[[Sizes], float], Condition], ...]
"""Schedule, text, bubble, and the condition under which the formula holds."""
_PUBLISHED: _Rows = (
    ("gpipe", "(p-1)(F+I+W)", lambda s: s.fill, _ALWAYS),
    ("1f1b", "(p-1)(F+I+W)", lambda s: s.fill, _ALWAYS),
    ("eager-1f1b", "(p-1)(F+I+W)", lambda s: s.fill, _SHRINKING),
    ("interleaved-1f1b", "(p-1)(F+I+W)/v", lambda s: s.fill / s.v, Condition("v > 1", lambda s: s.v > 1)),
    ("gis", "(p-1)(F+I)/v", lambda s: s.split_fill, Condition("g = p", lambda s: s.g == s.p)),
    (
        "gis",
        "((p-1)(F+I) + (v-1)(p-g)(F+I-W))/v",
        lambda s: s.split_fill + (s.v - 1) * (s.p - s.g) * (s.f + s.i - s.w) / s.v,
        _SMALL_GROUPS,
    ),
    ("breadth-first", "(p-1)(F+I+W)/v", lambda s: s.fill / s.v, _FULL),
    ("zb-h1", "(p-1)(F+I-W)", lambda s: (s.p - 1) * (s.f + s.i - s.w), _SMALL_W),
    ("zb-h2", "(p-1) max(0, F+I-2W)", lambda s: (s.p - 1) * max(0.0, s.f + s.i - 2 * s.w), _SMALL_W_LONG),
    ("zb-v", "0", lambda _: 0.0, _STEADY),
    ("v-half", "(p-1)(F+I+W)/2", lambda s: s.fill / 2, _HALF),
    ("v-min", "2(p-1)(F+I+W)/3", lambda s: 2 * s.fill / 3, _TWO_THIRDS),
    ("dualpipe-v", "(p-1)(F+2I-W)/2", lambda s: (s.p - 1) * (s.f + 2 * s.i - s.w) / 2, _ALIKE),
    ("chimera", "(p-2)/(2m+p-2) of the time", lambda s: (s.p - 2) * s.f, _SAME),
    ("chimera", "(p-2)/(3m/2+p-2) of the time", lambda s: 2 * (s.p - 2) * s.f, _NO_DOUBLING),
    ("bitpipe", "(p-2)/(4m+p-2) of the time", lambda s: (s.p - 2) * s.f / 2, _SAME),
    ("bitpipe", "(p-2)/(3m+p-2) of the time", lambda s: (s.p - 2) * s.f, _DOUBLE),
    (
        "hanayo",
        "(2p-2)/(3pW+p-1) of the time, W = v/2 waves",
        lambda s: s.work * (2 * s.p - 2) / (3 * s.p * s.v / 2 - (s.p - 1)),
        _DOUBLE,
    ),
)
_OURS: _Rows = (
    (
        "1f1b-split",
        "(p-1)(F+I), the least for a last stage that holds one microbatch",
        lambda s: (s.p - 1) * (s.f + s.i),
        _ALWAYS,
    ),
    (
        "gis",
        "((p-1)(F+I) + (v-1) max((p-g)F, p(F+I) - g(F+I+W)))/v, or (p-1)(F+I)/v with g = p",
        lambda s: s.split_fill + _gis_wait(s),
        _NONE_LONG,
    ),
    (
        "v-half",
        "(3p-7)F/2 for even p > 2, (3p-4)F/2 for odd p > 1",
        lambda s: (3 * s.p - (4 if s.p % 2 else 7)) * s.f / 2,
        _long("F = I = W, m >= 2p, p > 2", least=2),
    ),
    (
        "v-min",
        "(4p-5)F/2, or (4p-7)F/2 where 3 divides p",
        lambda s: (4 * s.p - (5 if s.p % 3 else 7)) * s.f / 2,
        _long("F = I = W, m >= 2p, p > 1", least=1),
    ),
    ("dualpipe-v", "(p-1)(F+I-W)/2", lambda s: (s.p - 1) * (s.f + s.i - s.w) / 2, _DESCENDING),
    (
        "chimera",
        "(p-2)(B + (m/p-1)(B-F))",
        lambda s: (s.p - 2) * (s.b + (s.m / s.p - 1) * (s.b - s.f)),
        _LONGER,
    ),
    (
        "bitpipe",
        "(p-2)(B + (m/p-1)(B-F))/2",
        lambda s: (s.p - 2) * (s.b + (s.m / s.p - 1) * (s.b - s.f)) / 2,
        _LONGER,
    ),
    ("hanayo", "2(p-1)B/v", lambda s: 2 * (s.p - 1) * s.b / s.v, _ONE_UNIT),
    ("seq1f1b", "(p-1)(F+I+W)/n, slices that take equally long", lambda s: s.fill / s.n, _ALWAYS),
    ("slimpipe", "(p-1)(F+I+W)/(nv), slices that take equally long", lambda s: s.fill / (s.n * s.v), _ROUND),
)
BUBBLES = tuple(
    BubbleFormula(*row, is_paper) for rows, is_paper in ((_PUBLISHED, True), (_OURS, False)) for row in rows
)
"""All bubble formulas, the papers' first."""

PEAKS = (
    PeakFormula("gpipe", "m", lambda s, _: s.m),
    PeakFormula("1f1b", "min(p-s, m)", lambda s, stage: min(s.p - stage, s.m)),
    PeakFormula("eager-1f1b", "min(window(s), m)", lambda s, stage: min(s.windows[stage], s.m)),
    PeakFormula("interleaved-1f1b", "min(m, (2(p-1-s) + (v-1)p + 1)/v)", _interleaved_peak),
    PeakFormula("1f1b-split", "min(p-s, m)", lambda s, stage: min(s.p - stage, s.m)),
    PeakFormula("interleaved-1f1b-split", "min(m, (2(p-1-s) + (v-1)p + 1)/v)", _interleaved_peak),
    PeakFormula("gis", "min(m, (g(v-1) + p-s)/v)", lambda s, stage: min(s.m, (s.g * (s.v - 1) + s.p - stage) / s.v)),
    PeakFormula("breadth-first", "m", lambda s, _: s.m),
    PeakFormula("zb-h1", "min(p, m)", lambda s, _: min(s.p, s.m)),
    PeakFormula("zb-h2", "min(2p-1, m)", lambda s, _: min(2 * s.p - 1, s.m)),
    PeakFormula("zb-v", "p", lambda s, _: min(s.p, s.m), Condition("m >= 2p-1", lambda s: s.m >= 2 * s.p - 1)),
    PeakFormula("v-half", "(p+2)//2", lambda s, _: (s.p + 2) // 2, _LARGEST_STAGE),
    PeakFormula("v-min", "(p+4)//3", lambda s, _: (s.p + 4) // 3, _LARGEST_STAGE),
    PeakFormula("dualpipe-v", "p + 1/2", lambda s, _: s.p + 0.5, Condition("m > 2p", lambda s: s.m > 2 * s.p)),
    PeakFormula("chimera", "p/2 + 1 + min(s, p-1-s)", lambda s, i: min(s.m, s.p / 2 + 1 + min(i, s.p - 1 - i)), _FULL),
    PeakFormula(
        "bitpipe",
        "(3p+2)/4 + min(s, p-1-s)/2",
        lambda s, i: min(s.m, (3 * s.p + 2) / 4 + min(i, s.p - 1 - i) / 2),
        _FULL,
    ),
    PeakFormula("seq1f1b", "min(m, 1 + (p-1-s)/n)", lambda s, stage: min(s.m, 1 + (s.p - 1 - stage) / s.n)),
    PeakFormula("slimpipe", "min(m, 1 + 2(p-1-s)/(nv)), or as seq1f1b for v = 1", _looped_slices_peak),
    PeakFormula("hanayo", "p - (p-1-s)/v", lambda s, stage: min(s.m, s.p - (s.p - 1 - stage) / s.v), _FULL),
)


def bubble_formulas(name: str) -> tuple[BubbleFormula, ...]:
    """Returns the bubble formulas of a schedule, the paper's first; none for a schedule that is found by search."""
    return tuple(formula for formula in BUBBLES if formula.schedule == name)


def peak_formula(name: str) -> PeakFormula | None:
    """Returns the peak formula of a schedule, if it has one."""
    return next((formula for formula in PEAKS if formula.schedule == name), None)


@dataclass(frozen=True, kw_only=True)
class Levels:
    """One schedule at one size and one set of lengths."""

    schedule: str
    published_rate: float | None
    """The paper's bubble rate; None where the paper has no formula for these sizes and lengths."""
    fitted_rate: float | None
    """The rate by our own closed form of the ideal table."""
    table_rate: float
    """The bubble rate of the ideal table."""
    formula_peak: float | None
    """Activations of the fullest stage by formula, in those of one microbatch on a whole stage."""
    table_peak: float
    """Activations of the fullest stage in the table."""


def compare(name: str, request: ScheduleRequest, lengths: SlotLengths) -> Levels:
    """Returns the formulas and the ideal table of a schedule at one size.

    ``lengths`` are those of a whole stage, so that all schedules do the same work; they are also the profile of the
    automatic schedule. Formulas are for chains: where the request brings a graph there are none. Raises
    ValueError where these sizes do not fit the schedule.
    """
    profile = (lengths.forward, lengths.input_gradient, lengths.weight_gradient)
    request = replace(request, durations_ms=profile)
    sizes = Sizes.of(name, request, lengths)
    table = build_schedule(name, request)
    cut = schedule_entry(name).chunk_parts
    parts = cut(request.num_stages) if cut else ()
    is_chain = request.graph is None
    peak = peak_formula(name) if is_chain else None
    return Levels(
        schedule=name,
        published_rate=_rate(name, sizes, published=True) if is_chain else None,
        fitted_rate=_rate(name, sizes, published=False) if is_chain else None,
        table_rate=execute(table, per_stage(table, lengths, parts)).timeline.bubble_fraction(),
        formula_peak=None if peak is None else max(peak.peak(sizes, stage) for stage in range(sizes.p)),
        table_peak=max(table.peak_activations(parts)),
    )


def _rate(name: str, sizes: Sizes, *, published: bool) -> float | None:
    rates = (formula.rate(sizes) for formula in bubble_formulas(name) if formula.published is published)
    return next((rate for rate in rates if rate is not None), None)
