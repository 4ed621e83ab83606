"""Operations in the real runtime, with emulated stages: engines beside compute have threads of their own."""

from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import Op, ScheduleRequest, build_schedule, with_operations
from rrfp_jax.simulation.result import peak_memory
from rrfp_jax.testing.emulation import emulate

P, M = 4, 8
RULES = StepRules(updates=False, agreement=Agreement.ALL)


def offloaded(slots, ms):
    table = build_schedule("1f1b", ScheduleRequest(num_stages=P, num_microbatches=M))
    peaks = table.peak_activations()
    pairs = frozenset((c, m) for c in range(P) for m in range(M) if peaks[c] > slots)
    out = Op("O", after="F", lane="d2h", frees=1.0, ms=ms, pairs=pairs)
    return with_operations(table, [out, Op("L", after=out, before="B", lane="h2d", holds=1.0, ms=ms, pairs=pairs)])


@pytest.mark.parametrize("consume", ["strict", "ready"])
@pytest.mark.parametrize("accelerator", [None, 0.0])
def test_memory_moves_beside_compute(consume, accelerator):
    table = offloaded(2, ms=1.0)
    ordering = Ordering(schedule=table, consume=consume, window=2)
    order = ordering.resolve(table.placement, replace(table.graph, ops=()))
    found = emulate(
        order.arbiters(RULES),
        np.full((1, P, M, 3), 2.0),
        2,
        launch_ms=accelerator,
        just_in_time=accelerator is not None,
    )
    timeline = found.timeline.of_step(1)
    assert {span.task for span in timeline.spans} == set(table.graph.tasks())
    assert {span.lane for span in timeline.beside()} == {"d2h", "h2d"}
    assert max(peak_memory(timeline, order.graph, table.placement)) <= 2
    overlapping = [
        (copy, span)
        for copy in timeline.beside()
        for span in timeline.spans
        if not span.is_beside and span.stage == copy.stage and span.start_s < copy.end_s and copy.start_s < span.end_s
    ]
    assert overlapping, "no copy ran beside a task of its stage"
