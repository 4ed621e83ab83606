"""Weight gradients that steps leave out: the shortest steps under a mean share, and the pairs that one step lacks."""

import numpy as np
import pytest

from rrfp_jax.core import ready, schedule_hint
from rrfp_jax.schedules import Op, ScheduleRequest, ScheduleTable, build_schedule, linear, with_operations
from rrfp_jax.simulation import Freezing, FrozenShares, Links, Machine, choose_frozen, constant
from tests.simulation.helpers import arbiters, by_table, makespan_ms, run

CASES = [
    ("gpipe", 4, 8, 1.398),
    ("1f1b", 4, 8, 1.398),
    ("gpipe", 8, 16, 1.402),
    ("1f1b", 8, 16, 1.402),
    ("interleaved-1f1b", 4, 8, 1.383),
    ("zb-v", 4, 8, 1.335),
    ("zb-h1", 4, 8, 1.227),
]


def table_of(name: str, stages: int, microbatches: int) -> ScheduleTable:
    return build_schedule(name, ScheduleRequest(num_stages=stages, num_microbatches=microbatches))


def even_ms(table: ScheduleTable) -> np.ndarray:
    return constant((table.num_stages / table.graph.num_chunks,) * 3, table.graph)[0]


@pytest.mark.parametrize(("name", "stages", "microbatches", "speed"), CASES)
def test_tables_gain_what_the_program_says(name: str, stages: int, microbatches: int, speed: float) -> None:
    table = table_of(name, stages, microbatches)
    durations_ms = even_ms(table)
    frozen = choose_frozen(table, durations_ms, 0.8)
    assert frozen.whole_ms / frozen.makespan_ms == pytest.approx(speed, abs=5e-4)
    for chunks in table.placement.chunks_of_stage:
        assert frozen.shares[list(chunks)].mean() <= 0.8 + 1e-6
    # The arbiters, which follow the table, take as long.
    assert makespan_ms(run(by_table(table), durations_ms[np.newaxis])) == pytest.approx(frozen.whole_ms)
    rest_ms = frozen.durations_ms(durations_ms)[np.newaxis]
    assert makespan_ms(run(by_table(table), rest_ms)) == pytest.approx(frozen.makespan_ms)


def test_no_choice_under_the_limit_is_shorter_and_transfers_count() -> None:
    table, rng = table_of("zb-h1", 3, 4), np.random.default_rng(0)
    durations_ms = rng.uniform(1, 3, (3, 4, 3))
    links = Links(latency_ms=0.5)
    frozen = choose_frozen(table, durations_ms, 0.5, links=links)
    for _ in range(40):
        shares = rng.uniform(size=(3, 4)) ** 0.3
        shares *= np.minimum(1, 0.5 / shares.mean(axis=1, keepdims=True))
        other = FrozenShares(table.placement, shares, 12, 0.0, 0.0).durations_ms(durations_ms)[np.newaxis]
        assert makespan_ms(run(by_table(table), other, machine=Machine(links=links))) >= frozen.makespan_ms - 1e-6
    rest_ms = frozen.durations_ms(durations_ms)[np.newaxis]
    assert makespan_ms(run(by_table(table), rest_ms, machine=Machine(links=links))) <= frozen.makespan_ms + 1e-5
    assert choose_frozen(table, durations_ms, 0.0).shares.max() == 0


def test_steps_lack_each_pair_in_its_share_of_them() -> None:
    table = table_of("zb-h1", 4, 8)
    frozen = choose_frozen(table, even_ms(table), 0.8)
    counts = np.zeros((4, 8))
    for step in range(400):
        pairs = frozen.pairs(step)
        for pair in pairs:
            counts[pair] += 1
        for stage in range(4):
            lacking = sum(chunk == stage for chunk, _ in pairs)
            assert abs(lacking - frozen.shares[stage].sum()) < 1
    np.testing.assert_allclose(counts / 400, frozen.shares, atol=0.02)
    everything = FrozenShares(linear(2), np.full((2, 3), 0.99), 6, 0.0, 0.0)
    assert max(len(everything.pairs(step)) for step in range(100)) == 5


def test_whole_weight_gradients_shorten_readiness_too() -> None:
    table = table_of("zb-h1", 4, 8)
    durations_ms = even_ms(table)
    frozen = choose_frozen(table, durations_ms, 0.8)
    took = []
    for step in range(16):
        rest_ms = durations_ms.copy()
        for chunk, microbatch in frozen.pairs(step):
            rest_ms[chunk, microbatch, 2] = 0
        stages = arbiters(table.graph, table.placement, [ready(schedule_hint(order)) for order in table.orders])
        took.append(makespan_ms(run(stages, rest_ms[np.newaxis])))
    assert np.mean(took) < frozen.whole_ms / 1.15


def test_phases_follow_each_other() -> None:
    table = table_of("zb-h1", 2, 4)
    freezing = Freezing(table, 0.5, warm_up=3, monitored=2, growing=4)
    lacking = []
    for step in range(40):
        lacking.append(len(freezing.left_out(step)))
        freezing.observe(step, run(by_table(table), (1.0, 1.0, 1.0)).timeline)
    assert lacking[:5] == [0] * 5
    assert freezing.shares is not None
    assert freezing.shares.makespan_ms < freezing.shares.whole_ms
    assert 0 < np.mean(lacking[5:8]) < np.mean(lacking[9:]) == pytest.approx(freezing.shares.shares.sum(), abs=0.2)
    wider = Freezing(table, 0.5, warm_up=0, monitored=1, growing=0)
    with pytest.raises(ValueError, match="freezing takes a run without replicas"):
        wider.observe(0, run(by_table(table_of("zb-h1", 4, 4)), (1.0, 1.0, 1.0)).timeline)


@pytest.mark.parametrize("limit", [-0.1, 1.5, float("nan"), 1])
def test_limits_that_are_no_shares_or_all_are_refused(limit: float) -> None:
    table = table_of("1f1b", 2, 2)
    message = "nothing would train: give 0 or more, and less than 1" if limit == 1 else "is no share: give 0 or more"
    with pytest.raises(ValueError, match=message):
        choose_frozen(table, even_ms(table), limit)
    with pytest.raises(ValueError, match=message):
        Freezing(table, limit, warm_up=0, monitored=1, growing=0)
    with pytest.raises(ValueError, match="phases of -1, 0 and 2 steps: give 0 or more, and monitor at least 1"):
        Freezing(table, 0.5, warm_up=-1, monitored=0, growing=2)


def test_tables_with_operations_are_refused() -> None:
    table = with_operations(table_of("1f1b", 2, 4), [Op("S", after=("F",), lane="beside")])
    with pytest.raises(ValueError, match="has operations, which run beside its rows: give the table without them"):
        choose_frozen(table, even_ms(table), 0.5)
