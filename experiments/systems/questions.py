"""Questions to a study over systems, and the lines that answer each in a picture.

A question about schedules that do not take part, or with a single ratio, has no picture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.systems.cells import FORESIGHT, Case
from experiments.systems.results import Study, distinct_hops
from rrfp_jax.core import STRICT
from rrfp_jax.simulation import Communication

PAIRS = (("hanayo:4", "chimera"), ("hanayo", "chimera"), ("1f1b", "gpipe"), ("greedy-chimera", "gpipe"))
"""Pairs of a schedule and the one that it is compared with."""
_CONCURRENT = ("chimera", "greedy-chimera", "asymmetric-chimera")
_LEVELS = ("formula", "table")
RATIO = "time of a hop / time of a stage's forward"
MICROBATCHES = "microbatches"


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points in the order of their x."""

    label: str
    points: tuple[tuple[float, float], ...]
    style: int
    """Number of the colour and marker."""
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Panel with lines on common axes."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question that one picture of rows of panels answers."""

    name: str
    """Name of the picture's file."""
    text: str
    across: str
    """Axis across: :data:`RATIO` or :data:`MICROBATCHES`."""
    up: str
    panels: tuple[tuple[Panel, ...], ...]
    is_wide: bool = False
    """Whether the values span orders of magnitude."""
    before: tuple[str, ...] = ()
    """Labels that stand left of all ratios; their points have the ratios of :func:`place_before`."""


def place_before(ratios: Sequence[float], number: int) -> list[float]:
    """Returns the places left of all ratios for so many points that have no ratio."""
    return [min(ratios) / 10.0**distance for distance in range(number, 0, -1)]


def questions(study: Study) -> Iterator[Question]:
    """Yields the questions that this study can answer."""
    if len(distinct_hops(study.wishes.systems, study.wishes.stages[0])) > 1:
        yield from _pairs(study)
        yield _ranking(study)
        if len(study.wishes.orders) > 1:
            yield from (_orders(study, mode) for mode in study.wishes.communications)
    if len(study.wishes.microbatches) > 1:
        yield from _concurrent(study)


def few(values: Sequence[int]) -> list[int]:
    """Returns the least, a middle and the largest value."""
    return sorted({values[0], values[len(values) // 2], values[-1]})


def _ranking(study: Study) -> Question:
    first, num_stages = study.wishes.entries[0], max(study.wishes.stages)
    return Question(
        name="ranking",
        text=f"Where does communication turn the ranking over? {num_stages} stages, tables run strictly",
        across=RATIO,
        up=f"faster than {first.label} by, %",
        panels=tuple(
            tuple(
                Panel(
                    title=f"{num_microbatches} microbatches, {mode.value}",
                    lines=tuple(_lines_of_levels(study, num_stages, num_microbatches, mode)),
                )
                for num_microbatches in few(study.wishes.microbatches)
            )
            for mode in study.wishes.communications
        ),
        before=_LEVELS,
    )


def _lines_of_levels(study: Study, num_stages: int, num_microbatches: int, mode: Communication) -> Iterator[Line]:
    """Yields the lines by formula, in the ideal table, and executed."""
    size = (num_stages, num_microbatches)
    first = Case(study.wishes.entries[0], *size)
    reference = study.ideals.get(first)
    places = place_before([hop.ratio for hop in distinct_hops(study.wishes.systems, num_stages)], len(_LEVELS))
    for style, entry in enumerate(study.wishes.entries):
        case = Case(entry, *size)
        ideal, points = study.ideals.get(case), []
        if ideal is not None and reference is not None:
            others, mine = (one.step_by_formula(num_microbatches) for one in (reference, ideal))
            if mine is not None and others is not None:
                points.append((places[0], 100 * (others / mine - 1)))
            points.append((places[1], 100 * (reference.step / ideal.step - 1)))
        executed = _over_ratios(study, case, STRICT, first, mode)
        yield Line(label=entry.label, points=(*points, *executed), style=style)


def _pairs(study: Study) -> Iterator[Question]:
    wanted = (
        ("hanayo-chimera", "Is Hanayo faster than Chimera?", list(PAIRS[:2])),
        ("1f1b-gpipe", "Do 1F1B and GPipe take the same time?", list(PAIRS[2:3])),
    )
    for name, text, pairs in wanted:
        found = [pair for pair in pairs if any(study.cases_of(pair, *size) for size in study.sizes)]
        if found:
            yield Question(
                name=name,
                text=f"{text} Tables run strictly",
                across=RATIO,
                up="faster by, %",
                panels=tuple(
                    tuple(
                        Panel(
                            title=f"{pair[0]} over {pair[1]}, {p} stages, {mode.value}",
                            lines=tuple(_lines_of_pair(study, pair, p, mode)),
                        )
                        for p in study.wishes.stages
                        for mode in study.wishes.communications
                    )
                    for pair in found
                ),
            )


def _lines_of_pair(study: Study, pair: Sequence[str], num_stages: int, mode: Communication) -> Iterator[Line]:
    for style, num_microbatches in enumerate(study.wishes.microbatches):
        cases = study.cases_of(pair, num_stages, num_microbatches)
        if cases:
            points = _over_ratios(study, cases[0], STRICT, cases[1], mode)
            yield Line(label=f"{num_microbatches} microbatches", points=points, style=style)


def _concurrent(study: Study) -> Iterator[Question]:
    """Yields questions over the number of microbatches, with a line for each ratio."""
    labels = [entry.label for entry in study.wishes.entries]
    names = [name for name in _CONCURRENT if name in labels]
    if not names or "gpipe" not in labels:
        return
    yield Question(
        name="chimera-gpipe",
        text="How long does Chimera stay ahead of GPipe? Tables run strictly; hop/F by (stages)",
        across=MICROBATCHES,
        up="faster than gpipe by, %",
        panels=tuple(
            tuple(
                Panel(
                    title=f"{name}, {p} stages, {mode.value}",
                    lines=tuple(_lines_over_microbatches(study, name, p, mode)),
                )
                for name in names
            )
            for p in study.wishes.stages
            for mode in study.wishes.communications
        ),
    )


def _lines_over_microbatches(study: Study, name: str, num_stages: int, mode: Communication) -> Iterator[Line]:
    stages = study.wishes.stages
    ratios = zip(*(distinct_hops(study.wishes.systems, p) for p in stages), strict=True)
    names = [", ".join(f"{hop.ratio:.1g} ({p})" for p, hop in zip(stages, hops, strict=True)) for hops in ratios]
    for style, hop in enumerate(distinct_hops(study.wishes.systems, num_stages)):
        points = []
        for num_microbatches in study.wishes.microbatches:
            cases = study.cases_of((name, "gpipe"), num_stages, num_microbatches)
            gain = study.gain(cases[0], STRICT, cases[1], mode, hop) if cases else None
            if gain is not None:
                points.append((float(num_microbatches), 100 * gain))
        yield Line(label=f"hop/F {names[style]}", points=tuple(points), style=style)


def _orders(study: Study, mode: Communication) -> Question:
    num_stages = max(study.wishes.stages)
    return Question(
        name=f"readiness-{mode.value}",
        text=f"What do readiness and foresight make of each table? {num_stages} stages, {mode.value}",
        across=RATIO,
        up="faster than the same table run strictly by, %",
        panels=tuple(
            tuple(
                Panel(
                    title=f"{entry.label}, {num_microbatches} microbatches",
                    lines=tuple(_lines_of_orders(study, Case(entry, num_stages, num_microbatches), mode)),
                )
                for num_microbatches in few(study.wishes.microbatches)
            )
            for entry in study.wishes.entries
        ),
        is_wide=True,
    )


def _lines_of_orders(study: Study, case: Case, mode: Communication) -> Iterator[Line]:
    for style, order in enumerate(one for one in study.wishes.orders if one != STRICT):
        points = _over_ratios(study, case, order, case, mode)
        yield Line(label=order, points=points, style=style, is_dashed=order.startswith(FORESIGHT))


def _over_ratios(
    study: Study, case: Case, order: str, other: Case, mode: Communication
) -> tuple[tuple[float, float], ...]:
    """Returns (ratio, gain in percent) where both schedules fit; the other one is run strictly."""
    found = [
        (hop.ratio, study.gain(case, order, other, mode, hop))
        for hop in distinct_hops(study.wishes.systems, case.num_stages)
    ]
    return tuple((ratio, 100 * gain) for ratio, gain in found if gain is not None)
