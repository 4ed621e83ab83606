"""Announcements in virtual time: late, lost in part or all, and what foresight makes of them."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from experiments.bench_foresight import GROUPS, Cell, measure
from rrfp_jax.core import Message, MessageKind, Ordering, StepRules
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.schedules.timeline import IdleReason
from rrfp_jax.simulation import Costs, Links, Machine, constant, for_steps, lognormal, peak_memory, simulate

NUM_STEPS = 4
TABLES = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b")
ALL_LOST = Links(latency_ms=1.0, announce_loss=1.0)
HALF_LOST = replace(ALL_LOST, announce_loss=0.5)


def run(name, links, **words):
    """Four stages and eight microbatches under jitter; the same draws whatever is asked for."""
    table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=8))
    order = Ordering(schedule=table, **words).resolve(table.placement, table.graph)
    durations_ms = for_steps(constant((10.0, 10.0, 10.0), order.graph), NUM_STEPS)
    costs = Costs(durations_ms=lognormal(durations_ms, 0.5, np.random.default_rng(7)))
    arbiters = order.arbiters(StepRules(updates=False))
    simulation = simulate(arbiters, costs, machine=Machine(links=links), num_steps=NUM_STEPS)
    held = peak_memory(simulation.timeline, order.graph, order.placement)
    assert all(most <= limit + 1e-9 for most, limit in zip(held, table.peak_activations(), strict=True))
    return simulation


@pytest.mark.parametrize("name", TABLES)
def test_where_every_announcement_is_lost_nothing_differs_from_no_foresight(name):
    lost, without = run(name, ALL_LOST), run(name, Links(latency_ms=1.0), foresight=False)
    assert lost.timeline.spans == without.timeline.spans
    assert lost.timeline.waits == without.timeline.waits
    assert lost.step_ends_ms == without.step_ends_ms
    assert run(name, Links(latency_ms=1.0)).timeline.spans != without.timeline.spans


@pytest.mark.parametrize("name", TABLES)
def test_where_some_are_lost_the_run_is_another_one_and_always_the_same(name):
    some = run(name, HALF_LOST)
    assert some.timeline.spans == run(name, HALF_LOST).timeline.spans
    others = [run(name, links).timeline.spans for links in (ALL_LOST, Links(latency_ms=1.0))]
    assert some.timeline.spans not in others
    assert any(wait.reason is IdleReason.HOLD for wait in some.timeline.waits)


def test_which_are_lost_depends_on_the_seed_and_on_nothing_that_happens():
    messages = [Message(MessageKind.ACTIVATION, 0, 1, m) for m in range(1000)]
    lost = [HALF_LOST.loses_announcement(3, message) for message in messages]
    assert lost == [HALF_LOST.loses_announcement(3, message) for message in messages]
    assert 400 < sum(lost) < 600
    assert [HALF_LOST.loses_announcement(4, message) for message in messages] != lost
    assert [replace(HALF_LOST, loss_seed=1).loses_announcement(3, message) for message in messages] != lost
    assert not any(Links().loses_announcement(3, message) for message in messages)
    assert all(ALL_LOST.loses_announcement(3, message) for message in messages)


@pytest.mark.parametrize("announce_ms", [0.0, 5.0, 30.0, 1000.0])
def test_announcements_may_take_longer_than_what_they_announce(announce_ms):
    for name in TABLES:
        run(name, Links(latency_ms=1.0, announce_ms=announce_ms))


def test_announcements_that_come_after_everything_are_as_good_as_lost():
    late = run("zb-h1", Links(latency_ms=1.0, announce_ms=1e6))
    assert late.timeline.spans == run("zb-h1", Links(latency_ms=1.0), foresight=False).timeline.spans


@pytest.mark.parametrize(("number", "name"), [(-0.1, "announce_loss"), (1.1, "announce_loss"), (-1.0, "announce_ms")])
def test_numbers_that_mean_nothing(number, name):
    with pytest.raises(ValueError, match=f"{name} is {number}: give"):
        Links(**{name: number})


def test_a_seed_is_not_negative():
    with pytest.raises(ValueError, match="loss_seed is -1: give 0 or more"):
        Links(loss_seed=-1)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("durations_ms", [(10.0, 10.0, 10.0), (10.0, 15.0, 5.0), (8.0, 12.0, 12.0)], ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_where_nothing_varies_foresight_is_never_slower_than_the_table_consumed_strictly(group, durations_ms):
    """The first step counts too, in which little is known."""
    for num_stages, num_microbatches in product((2, 4), (4, 8)):
        cell = Cell(
            group=group,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            jitter="none",
            durations_ms=durations_ms,
            num_steps=3,
        )
        result = measure(cell)
        assert result.foresight > 1 - 1e-9, cell
        assert result.within_memory, cell
