"""Peak memory: against the tables' own count, with weights, and the published peaks."""

import pytest

from rrfp_jax.schedules import ScheduleRequest, Task, TaskKind, build_schedule, chain, linear, schedule_names
from rrfp_jax.schedules.timeline import Span, Timeline
from rrfp_jax.simulation import MemoryWeights, peak_memory
from tests.simulation.helpers import by_table, run


@pytest.mark.parametrize("name", schedule_names())
def test_strict_consumption_peaks_as_the_table_says(name):
    table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=16))
    timeline = run(by_table(table), (1.0, 1.0, 1.0)).timeline
    assert peak_memory(timeline, table.graph, table.placement) == pytest.approx(table.peak_activations())


@pytest.mark.parametrize(
    ("name", "peak"), [("zb-v", lambda p: p), ("v-half", lambda p: (p + 2) // 2), ("v-min", lambda p: (p + 4) // 3)]
)
@pytest.mark.parametrize("p", [4, 6, 8])
def test_controllable_memory_has_the_published_peaks(name, peak, p):
    table = build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=4 * p))
    timeline = run(by_table(table), (1.0, 1.0, 1.0)).timeline
    assert max(peak_memory(timeline, table.graph, table.placement)) == peak(p)


def two_microbatches() -> Timeline:
    kinds = [TaskKind.F, TaskKind.I, TaskKind.F, TaskKind.I, TaskKind.W, TaskKind.W]
    microbatches = [0, 0, 1, 1, 0, 1]
    tasks = [Task(kind, 0, m) for kind, m in zip(kinds, microbatches, strict=True)]
    return Timeline(1, [Span(0, 0, task, float(i), i + 1.0) for i, task in enumerate(tasks)])


@pytest.mark.parametrize(
    ("weights", "peak"),
    [
        (MemoryWeights(), 2.0),
        (MemoryWeights(input_gradient=0.75, weight_gradient=0.25), 1.25),
        (MemoryWeights(input_gradient=-0.5, weight_gradient=1.5), 3.0),
    ],
)
def test_what_the_input_gradient_frees_counts(weights, peak):
    assert peak_memory(two_microbatches(), chain(1, 2, split=True), linear(1), weights) == [peak]


def test_weights_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="make F the sum"):
        MemoryWeights(forward=1, input_gradient=0.5, weight_gradient=0.25)
