"""Pictures of the report: bars and lines, in colours that all kinds of colour vision tell apart, and in print."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrfp_jax.observe.style import GRID, INK
from rrfp_jax.observe.style import SERIES_COLOURS as _COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vPX"
_STYLES = ("-", "--", "-.", ":")


def draw_bars(groups: Mapping[str, Mapping[str, float]], path: Path, label: str, *, base: float = 1.0) -> str:
    """Draws horizontal bars from ``base`` on, a panel for each group. Returns the Markdown that shows the picture."""
    figure, panels = _figure(len(groups), height=0.42 * max(map(len, groups.values())) + 0.9)
    for panel, (title, values) in zip(panels, groups.items(), strict=True):
        names = list(values)
        places = range(len(names))[::-1]
        widths = [values[name] - base for name in names]
        bars = panel.barh(places, widths, left=base, color=_COLOURS[0], edgecolor=INK, linewidth=0.5)
        panel.bar_label(bars, [f" {values[name]:.3f}" for name in names], fontsize=8)
        panel.set_yticks(places, names, fontsize=8)
        panel.axvline(base, color=INK, linewidth=0.8)
        panel.margins(x=0.18)
        _finish(panel, title, label)
    return _save(figure, path, label)


def draw_ranges(ranges: Mapping[str, tuple[float, float, float]], path: Path, label: str) -> str:
    """Draws a range for each name, and a mark for a published value. Returns the Markdown that shows the picture."""
    figure, (panel,) = _figure(1, height=0.28 * len(ranges) + 0.9)
    places = range(len(ranges))[::-1]
    least, most, mark = zip(*ranges.values(), strict=True)
    widths = [high - low for low, high in zip(least, most, strict=True)]
    panel.barh(places, widths, left=least, height=0.5, color=_COLOURS[5], edgecolor=INK, linewidth=0.5, label="range")
    panel.plot(mark, places, "D", color=_COLOURS[3], markeredgecolor=INK, markersize=5, label="published")
    panel.set_yticks(places, list(ranges), fontsize=7)
    panel.axvline(1.0, color=INK, linewidth=0.8)
    panel.legend(fontsize=7, frameon=False, loc="lower right")
    _finish(panel, "", label)
    return _save(figure, path, label)


def draw_lines(
    panels_of: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    path: Path,
    *,
    across: str,
    up: str,
    ticks: Sequence[float] = (),
    has_own_legends: bool = False,
) -> str:
    """Draws lines with markers, a panel for each group, a line for each method. Returns the Markdown that shows them.

    ``has_own_legends``: the panels show different methods.
    """
    figure, panels = _figure(len(panels_of), height=3.2)
    for panel, (title, lines) in zip(panels, panels_of.items(), strict=True):
        for number, (name, points) in enumerate(lines.items()):
            xs, ys = zip(*points, strict=True)
            panel.plot(
                xs,
                ys,
                color=_COLOURS[number % len(_COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=4,
                linewidth=1.2,
                label=name,
            )
        if ticks:
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
        else:
            panel.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
        panel.set_ylabel(up, fontsize=8)
        _finish(panel, title, across)
    if has_own_legends:
        for panel in panels:
            panel.legend(fontsize=7, frameon=False, loc="best")
    else:
        panels[-1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _save(figure, path, f"{up} over {across}")


def draw_shares(lines: Mapping[str, Sequence[float]], path: Path, across: str, *, marks: Sequence[float]) -> str:
    """Draws for each name the cumulative distribution of its values; ``marks`` are vertical lines."""
    figure, (panel,) = _figure(1, height=3.2)
    for number, (name, values) in enumerate(lines.items()):
        xs = sorted(values)
        shares = [100 * (place + 1) / len(xs) for place in range(len(xs))]
        panel.plot(xs, shares, color=_COLOURS[number], linestyle=_STYLES[number], linewidth=1.6, label=name)
    for mark in marks:
        panel.axvline(mark, color=INK, linewidth=0.8)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("{x:g}")
    panel.tick_params(axis="x", which="minor", labelsize=8)
    panel.set_ylabel("cells at most so fast, %", fontsize=8)
    panel.legend(fontsize=8, frameon=False, loc="lower right")
    _finish(panel, "", across)
    return _save(figure, path, across)


def _figure(number: int, *, height: float) -> tuple[Any, Sequence["Axes"]]:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, number, figsize=(max(5.2 * number, 7.5), height), squeeze=False, layout="constrained"
    )
    return figure, list(panels[0])


def _finish(panel: "Axes", title: str, across: str) -> None:
    panel.set_title(title, fontsize=9, loc="left")
    panel.set_xlabel(across, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.grid(color=GRID, linewidth=0.5)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _save(figure: Any, path: Path, words: str) -> str:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return f"![{words}]({path.parent.name}/{path.name})"
