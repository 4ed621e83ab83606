"""Short ways to simulate small cases."""

import numpy as np

from rrfp_jax.core import (
    Agreement,
    Consumption,
    StageArbiter,
    StageSetup,
    StepRules,
    hint_by_name,
    ready,
    strict,
)
from rrfp_jax.schedules import PipelineGraph, Placement, ScheduleTable
from rrfp_jax.simulation import Costs, Simulation, constant, simulate

RULES = StepRules(updates=False, agreement=Agreement.ALL)


def arbiters(
    graph: PipelineGraph,
    placement: Placement,
    consumptions: list[Consumption],
    *,
    window: int = 32,
    rules: StepRules = RULES,
    certain_ahead: bool = False,
) -> list[StageArbiter]:
    return [
        StageArbiter(
            StageSetup(graph, placement, s, consumption=c, window=window, rules=rules, certain_ahead=certain_ahead)
        )
        for s, c in enumerate(consumptions)
    ]


def by_hint(graph: PipelineGraph, placement: Placement, hint: str = "bf", **options) -> list[StageArbiter]:
    return arbiters(graph, placement, [ready(hint_by_name(hint))] * placement.num_stages, **options)


def by_table(table: ScheduleTable, **options) -> list[StageArbiter]:
    return arbiters(table.graph, table.placement, [strict(order) for order in table.orders], **options)


def run(stages: list[StageArbiter], durations_ms: tuple[float, float, float] | np.ndarray, **options) -> Simulation:
    """``durations_ms``: three constants, or the array."""
    if isinstance(durations_ms, tuple):
        durations_ms = constant(durations_ms, stages[0].graph)
    return simulate(stages, Costs(durations_ms=durations_ms), **options)


def starts_ms(simulation: Simulation) -> dict[str, float]:
    return {str(span.task): round(span.start_s * 1e3, 6) for span in simulation.timeline.spans}


def makespan_ms(simulation: Simulation) -> float:
    return round(simulation.timeline.makespan_s() * 1e3, 6)
