"""The ladder in the real runtime: the same steps on emulated stages, beside what the simulator says of them.

Asynchronous tensors arrive later than they were sent, while their sender goes on. A blocking sender is emulated by a
task that lasts until its tensor has arrived. The simulation is given the same draws, and the host's time for a task
that the run itself shows. All methods take their turn, again and again; a cell is one round of them.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median

import numpy as np

from experiments.paper.ladder import BASE, EQUAL_MEMORY, METHODS, PAPER_REGIME
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.scene import NO_JITTER, Method, Scene
from experiments.paper.tables import markdown
from rrfp_jax.commands.emulate import EMULATED_STEP
from rrfp_jax.simulation import Costs, Links, Machine, both_directions, simulate
from rrfp_jax.simulation.jitter import Durations

WARM_UP = 1
"""Steps before those that count, in which averages are learnt."""
BAR = 0.03
"""How far a factor may be from its forecast."""
REAL = {name: method for name, method in METHODS.items() if "adaptive" not in name}
STEPS = [step for step in (*EQUAL_MEMORY, *PAPER_REGIME) if step.cumulated in REAL]


def cells(quick: bool) -> Sequence[Cell]:
    """Four stages; as many rounds as settle a median."""
    jitters = [NO_JITTER, "lognormal:0.5"] + ([] if quick else ["lognormal:0.2", "lognormal:1"])
    return [
        Scene(
            stages=4,
            microbatches=16,
            jitter=jitter,
            comm_ms=3.0,
            forward_ms=6.0,
            input_ms=6.0,
            weight_ms=6.0,
            steps=3 if quick else 6,
            seed=seed,
        ).as_cell()
        for seed in range(1, 4 if quick else 8)
        for jitter in jitters
    ]


def measure(cell: Cell) -> Measured:
    """Each method once, and its forecast."""
    _prepare(int(cell["stages"]))
    scene = Scene.of(cell)
    rows: list[dict[str, Value]] = []
    for name, method in REAL.items():
        real_ms, forecast_ms, host_ms = _emulated(scene, method)
        rows.append(
            {
                "method": name,
                "real_ms": round(real_ms, 6),
                "forecast_ms": round(forecast_ms, 6),
                "host_ms": round(host_ms, 6),
            }
        )
    return rows


@cache
def _prepare(num_stages: int) -> None:
    from rrfp_jax.commands.common.process import use_cpu

    use_cpu(num_stages)


def _emulated(scene: Scene, method: Method) -> tuple[float, float, float]:
    """Mean makespans in milliseconds, real and simulated, and the host's time per task."""
    from rrfp_jax.testing import dispatch_overhead_ms, emulate

    order = method.order(scene)
    drawn_ms, num_steps = scene.costs(order).durations_ms, WARM_UP + scene.steps
    durations_ms = np.concatenate([drawn_ms[:WARM_UP], drawn_ms])
    delays_ms: dict[tuple[int, int], float] = {}
    if method.communication == "blocking":
        durations_ms = _until_arrived(durations_ms, scene.comm_ms)
    else:
        delays_ms = both_directions({(s, s + 1): scene.comm_ms for s in range(scene.stages - 1)}, scene.stages)
    emulation = emulate(order.arbiters(EMULATED_STEP), durations_ms, num_steps, link_delays_ms=delays_ms)
    host_ms = max(0.0, dispatch_overhead_ms(emulation.timeline, durations_ms))
    machine = Machine(links=Links(extra_ms=delays_ms), dispatch_overhead_ms=host_ms)
    forecast = simulate(
        order.arbiters(EMULATED_STEP), Costs(durations_ms=durations_ms), machine=machine, num_steps=num_steps
    )
    real_ms, forecast_ms = (
        fmean(timeline.of_step(step).makespan_s() for step in range(WARM_UP, num_steps)) * 1e3
        for timeline in (emulation.timeline, forecast.timeline)
    )
    return real_ms, forecast_ms, host_ms


def _until_arrived(durations_ms: Durations, comm_ms: float) -> Durations:
    """Every task lasts until the tensor that it sends has arrived: no F of the last stage, no gradient of the first."""
    lasting = durations_ms.copy()
    lasting[:, :-1, :, 0] += comm_ms
    lasting[:, 1:, :, 1] += comm_ms
    return lasting


def factor(rows: Rows, before: str, after: str, column: str, jitter: str) -> float:
    """How many times as fast ``after`` is: the median over rounds of the ratios within a round."""
    first = {row["seed"]: float(row[column]) for row in selected(rows, method=before, jitter=jitter)}
    return median(first[row["seed"]] / float(row[column]) for row in selected(rows, method=after, jitter=jitter))


def write(rows: Rows, folder: Path) -> str:  # noqa: ARG001
    """Each step's factor, real and forecast."""
    jitters = sorted({row["jitter"] for row in rows}, key=lambda jitter: (jitter != NO_JITTER, jitter))
    lines, deviations = [], {}
    pairs = dict.fromkeys(
        pair
        for step in STEPS
        for pair in [(step.name, step.before, step.cumulated), (f"{step.name}, alone", BASE, step.alone)]
        if pair[2]
    )
    for jitter in jitters:
        for name, before, after in pairs:
            real, forecast = (factor(rows, before, after, column, jitter) for column in ("real_ms", "forecast_ms"))
            deviations[f"{name}, from {before} ({jitter})"] = real / forecast - 1
            lines.append([jitter, name, before, after, f"{real:.3f}", f"{forecast:.3f}", f"{real / forecast - 1:+.1%}"])
    worst = max(deviations, key=lambda name: abs(deviations[name]))
    host_ms = [float(row["host_ms"]) for row in rows]
    rounds = len({row["seed"] for row in rows})
    return "\n\n".join(
        [
            markdown(["noise", "step", "from", "to", "real", "simulated", "difference"], lines),
            f"{sum(abs(each) <= BAR for each in deviations.values())} of {len(deviations)} factors are within "
            f"{BAR:.0%} of the simulated ones; the farthest is {worst}, {deviations[worst]:+.1%}.",
            f"*Threats*: four stages on one machine, whose tasks sleep; the host took {min(host_ms):.2f} to "
            f"{max(host_ms):.2f} ms per task, {rounds} rounds.",
        ]
    )


QUESTION = Question(
    name="real",
    title="Does the real runtime show it too?",
    settings=tuple(Scene.__dataclass_fields__),
    figures=("method", "real_ms", "forecast_ms", "host_ms"),
    cells=cells,
    measure=measure,
    write=write,
    is_timed=True,
)
