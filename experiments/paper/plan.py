"""Gains of planning: the cut, the order, and readiness on top, all in the same memory.

Three models of 8 stages and 32 microbatches: equal layers, a language model whose head weighs 4.6 layers, and an
encoder before a language model. The choices of a plan grow with every step: strict 1F1B on an even cut; the best named
table on an even cut; the best on the cut that suits it; any order that a search finds; and any, for stages that take
ready tasks. A plan knows the costs and the log-normal noise, and chooses by other draws than it is judged by. It does
not know of the slow link or the slow stage.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from experiments.paper.pictures import draw_bars
from experiments.paper.planned import CASES, DRAWS, LOGNORMAL, METHODS, planned, step_ms
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, selected
from experiments.paper.scene import NO_JITTER, SLOW_LINK, SLOW_STAGE
from experiments.paper.tables import geometric_mean, interval, markdown, settings_of

STEPS = ("best named table", "best cut", "searched order", "readiness")
"""Names of the methods, each of which adds one freedom to the one before."""
_PAIRS = tuple(zip(STEPS, METHODS[:-1], METHODS[1:], strict=True))
UNKNOWN = (SLOW_LINK, SLOW_STAGE)
"""Disturbances that no plan knows of."""


def cells(quick: bool) -> Sequence[Cell]:
    """Returns cells of models and the noise that a plan knows. One plan is made for all that it is judged in."""
    return [
        {"model": model, "stages": 8, "microbatches": 32, "sigma": sigma, "steps": 8, "seeds": 3 if quick else 10}
        for model in CASES
        for sigma in ((0.0, 0.5) if quick else (0.0, 0.2, 0.5, 1.0))
    ]


def measure(cell: Cell) -> Measured:
    """Measures all methods in all noise, on draws that no plan has chosen by."""
    model, sigma = str(cell["model"]), float(cell["sigma"])
    found = planned(model, sigma, int(cell["stages"]), int(cell["microbatches"]))
    noises = [f"{LOGNORMAL}{sigma:g}"] if sigma else [NO_JITTER, SLOW_LINK, SLOW_STAGE]
    return [
        {
            "jitter": jitter,
            "seed": seed,
            "method": name,
            "order": each.one.order.label,
            "cut": "+".join(map(str, each.one.cut.counts)),
            "step_ms": round(step_ms(each.one, jitter, int(cell["steps"]), seed), 6),
            "bound_ms": round(each.bound_ms, 6),
            "held": round(each.one.peak_bytes / CASES[model].unit, 3),
            "memory": CASES[model].memory,
        }
        for jitter in noises
        for seed in range(1, int(cell["seeds"]) + 1 if sigma else 2)
        for name, each in found.items()
    ]


def factors(rows: Rows, before: str, after: str) -> list[float]:
    """Returns the speed of ``after`` relative to ``before`` in each cell."""
    cell_of = settings_of(("model", "jitter", "seed"))
    first = {cell_of(row): float(row["step_ms"]) for row in selected(rows, method=before)}
    return [first[cell_of(row)] / float(row["step_ms"]) for row in selected(rows, method=after)]


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: each model's step times, the gain of each step, a picture, and their findings."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    known = [row for row in rows if row["jitter"] not in UNKNOWN]
    uneven = [row for row in known if row["model"] != "homogeneous"]
    bars = {
        f"{model}, noise that the plan knows": {
            step: geometric_mean(factors(selected(known, model=model), before, after)) for step, before, after in _PAIRS
        }
        for model in models
    }
    plain, _, best, strict, ready = METHODS
    parts = [
        f"{told} is worth {geometric_mean(factors(uneven, before, after)):.3f}"
        for told, (_, before, after) in zip(
            ("the best named table", "the cut", "a searched order"), _PAIRS, strict=False
        )
    ]
    within = [row for row in rows if row["method"] != plain]
    above = max(float(row["held"]) / float(row["memory"]) for row in within)
    full = max(float(row["held"]) / float(row["memory"]) for row in selected(rows, method=plain))
    slow = {name: factors(selected(rows, jitter=name), strict, ready) for name in UNKNOWN}
    lost = {name: factors(selected(rows, jitter=name), METHODS[1], strict) for name in UNKNOWN}
    return "\n\n".join(
        [
            _steps_table(rows, models),
            _gains_table(rows),
            draw_bars(bars, folder / "plan.png", "times as fast as the step before"),
            f"All but {plain}, which takes up to {full:.0%} of the memory, take {above:.0%} of it at most. Of the "
            f"{geometric_mean(factors(uneven, plain, strict)):.3f} that a strict plan makes of 1F1B's speed on the "
            f"uneven models, where it knows of the noise, {', '.join(parts)} times. It is at least "
            f"{min(factors(known, best, strict)):.3f} times as fast as the best named table on its best cut, at most "
            f"{max(factors(known, best, strict)):.3f}. A plan for stages that take "
            f"what is ready is {_range(factors(known, strict, ready))} times as fast.",
            "What a plan does not know of can undo it: with several chunks per stage a microbatch passes a slow link "
            f"several times. The strict plan is then {_range(lost[SLOW_LINK])} times as fast as the best named table "
            f"on an even cut, with a slow stage {_range(lost[SLOW_STAGE])}; readiness makes "
            f"{_range(slow[SLOW_LINK])} and {_range(slow[SLOW_STAGE])} of the strict plan.",
            "*Threats*: simulated. Noise is independent in each task; where it is log-normal the plan knows its size, "
            f"and chooses by {DRAWS} draws of its own. Slow link and slow stage are not known to it. Times are "
            "intervals between the ends of steps; memory is that of activations, in microbatches of a stage or in "
            "layers of the language model. Three models are no sample of all, so that ranges stand in place of "
            "intervals where nothing is drawn.",
        ]
    )


def _steps_table(rows: Rows, models: Sequence[str]) -> str:
    lines = []
    for model in models:
        of_model = selected(rows, model=model)
        for jitter in dict.fromkeys(row["jitter"] for row in of_model):
            some = selected(of_model, jitter=jitter)
            told = [_told(selected(some, method=name)) for name in METHODS]
            lines.append([f"{model}, {some[0]['memory']}", jitter, *told, _bound(some, jitter)])
    return markdown(["model, memory", "noise", *(f"{name}, ms" for name in METHODS), "bound"], lines)


def _told(some: Rows) -> str:
    """Returns milliseconds, order and memory held, in words."""
    mean = fmean(float(row["step_ms"]) for row in some)
    return f"{mean:,.0f} ({some[0]['order']}; {float(some[0]['held']):g})"


def _bound(some: Rows, jitter: str) -> str:
    """Returns a bound that no order of the plan's cut can beat, without noise and slow parts."""
    return f"{float(selected(some, method='plan, strict')[0]['bound_ms']):,.0f}" if jitter == NO_JITTER else ""


def _gains_table(rows: Rows) -> str:
    """Returns a table of gains, with intervals where there are draws and ranges elsewhere."""
    noises = list(dict.fromkeys(row["jitter"] for row in rows))
    told = [interval if noise.startswith(LOGNORMAL) else _range for noise in noises]
    of_noise = [selected(rows, jitter=noise) for noise in noises]
    pairs = [*_PAIRS, ("all steps", METHODS[0], METHODS[-1])]
    lines = [
        [step, *(tell(factors(some, before, after)) for tell, some in zip(told, of_noise, strict=True))]
        for step, before, after in pairs
    ]
    return markdown(["step", *noises], lines)


def _range(ratios: Sequence[float]) -> str:
    """Returns the geometric mean, the least and the most ratio."""
    return f"{geometric_mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


QUESTION = Question(
    name="plan",
    title="What does planning add?",
    settings=("model", "stages", "microbatches", "sigma", "steps", "seeds"),
    figures=("jitter", "seed", "method", "order", "cut", "step_ms", "bound_ms", "held", "memory"),
    cells=cells,
    measure=measure,
    write=write,
)
