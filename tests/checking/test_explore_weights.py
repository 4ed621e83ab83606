"""Windows with weights explored: microbatches of unequal size, in every interleaving."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from rrfp_jax.core import HINTS, AheadBound, GroupProtocol, StageArbiter, StepRules, schedule_hint
from rrfp_jax.core.memory import Window
from rrfp_jax.schedules import Placement, Task, TaskKind, chain, linear, looped, v_shaped
from tests.model_checker import CheckError, Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, optional_graphs, skipped, small_graphs
from tests.model_checker.random_walk import random_walk

WEIGHTS = list(product((1, 3), repeat=3))
HINT_NAMES = ("bf", "f-priority", "b-priority")


def setting(graph, placement, weights, capacities, hint="f-priority", **more):
    return Setting(
        graph=graph,
        placement=placement,
        windows=(1,) * placement.num_stages,
        policies=(HINTS[hint],) * placement.num_stages,
        rules=more.pop("rules", PIPELINE_ONLY),
        absences=more.pop("absences", ((),) * len(weights)),
        capacities=capacities,
        weights=weights,
        **more,
    )


CASES = {
    "chain": (chain(2, 3), linear(2)),
    "split": (chain(2, 3, split=True), linear(2)),
    "two chunks each": (chain(4, 3), looped(2, 2)),
    "there and back": (chain(4, 3), v_shaped(2)),
    "two encoders": (small_graphs(3, 3)["two encoders"], Placement((0, 1, 1))),
    "skipped": (small_graphs(3, 3)["two encoders, some skipped"], Placement((0, 1, 0))),
}


@pytest.mark.parametrize("name", CASES)
def test_every_hint_weight_and_capacity(name):
    graph, placement = CASES[name]
    patterns = WEIGHTS if graph.num_chunks < 4 else [(3, 1, 1), (1, 3, 1), (1, 1, 3)]
    for weights, hint in product(patterns, HINT_NAMES):
        explorer = Explorer()
        for capacities in product((3, 4, 6), repeat=2):
            explorer.explore(setting(graph, placement, (weights,), capacities, hint))


@pytest.mark.parametrize("ordered", [False, True])
def test_three_stages(ordered):
    rules = replace(PIPELINE_ONLY, ordered=ordered)
    for weights in ((1, 3, 2), (3, 1, 2), (2, 2, 3)):
        explore(setting(chain(3, 3), linear(3), (weights,), (3, 5, 4), "bf", rules=rules))


@pytest.mark.parametrize(
    "more",
    [
        {"certain_ahead": True},
        {"decides_early": True},
        {"rules": StepRules()},
        {"groups": (2, 1)},
        {"groups": (2, 1), "protocol": GroupProtocol.PROPOSE},
    ],
    ids=",".join,
)
def test_every_way_to_drive_a_stage(more):
    num_microbatches = 2 if "groups" in more or "rules" in more else 3
    weights = ((3, 1, 2)[:num_microbatches], ()) if "rules" in more else ((3, 1, 2)[:num_microbatches],)
    assert explore(setting(chain(2, num_microbatches), linear(2), weights, (4, 3), **more)).num_states > 10


def test_with_read_ahead_and_absent_pairs():
    graph = optional_graphs(3)["frozen encoder"]
    ahead = (AheadBound(chunk=0, limit=1),)
    for placement in (linear(2), Placement((0, 0))):
        capacities = (3,) * placement.num_stages
        for weights in ((1, 3, 1), (3, 1, 2)):
            made = setting(graph, placement, (weights,), capacities, absences=(skipped(graph, [1]),), read_ahead=ahead)
            assert explore(made).num_states > 5


@pytest.mark.parametrize("seed", range(6))
def test_larger_pipelines_at_random(seed):
    random = Random(seed)
    graph, placement = [
        (chain(4, 12, split=True), linear(4)),
        (chain(6, 10), looped(3, 2)),
        (small_graphs(4, 10)["two encoders, some skipped"], linear(4)),
    ][seed % 3]
    weights = tuple(tuple(random.choice([1, 2, 7]) for _ in range(graph.num_microbatches)) for _ in range(3))
    capacities = tuple(random.randint(7, 20) for _ in range(placement.num_stages))
    made = setting(graph, placement, weights, capacities, random.choice(HINT_NAMES), rules=StepRules())
    assert random_walk(made, random.randrange).num_tasks


class Careless(Window):
    """Admits what fits, whether or not an older one will."""

    __slots__ = ()

    def admits(self, microbatch):
        return microbatch in self.held or self.load + self.weight(microbatch) <= self.limit


class Blind(Window):
    """Takes every microbatch for a light one."""

    __slots__ = ()

    def weight(self, microbatch):
        return 1

    @property
    def is_full(self):
        return len(self.held) >= self.limit

    def admits(self, microbatch):
        return microbatch in self.held or len(self.held) < self.limit


def with_window(kind):
    class Broken(StageArbiter):
        def _begin(self, ranked):
            super()._begin(ranked)
            if not self._window.is_even:
                self._window.__class__ = kind

        def validate(self):
            """Its invariant is what is left out here."""

    return Broken


def test_a_window_that_keeps_no_reserve_is_caught():
    # One encoder takes microbatch 0 and then has no room for 1, the other one 1 and then no room for 0.
    graph = small_graphs(3, 2)["two encoders"]
    row = tuple(Task(kind, 1, m) for kind in (TaskKind.F, TaskKind.B) for m in (1, 0))
    made = setting(graph, linear(3), ((3, 1),), (3, 3, 3), arbiter=with_window(Careless))
    made = replace(made, policies=(HINTS["bf"], schedule_hint(row), HINTS["bf"]))
    with pytest.raises(CheckError, match="deadlock"):
        explore(made)
    explore(replace(made, arbiter=StageArbiter))


def test_a_window_that_knows_no_weights_is_caught():
    made = setting(chain(2, 3), linear(2), ((3, 3, 3),), (3, 3), arbiter=with_window(Blind))
    with pytest.raises(CheckError, match=r"holds microbatches \[0, 1\], 6 of 3"):
        explore(made)
