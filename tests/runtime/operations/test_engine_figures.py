"""What engines did: their busy shares, and what was moved to the host at most."""

import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import Op, ScheduleRequest, build_schedule, chain, with_operations
from rrfp_jax.simulation import Costs, constant, peak_memory, simulate
from rrfp_jax.simulation.result import bottleneck, engines_busy, host_peaks
from tests.runtime.operations.test_operations import offload

GATHER = (
    Op("G", before=("F",), holds=0.5, lane="net"),
    Op("D", after=("F",), frees=0.5, lane="net"),
)


def simulated(*ops):
    table = with_operations(build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=4)), ops)
    order = Ordering(schedule=table, consume="strict").resolve(table.placement, chain(2, 4))
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), order.graph))
    rules = StepRules(updates=False, agreement=Agreement.NONE)
    return simulate(order.arbiters(rules), costs, num_steps=2).timeline, order


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (offload(ms=1.0), [1, 1]),
        (offload(ms=1.0, part=0.5), [0.5, 0.5]),
        (GATHER, [0, 0]),
        ((*GATHER, *offload(ms=1.0)), [1, 1]),
        ((Op("C", after="F", before="B", holds=0.75),), [0, 0]),
    ],
)
def test_only_what_comes_back_was_moved_to_the_host(ops, expected):
    timeline, order = simulated(*ops)
    assert host_peaks(timeline, order.graph, order.placement) == expected


def test_chunks_of_other_sizes_hold_other_parts():
    timeline, order = simulated()
    assert peak_memory(timeline, order.graph, order.placement, chunk_parts=(3, 1)) == [3, 0.5]


def test_busy_shares_are_of_the_makespan_and_of_each_engine():
    timeline, _ = simulated(*offload(ms=3.0))
    assert timeline.of_step(0).makespan_s() == timeline.of_step(1).makespan_s() == pytest.approx(0.174)
    share = pytest.approx(4 * 3 / 174)
    assert engines_busy(timeline) == [{"d2h": share, "h2d": share}] * 2


@pytest.mark.parametrize(
    ("busy", "waited", "gain", "words"),
    [
        ([{}, {}], [0.0, 0.0], None, None),
        ([{"d2h": 0.95}, {}], [0.0, 0.0], None, None),
        ([{"d2h": 0.95}, {}], [0.2, 0.0], 0.0, None),
        ([{"d2h": 0.95}, {"d2h": 0.9}], [0.1, 0.2], None, "the engine d2h of stage 0 is busy 95% of the makespan"),
        ([{"d2h": 0.95}, {}], [0.2, 0.0], 0.3, "the makespan would be 30% shorter"),
        ([{"d2h": 0.3}, {}], [0.2, 0.0], None, None),
        ([{"d2h": 0.3}, {}], [0.2, 0.0], 0.1, "stage 0 waits 20% of the makespan for engines that are not always busy"),
    ],
)
def test_an_engine_is_named_only_where_it_holds_the_step_up(busy, waited, gain, words):
    sentence = bottleneck(busy, [0.3, 0.4], waited, gain=gain)
    assert sentence == words if words is None else words in sentence
