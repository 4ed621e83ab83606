"""Tables and numbers of the report."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 95%, by degrees of freedom from 1 on; beyond these 2."""


def geometric_mean(ratios: Sequence[float]) -> float:
    """Returns the geometric mean of speed ratios."""
    return math.exp(fmean(map(math.log, ratios)))


def half_interval(ratios: Sequence[float]) -> float:
    """Returns half of the 95% interval of their geometric mean; infinite for a single one."""
    if len(ratios) < 2:
        return math.inf
    degrees = len(ratios) - 1
    t = _T_95[degrees - 1] if degrees <= len(_T_95) else 2.0
    return geometric_mean(ratios) * math.expm1(t * stdev(map(math.log, ratios)) / math.sqrt(len(ratios)))


def interval(ratios: Sequence[float]) -> str:
    """Returns the geometric mean with its 95% interval and the least, ``1.234 +- 0.010 (least 1.198)``."""
    mean = geometric_mean(ratios)
    return f"{mean:.3f}" if len(ratios) < 2 else f"{mean:.3f} ± {half_interval(ratios):.3f} (least {min(ratios):.3f})"


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown, numbers to the right."""
    marks = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, marks, *lines])


def settings_of(names: Sequence[str]) -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    """Returns a function that returns the settings of a row's cell."""
    return lambda row: tuple(row[name] for name in names)
