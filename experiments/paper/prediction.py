"""Does the simulator predict times that others have measured?

Two published sets of per-stage times. *Vocabulary Parallelism* (arXiv 2411.05288) timed the forward and backward of
every stage and the whole step, for models whose embedding and head weigh more and more, cut evenly and by its own
redistribution: strict 1F1B, simulated from the stage times, is compared with the step. *Zero Bubble* (arXiv 2401.10241)
gives the times of F, I and W and of a transfer, and the bubble rates of its schedules at them.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.paper.pictures import draw_bars
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.tables import markdown
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import RULES
from rrfp_jax.simulation import Costs, Links, Machine, constant, simulate

FOLDER = Path(__file__).parent / "published"
VOCABULARY, ZERO_BUBBLE = "vocabulary_parallelism", "zero_bubble"
SCHEDULES = ("1f1b", "zb-h1", "zb-h2")
NUM_MICROBATCHES = 128
"""Number of microbatches of the first set."""


def published(name: str) -> list[Mapping[str, str]]:
    """Returns the lines of a published set."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def cells(quick: bool) -> Sequence[Cell]:  # noqa: ARG001
    """Returns all lines as cells; they take seconds."""
    return [
        {"source": name, "line": line} for name in (VOCABULARY, ZERO_BUBBLE) for line in range(len(published(name)))
    ]


def measure(cell: Cell) -> Measured:
    """Measures the simulated figures beside the published ones."""
    line = published(str(cell["source"]))[int(cell["line"])]
    return _steps(line) if cell["source"] == VOCABULARY else _bubbles(line)


def _steps(line: Mapping[str, str]) -> list[dict[str, Value]]:
    forward_ms, backward_ms = ([int(us) / 1e3 for us in line[name].split()] for name in ("forward_us", "backward_us"))
    stages = len(forward_ms)
    order = OrderingOptions(schedule="1f1b", consume="strict").resolve(
        num_stages=stages, num_microbatches=NUM_MICROBATCHES
    )
    per_stage_ms = np.stack([forward_ms, backward_ms, np.zeros(stages)], axis=-1)
    durations_ms = np.broadcast_to(per_stage_ms[None, :, None, :], (1, stages, NUM_MICROBATCHES, 3)).copy()
    run = simulate(order.arbiters(RULES), Costs(durations_ms=durations_ms))
    what = f"{int(line['vocabulary']) // 1000}k, {line['cut']}"
    simulated_ms = run.timeline.makespan_s() * 1e3
    return [{"what": what, "published": float(line["iteration_ms"]), "simulated": round(simulated_ms, 6)}]


def _bubbles(line: Mapping[str, str]) -> list[dict[str, Value]]:
    stages, microbatches = int(line["num_stages"]), int(line["num_microbatches"])
    whole = tuple(float(line[name]) for name in ("forward_ms", "backward_ms", "weight_ms"))
    machine = Machine(links=Links(latency_ms=float(line["comm_ms"])))
    rows: list[dict[str, Value]] = []
    for schedule in SCHEDULES:
        order = OrderingOptions(schedule=schedule, consume="strict").resolve(
            num_stages=stages, num_microbatches=microbatches
        )
        costs = Costs(durations_ms=constant((whole[0], whole[1], whole[2]), order.graph))
        bubble = simulate(order.arbiters(RULES), costs, machine=machine).timeline.bubble_fraction()
        what = f"{line['model']}, {microbatches} microbatches, {schedule}"
        rate = float(line[f"bubble_{schedule.replace('-', '_')}"])
        rows.append({"what": what, "published": rate, "simulated": round(bubble, 6)})
    return rows


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: both sets with their errors."""
    steps, bubbles = (selected(rows, source=name) for name in (VOCABULARY, ZERO_BUBBLE))
    of_steps = {row["what"]: float(row["simulated"]) / float(row["published"]) - 1 for row in steps}
    of_bubbles = [abs(float(row["simulated"]) - float(row["published"])) for row in bubbles]
    lines = [
        [
            row["what"],
            f"{float(row['published']):,.1f}",
            f"{float(row['simulated']):,.1f}",
            f"{of_steps[row['what']]:+.2%}",
        ]
        for row in steps
    ]
    return "\n\n".join(
        [
            markdown(["vocabulary and cut", "measured step, ms", "simulated, ms", "difference"], lines),
            draw_bars(
                {"strict 1F1B on 8 A100": {name: 1 + error for name, error in of_steps.items()}},
                folder / "prediction.png",
                "simulated over measured step time",
            ),
            "The steps that Vocabulary Parallelism measured are predicted within "
            f"{max(map(abs, of_steps.values())):.2%}. The {len(bubbles)} bubble rates of Zero Bubble come out within "
            f"{max(of_bubbles):.5f}.",
            "*Threats*: the stage times come from the measured runs themselves, so that what is tested is the order "
            "and the waiting, not the cost of layers; the bubble rates are the authors' own calculation from their "
            "times.",
        ]
    )


QUESTION = Question(
    name="prediction",
    title="Does the simulator predict what others measured?",
    settings=("source", "line"),
    figures=("what", "published", "simulated"),
    cells=cells,
    measure=measure,
    write=write,
)
