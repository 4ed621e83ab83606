"""Steps that lack some pairs, another pattern in each: what exists runs, and nobody waits for anything else."""

import pytest

from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.schedules import Edge, PipelineGraph, TaskKind, absences, linear
from rrfp_jax.simulation import Costs, constant, simulate
from tests.simulation.helpers import RULES

GRAPH = PipelineGraph(
    4, 6, (Edge(0, 2, is_optional=True), Edge(1, 2, is_optional=True), Edge(2, 3)), frozen=frozenset({1})
)
"""Two encoders, the second frozen, before a decoder of two chunks."""
PATTERNS = (absences([(0, 0), (1, 0), (1, 3)]), (), absences((c, m) for c in (0, 1) for m in range(6)))
"""A text-only microbatch and one without the second encoder; everything; a step without either encoder."""
ORDERS = (
    {"schedule": "1f1b", "consume": "strict"},
    {"schedule": "zb-h1", "consume": "strict"},
    {"schedule": "gpipe", "consume": "strict"},
    {"schedule": "zb-h1"},
    {"schedule": "1f1b-split", "foresight": "off"},
    {"hint": "bf", "window": 4},
    {"hint": "bfw", "window": 4},
)


def resolved(words):
    return OrderingOptions(**words).resolve(num_stages=4, num_microbatches=6, graph=GRAPH, placement=linear(4))


def run(words, durations_ms=(10.0, 10.0, 10.0), absent=PATTERNS, num_steps=4):
    order = resolved(words)
    costs = Costs(durations_ms=constant(durations_ms, order.graph))
    return order, simulate(order.arbiters(RULES), costs, num_steps=num_steps, absent=absent)


@pytest.mark.parametrize("words", ORDERS, ids=str)
def test_exactly_what_exists_runs(words):
    order, simulation = run(words)
    for step in range(4):
        ran = sorted(span.task for span in simulation.timeline.of_step(step).spans)
        assert ran == sorted(order.graph.skipping(PATTERNS[step % 3]).tasks())


def test_without_an_encoder_the_decoder_starts_at_once():
    _, simulation = run({"schedule": "1f1b", "consume": "strict"})
    first = {
        step: min(s.start_s for s in simulation.timeline.of_step(step).spans if s.task[:2] == (TaskKind.F, 2))
        for step in range(3)
    }
    begun = (0.0, *simulation.step_ends_ms)
    assert first[0] == 0.0  # microbatch 0 has no images
    assert first[1] * 1e3 == pytest.approx(begun[1] + 10)
    assert first[2] * 1e3 == pytest.approx(begun[2])


def test_a_step_without_encoders_takes_what_the_decoder_alone_takes():
    _, simulation = run({"schedule": "1f1b", "consume": "strict"}, absent=PATTERNS[2:], num_steps=1)
    alone = OrderingOptions(schedule="1f1b", consume="strict").resolve(num_stages=2, num_microbatches=6)
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), alone.graph))
    assert simulation.step_ms == simulate(alone.arbiters(RULES), costs).step_ms


def test_pairs_that_cannot_be_absent_are_refused_before_the_run():
    with pytest.raises(ValueError, match="nobody reads the output of chunk 0 for microbatch 1"):
        run({"hint": "bf"}, absent=(absences([(2, 1)]),))
