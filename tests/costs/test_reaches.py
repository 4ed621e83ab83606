"""What stages hold in runs whose tasks take as long as an adversary wants, beside what is forecast."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.emulate import EMULATED_STEP
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import Order
from rrfp_jax.costs.forecast import ChunkBytes, forecast_memory, paths, reaches
from rrfp_jax.schedules import Edge, PipelineGraph, Task, TaskKind
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import Costs, simulate

MICROBATCHES, STEPS = 12, 2
TABLES = ["interleaved-1f1b", "zb-v", "v-half", "1f1b", "zb-h1"]
_CHUNK = ChunkBytes(fixed=0, stash=0, owed=0, inputs=0, output_grads=0, outputs=0, temporaries=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("foresight", ["on", "off"])
@pytest.mark.parametrize("table", TABLES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_stage_holds_more_than_is_forecast(table: str, foresight: str, data: st.DataObject) -> None:
    order = OrderingOptions(schedule=table, foresight=foresight).resolve(num_stages=4, num_microbatches=MICROBATCHES)
    sizes = data.draw(_sizes(order.graph))
    forecasts = forecast_memory(order, sizes, MICROBATCHES)
    for one in _run(order, data.draw(_durations_ms(order.graph))).by_step():
        for stage, forecast in enumerate(forecasts):
            assert _most(_changes(stage, one, order, sizes)) <= forecast.peak


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_what_may_reach_a_slow_stage_does(slow: int) -> None:
    """All that the stage before may hold lies or waits there, where its second chunk is slow."""
    order = OrderingOptions(schedule="interleaved-1f1b").resolve(num_stages=4, num_microbatches=MICROBATCHES)
    durations_ms = np.full((1, order.graph.num_chunks, MICROBATCHES, 3), 0.01)
    durations_ms[:, order.placement.chunks_of_stage[slow][1]] = 100.0
    sizes = dict.fromkeys(range(order.graph.num_chunks), replace(_CHUNK, stash=1, inputs=1))
    (one,) = _run(order, durations_ms).by_step()
    (reach,) = reaches(order, slow)
    assert _most(_changes(slow, one, order, sizes)) == reach.number == (order.footprints or ())[slow - 1]


@st.composite
def _sizes(draw: st.DrawFn, graph: PipelineGraph) -> dict[int, ChunkBytes]:
    """Inputs from small to larger than all that a microbatch takes in flight."""
    numbers = st.integers(0, 9)
    return {
        c: replace(
            _CHUNK,
            stash=10 * draw(numbers),
            owed=10 * draw(numbers) if c in graph.split else 0,
            inputs=10 * draw(numbers) if graph.predecessors(c) else 0,
        )
        for c in range(graph.num_chunks)
    }


@st.composite
def _durations_ms(draw: st.DrawFn, graph: PipelineGraph) -> np.ndarray:
    """Each kind of each chunk is quick or slow, for a while."""
    speeds = draw(
        st.lists(st.sampled_from([0.01, 1.0, 100.0]), min_size=6 * graph.num_chunks, max_size=6 * graph.num_chunks)
    )
    halves = np.array(speeds).reshape(1, graph.num_chunks, 2, 3)
    return np.tile(np.repeat(halves, MICROBATCHES // 2, axis=2), (STEPS, 1, 1, 1))


def _run(order: Order, durations_ms: np.ndarray) -> Timeline:
    return simulate(
        order.arbiters(EMULATED_STEP), Costs(durations_ms=durations_ms), num_steps=len(durations_ms)
    ).timeline


def _changes(
    stage: int, timeline: Timeline, order: Order, sizes: dict[int, ChunkBytes]
) -> Iterator[tuple[float, int, int]]:
    """Time, rank among what happens then, and bytes that come or go: inputs wait from the end of the sender's F to the
    start of their own, the stash lies from there to the end of B or I, and what is owed on to that of W."""
    graph, spans = order.graph, {span.task: span for span in timeline.spans}
    for chunk in order.placement.chunks_of_stage[stage]:
        size, first, last = sizes[chunk], graph.input_gradient_kind(chunk), graph.accumulating_kind(chunk)
        for m in range(graph.num_microbatches):
            start_s = spans[Task(TaskKind.F, chunk, m)].start_s
            for source in graph.predecessors(chunk):
                yield spans[Task(TaskKind.F, source, m)].end_s, 0, size.inputs
                yield start_s, 1, -size.inputs
            yield start_s, 2, size.stash
            for kind, num_bytes in ((first, size.owed - size.stash), (last, -size.owed)):
                yield spans[Task(kind, chunk, m)].end_s, -1, num_bytes


def _most(changes: Iterator[tuple[float, int, int]]) -> int:
    return max(accumulate(num_bytes for *_, num_bytes in sorted(changes)))


def test_the_last_chunk_is_not_held_alone() -> None:
    """Of five activations two at most are of a stage's second chunk, where the backward is one task."""
    order = OrderingOptions(schedule="interleaved-1f1b").resolve(num_stages=4, num_microbatches=MICROBATCHES)
    sizes = {c: replace(_CHUNK, stash=100 if c == 7 else 1) for c in range(8)}
    assert (order.footprints or ())[3] == 5
    assert forecast_memory(order, sizes, MICROBATCHES)[3].peak == 2 * 100 + 3 * 1
    assert paths(order.graph, (3, 7)) == ((0, 1),)
    assert paths(replace(order.graph, split=frozenset({7})), (3, 7)) == ((0,), (1,))


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ((Edge(0, 1), Edge(1, 2), Edge(2, 3)), ((0, 1, 2, 3),)),
        ((Edge(0, 1), Edge(1, 2, is_optional=True), Edge(2, 3)), ((0, 1), (2, 3))),
        ((Edge(0, 1, carries_gradient=False), Edge(1, 2), Edge(2, 3)), ((0,), (1, 2, 3))),
        ((Edge(0, 2), Edge(1, 2), Edge(2, 3)), ((0,), (1,), (2, 3))),
        ((Edge(0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3)), ((0, 1), (2,), (3,))),
    ],
    ids=["chain", "skipped", "without a gradient", "two feed one", "one feeds two"],
)
def test_what_is_held_with_what_came_before(edges: tuple[Edge, ...], found: tuple[tuple[int, ...], ...]) -> None:
    assert paths(PipelineGraph(num_chunks=4, num_microbatches=4, edges=edges), range(4)) == found
