"""RQ6: how do the methods compare on 128 and 1,024 devices?

Stages, replicas of the pipeline and tensor parallelism multiply. Each device has noise of its own: a task of a
tensor-parallel group takes as long as on its slowest member, and a step ends when the slowest replica has.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.paper.pictures import draw_bars
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.tables import geometric_mean, markdown
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import RULES
from rrfp_jax.core import Order
from rrfp_jax.simulation import Communication, Costs, Links, Machine, constant, for_steps, lognormal, simulate
from rrfp_jax.simulation.costs import Durations

BLOCKING, STRICT, GUIDED, WIDE = "1f1b strict, blocking", "1f1b strict", "1f1b-split + foresight", "bfw, window 32"
METHODS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    BLOCKING: ({"schedule": "1f1b", "consume": "strict"}, "blocking"),
    STRICT: ({"schedule": "1f1b", "consume": "strict"}, "async"),
    GUIDED: ({"schedule": "1f1b-split"}, "async"),
    "zb-h1 strict": ({"schedule": "zb-h1", "consume": "strict"}, "async"),
    "zb-h1 + foresight": ({"schedule": "zb-h1"}, "async"),
    "bf, window 32": ({"hint": "bf", "window": 32}, "async"),
    WIDE: ({"hint": "bfw", "window": 32}, "async"),
}
SHAPES = {
    128: ((8, 8, 2), (16, 4, 2), (16, 8, 1), (32, 4, 1), (32, 1, 4)),
    1024: ((8, 64, 2), (16, 32, 2), (16, 16, 4), (32, 16, 2), (64, 8, 2)),
}
"""Stages, replicas and tensor parallelism, by the number of devices."""
QUICK = {128: ((16, 4, 2),), 1024: ((16, 32, 2), (32, 16, 2))}
SIGMA, TASK_MS, COMM_MS, STEPS = 0.3, 10.0, 5.0, 2


def cells(quick: bool) -> Sequence[Cell]:
    """Returns cells with twice as many microbatches as stages in each replica."""
    return [
        {"devices": devices, "stages": p, "replicas": replicas, "tensor": tensor, "microbatches": 2 * p, "seed": seed}
        for devices, shapes in (QUICK if quick else SHAPES).items()
        for p, replicas, tensor in shapes
        for seed in range(1, 2 if quick else 4)
    ]


def measure(cell: Cell) -> Measured:
    """Measures all methods on the same draws."""
    sizes = {"num_stages": int(cell["stages"]), "num_microbatches": int(cell["microbatches"])}
    rows: list[dict[str, Value]] = []
    for name, (words, communication) in METHODS.items():
        order = OrderingOptions(**words).resolve(**sizes)  # type: ignore[arg-type]
        machine = Machine(links=Links(latency_ms=COMM_MS), communication=Communication(communication))
        rng = np.random.default_rng(int(cell["seed"]))
        ends_ms = []
        for _ in range(int(cell["replicas"])):
            costs = Costs(durations_ms=_draw(order, int(cell["tensor"]), rng))
            timeline = simulate(order.arbiters(RULES), costs, machine=machine, num_steps=STEPS).timeline
            ends_ms.append([timeline.of_step(step).makespan_s() * 1e3 for step in range(STEPS)])
        one_ms, all_ms = np.mean(ends_ms), np.max(ends_ms, axis=0).mean()
        rows.append({"method": name, "step_ms": round(float(all_ms), 6), "replica_ms": round(float(one_ms), 6)})
    return rows


def _draw(order: Order, tensor: int, rng: np.random.Generator) -> Durations:
    """Draws each task's time on the slowest device of its group; whole backwards are the sum of both parts."""
    quiet_ms = for_steps(constant((TASK_MS, TASK_MS, TASK_MS), order.graph), STEPS)
    slowest_ms: Durations = np.max([lognormal(quiet_ms, SIGMA, rng) for _ in range(tensor)], axis=0)
    return slowest_ms


def speed(rows: Rows, method: str, base: str) -> float:
    """Returns the method's speed relative to ``base``, the geometric mean over seeds."""
    first = {row["seed"]: float(row["step_ms"]) for row in selected(rows, method=base)}
    return geometric_mean([first[row["seed"]] / float(row["step_ms"]) for row in selected(rows, method=method)])


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: a row for each shape."""
    shapes = sorted({tuple(int(row[name]) for name in ("devices", "stages", "replicas", "tensor")) for row in rows})
    lines, slowest, guided, wide = [], {}, {}, {}
    for devices, stages, replicas, tensor in shapes:
        some = selected(rows, devices=devices, stages=stages, replicas=replicas, tensor=tensor)
        name = f"{devices:,}: {stages} x {replicas} x {tensor}"
        waits = {
            method: geometric_mean(
                [float(row["step_ms"]) / float(row["replica_ms"]) for row in selected(some, method=method)]
            )
            for method in METHODS
        }
        slowest[name], guided[name], wide[name] = waits[WIDE], speed(some, GUIDED, STRICT), speed(some, WIDE, STRICT)
        others = [method for method in METHODS if method not in (BLOCKING, STRICT)]
        lines.append(
            [
                name,
                f"{speed(some, STRICT, BLOCKING):.3f}",
                *(f"{speed(some, method, STRICT):.3f}" for method in others),
                f"{waits[STRICT] - 1:.1%}, {waits[WIDE] - 1:.1%}",
            ]
        )
    headings = ["devices: stages x replicas x tensor", f"{STRICT}, of blocking"]
    headings += [f"{method}, of {STRICT}" for method in METHODS if method not in (BLOCKING, STRICT)]
    headings.append(f"the slowest replica takes longer than the mean: {STRICT}, {WIDE}")
    most = max(slowest, key=slowest.__getitem__)
    return "\n\n".join(
        [
            markdown(headings, lines),
            draw_bars(
                {f"{GUIDED}, within 1F1B's memory": guided, WIDE: wide},
                folder / "devices.png",
                "times as fast as strict 1F1B",
            ),
            f"Within 1F1B's memory the split table with foresight is {min(guided.values()):.3f} to "
            f"{max(guided.values()):.3f} times as fast as strict 1F1B, bfw in a window of 32 "
            f"{min(wide.values()):.3f} to {max(wide.values()):.3f} times. Waiting for the slowest replica costs {WIDE} "
            f"{slowest[most] - 1:.1%} at most ({most}), where noise is independent from device to device.",
            f"*Threats*: simulated, with log-normal noise of sigma {SIGMA:g} on each device, transfers of half a "
            "forward, and twice as many microbatches as stages; gradients are added up between replicas in no time, "
            "and whole slow hosts are not in it.",
        ]
    )


QUESTION = Question(
    name="devices",
    title="128 and 1,024 devices? (RQ6)",
    settings=("devices", "stages", "replicas", "tensor", "microbatches", "seed"),
    figures=("method", "step_ms", "replica_ms"),
    cells=cells,
    measure=measure,
    write=write,
)
