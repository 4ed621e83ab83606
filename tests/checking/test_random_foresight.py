"""Large random pipelines that random tables guide, with real foresight, lost and false announcements, and bad ticks."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core import Announce, ClockTick, ForesightRules, GroupProtocol, StepRules, WakeAt
from rrfp_jax.core.plan import Agreement
from rrfp_jax.schedules import chain, looped
from tests.checking.guided import guided, random_rows
from tests.checking.test_broken_early import walk_often
from tests.checking.test_broken_foresight import BROKEN, LINEAR, Broken, EndsHoldsByAnyTick, HoldsOnAndOn
from tests.checking.test_random_walk import random_absences, random_graph, random_placement
from tests.model_checker import CheckError, replay
from tests.model_checker.random_walk import random_walk


def random_rules(random):
    return ForesightRules(
        fit=random.choice((1.0, 1.05, 2.0)),
        patience=random.choice((0.0, 0.5, 1.0, 3.0, 20.0)),
        notice=random.choice((0.0, 1.0, 1.0, 5.0)),
        worth=random.choice((0.0, 0.3, 0.8)),
        kept=random.choice((0.0, 0.5, 0.9)),
        shortest_s=random.choice((0.0, 0.0, 0.0, 5.0)),
    )


def random_groups(random, num_stages):
    if random.random() < 0.6:
        return {}
    sizes = tuple(random.choice((1, 2, 2, 3)) for _ in range(num_stages))
    protocol = random.choice((GroupProtocol.LEADER, GroupProtocol.LEADER, GroupProtocol.PROPOSE))
    return {"groups": sizes, "protocol": protocol, "collective": random.random() < 0.7}


def random_setting(random, *, most_stages=6, most_microbatches=10, most_chunks=3):
    """A footprint needs a valid table; a window alone takes any order."""
    placement = random_placement(random, random.randint(1, most_stages), most_chunks)
    graph = random_graph(random, placement.num_chunks, random.randint(1, most_microbatches))
    ordered, footprint = random.random() < 0.4, random.random() < 0.7
    rows = random_rows(graph, placement, random, ordered=ordered)
    if not footprint and random.random() < 0.5:
        rows = tuple(tuple(random.sample(row, len(row))) for row in rows)
    setting = guided(
        graph,
        placement,
        rows,
        extra=random.choice((0, 0, 1, 4)),
        footprint=footprint,
        window=random.choice((1, 2, 3, 8)),
        weights_last=random.random() < 0.3,
        rules=StepRules(ordered=ordered, updates=random.random() < 0.7, agreement=random.choice(list(Agreement))),
        absences=tuple(random_absences(random, graph) for _ in range(random.randint(1, 4))),
        certain_ahead=random.random() < 0.5,
        decides_early=random.random() < 0.4,
        **random_groups(random, placement.num_stages),
    )
    return replace(setting, foresight=random_rules(random))


def check(random, **sizes):
    setting = random_setting(random, **sizes)
    report = random_walk(setting, random.randrange)
    assert report.num_tasks >= sum(len(list(setting.graph_of_step(n).tasks())) for n in range(setting.num_steps))


@given(st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_random_pipelines_shrinkable(random):
    check(random, most_stages=3, most_microbatches=4, most_chunks=2)


@pytest.mark.slow
@given(st.integers(0, 2**64))
@settings(max_examples=10)
def test_large_random_pipelines(seed):
    check(Random(seed))


@pytest.mark.slow
@given(st.integers(0, 2**64))
@settings(max_examples=1200)
@pytest.mark.timeout(1800)
def test_very_many_random_pipelines(seed):
    check(Random(seed))


def walk(setting, seed):
    """A run, its events and what was answered to them."""
    counted = Counter()

    class Watched(setting.arbiter):
        def handle(self, event):
            out = super().handle(event)
            counted.update([type(event).__name__, *(type(i).__name__ for i in out)])
            return out

    report = random_walk(replace(setting, arbiter=Watched), Random(seed).randrange)
    return report, counted


def test_walks_hold_and_are_woken_and_told_lies():
    graph, placement = chain(4, 6), looped(2, 2)
    setting = guided(graph, placement, random_rows(graph, placement, Random(1)), absences=((),) * 3)
    counted = sum((walk(setting, seed)[1] for seed in range(10)), Counter())
    assert counted[WakeAt.__name__] > 50
    assert counted["ClockTick"] > counted[WakeAt.__name__]
    assert counted[Announce.__name__] == 10 * 3 * 6 * 6  # by every task but the last forward and the first backward
    assert counted["TaskAnnounced"] != counted[Announce.__name__]
    assert walk(setting, 3)[0] == walk(setting, 3)[0]


class NeverWoken(Broken):
    """Loses the ticks that it asks for."""

    def handle(self, event):
        return [] if isinstance(event, ClockTick) else super().handle(event)


class HoldsTwiceAsLong(Broken):
    """Begins the hold anew at its end, once."""

    def __init__(self, setup):
        super().__init__(setup)
        self.renewed = False

    def handle(self, event):
        if isinstance(event, ClockTick) and self.is_holding and not self.renewed:
            self.renewed = True
            return [WakeAt(self.step, event.time_s + 1.0)]
        return super().handle(event)


@pytest.mark.parametrize(
    ("broken", "one"),
    [
        *((broken, one) for broken, one, _ in BROKEN if broken not in (HoldsOnAndOn, EndsHoldsByAnyTick)),
        (NeverWoken, LINEAR),
        (HoldsTwiceAsLong, LINEAR),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_random_walks_catch_broken_arbiters(broken, one):
    """All but two, which show only where it is known what else might have been chosen."""
    setting = replace(one, arbiter=broken, absences=((),) * 6)
    with pytest.raises(CheckError) as error:
        walk_often(setting)
    assert [stimulus for stimulus, _ in replay(error.value.setting, error.value.trace[:-1])]
