"""Is a table with foresight ever slower than the best fixed order of the same memory?

Every simulated setting of the other questions is taken once more, with several draws, and within three memories: that
of strict 1F1B, as many microbatches as there are stages, and the paper's window of 32. In each of them the best fixed
order is chosen by simulation (:mod:`experiments.paper.fixed_orders`) and its table followed with foresight, holding no
more than the table itself does. Quickly, questions of many settings give a sample of them: simulating all of them
would take longer than the questions themselves.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments.paper import breakdown, endtoend, hints, jitter, jitter_real, ladder, real, windows
from experiments.paper.fixed_orders import Setting, of_model, of_scene
from experiments.paper.pictures import draw_shares
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.scene import EQUAL, NO_JITTER, Scene
from experiments.paper.tables import geometric_mean, half_interval, interval, markdown

UNIFORM = "equal stages"
PAPER_WINDOW = 32
LEAST, USUAL, SHARE = 0.99, 0.995, 0.99
"""Least ratio of any cell, the ratio that most cells should reach, and the share of cells that should reach it."""
SAMPLED_ABOVE, EVERY = 20, 5
"""Quickly, questions of more settings than this give one in so many; five, as settings come in twos and threes."""
MEMORIES = {"1F1B's own": EQUAL, "as many as stages": "stages", "32": str(PAPER_WINDOW)}


def cells(quick: bool) -> Sequence[Cell]:
    """Returns the settings of the other questions, each once, whatever seeds and levels these have."""
    found: dict[tuple[tuple[str, Value], ...], Cell] = {}
    for cell in _sampled(_settings(quick)) if quick else _settings(quick):
        seeds = 2 if quick else 3
        plain: Cell = {**{name: value for name, value in cell.items() if name != "seed"}, "seeds": seeds}
        found.setdefault(tuple(sorted((name, value) for name, value in plain.items() if name != "question")), plain)
    return list(found.values())


def _sampled(settings: Iterable[Cell]) -> Iterator[Cell]:
    """Yields all settings of questions of few, and a sample of those of many."""
    by_question: dict[Value, list[Cell]] = {}
    for cell in settings:
        by_question.setdefault(cell["question"], []).append(cell)
    for cells_of_one in by_question.values():
        yield from cells_of_one[:: EVERY if len(cells_of_one) > SAMPLED_ABOVE else 1]


def _settings(quick: bool) -> Iterator[Cell]:
    scenes: dict[str, Sequence[Cell]] = {
        module.QUESTION.name: module.QUESTION.cells(quick) for module in (ladder, real, hints, windows, jitter)
    }
    scenes["breakdown"] = [breakdown.scene_of(cell).as_cell() for cell in breakdown.QUESTION.cells(quick)]
    levels = (NO_JITTER, *(f"paper:{level}" for level in jitter.LEVELS))
    scenes["jitter_real"] = [
        {**cell, "jitter": level} for cell in jitter_real.QUESTION.cells(quick) for level in levels
    ]
    for question, some in scenes.items():
        for cell in some:
            yield {"question": question, "model": UNIFORM, "balance": "-", **cell}
    for cell in endtoend.QUESTION.cells(quick):
        transfer_ms = float(cell["transfer"]) * endtoend.MEAN_FORWARD_MS
        means: Cell = dict.fromkeys(("forward_ms", "input_ms", "weight_ms"), endtoend.MEAN_FORWARD_MS)
        same = {name: cell[name] for name in ("model", "balance", "stages", "microbatches", "seed")}
        noise: Cell = {"jitter": f"lognormal:{endtoend.SIGMA:g}", "comm_ms": transfer_ms, "steps": endtoend.STEPS}
        yield {"question": "endtoend", **same, **noise, **means}


def measure(cell: Cell) -> Measured:
    """Measures the best fixed order and foresight, in each memory."""
    setting, stages = _setting(cell), int(cell["stages"])
    rows: list[dict[str, Value]] = []
    for name, memory in MEMORIES.items():
        size = stages if memory == "stages" else PAPER_WINDOW
        if memory == "stages" and stages == PAPER_WINDOW:
            continue
        found = setting.best(EQUAL if memory == EQUAL else min(size, int(cell["microbatches"])))
        above = max(ours - fixed for ours, fixed in zip(found.ours.held, found.fixed.held, strict=True))
        rows.append(
            {
                "memory": name,
                "best": found.best,
                "fixed_ms": round(found.fixed.step_ms, 6),
                "ours_ms": round(found.ours.step_ms, 6),
                "roomy_ms": round(found.roomy.step_ms, 6),
                "held": round(max(found.fixed.held), 6),
                "above": round(above, 6),
            }
        )
    return rows


def _setting(cell: Cell) -> Setting:
    seeds = range(1, int(cell["seeds"]) + 1)
    if cell["model"] == UNIFORM:
        return of_scene(Scene.of({**cell, "seed": 1}), seeds)
    return of_model({**cell, "transfer": float(cell["comm_ms"]) / endtoend.MEAN_FORWARD_MS}, seeds)


def ratio(row: Mapping[str, str], column: str = "ours_ms") -> float:
    """Returns the speed relative to the best fixed order."""
    return float(row["fixed_ms"]) / float(row[column])


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: a row for each question and memory, with the worst cell by name."""
    questions = sorted({row["question"] for row in rows})
    groups: dict[str, Rows] = {f"settings of {name}": selected(rows, question=name) for name in questions}
    groups |= {f"memory: {name}": selected(rows, memory=name) for name in MEMORIES}
    groups |= {"all": rows}
    lines = [[name, *_figures(some)] for name, some in groups.items() if some]
    headings = ["cells", "how many", "times as fast", f"at least {USUAL}", f"at least {LEAST}", "with all the memory"]
    worst = sorted(rows, key=ratio)[:8]
    lowest = [[_words(row), row["memory"], row["best"], f"{ratio(row):.4f}"] for row in worst]
    panels = {f"memory: {name}": sorted(map(ratio, selected(rows, memory=name))) for name in MEMORIES}
    return "\n\n".join(
        [
            markdown(headings, lines),
            draw_shares(
                panels, folder / "never_slower.png", "times as fast as the best fixed order", marks=(1.0, LEAST)
            ),
            _finding(rows),
            f"The {len(lowest)} lowest:",
            markdown(["setting", "memory", "best fixed order", "times as fast"], lowest),
            "*Threats*: simulated; the best fixed order is chosen with hindsight, from the very draws that it is "
            "judged by, which favours it; tables come from our own registry, and none is optimal under noise.",
        ]
    )


def _figures(rows: Rows) -> list[str]:
    ratios = list(map(ratio, rows))
    roomy = [ratio(row, "roomy_ms") for row in rows]
    return [
        str(len(ratios)),
        interval(ratios),
        *(f"{sum(one >= bar for one in ratios) / len(ratios):.1%}" for bar in (USUAL, LEAST)),
        interval(roomy),
    ]


def _finding(rows: Rows) -> str:
    ratios = list(map(ratio, rows))
    below, usual = sum(one < LEAST for one in ratios), sum(one >= USUAL for one in ratios) / len(ratios)
    above = max(float(row["above"]) for row in rows)
    verdict = "holds" if not below and usual >= SHARE else "does not hold"
    slow = [row for row in rows if ratio(row) < USUAL]
    where = ""
    if slow:
        tables = [row["best"] for row in slow]
        usual_table = max(set(tables), key=tables.count)
        where = (
            f" Of those below {USUAL}, {tables.count(usual_table)} of {len(slow)} follow {usual_table}, and "
            f"{sum(row['jitter'].startswith('lognormal') for row in slow)} are under log-normal noise."
        )
    mean, half = geometric_mean(ratios), half_interval(ratios)
    return (
        f"Foresight is at least {min(ratios):.4f} times as fast as the best fixed order of the memory in all "
        f"{len(ratios)} cells, at least {USUAL} times in {usual:.1%} of them, and {mean:.4f} ± {half:.4f} times in the "
        f"mean, holding at most {above:g} activations more on any stage. That it is never slower by more than "
        f"{1 - LEAST:.0%}, and by more than {1 - USUAL:.1%} in {1 - SHARE:.0%} of cells at most, {verdict}.{where}"
    )


def _words(row: Mapping[str, str]) -> str:
    model = "" if row["model"] == UNIFORM else f"{row['model']} ({row['balance']}), "
    sizes = f"{row['stages']} x {row['microbatches']}"
    times = f"forward {float(row['forward_ms']):g} ms, transfer {float(row['comm_ms']):g} ms"
    return f"{model}{sizes}, {row['jitter']}, {times}"


QUESTION = Question(
    name="never_slower",
    title="Is it ever slower than the best fixed order?",
    settings=(
        "question",
        "model",
        "balance",
        *(name for name in Scene.__dataclass_fields__ if name != "seed"),
        "seeds",
    ),
    figures=("memory", "best", "fixed_ms", "ours_ms", "roomy_ms", "held", "above"),
    cells=cells,
    measure=measure,
    write=write,
)
