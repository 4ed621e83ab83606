"""Read-ahead explored: every interleaving of small graphs with frozen encoders, bounds, windows, hints and tables."""

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from rrfp_jax.core import HINTS, Agreement, AheadBound, GroupProtocol, MessageKind, StageArbiter, StepRules
from rrfp_jax.core.memory import Window, holding_turns, peak_of_turns, turns_of_table
from rrfp_jax.schedules import Edge, PipelineGraph, Placement, Task, TaskKind, linear, looped
from rrfp_jax.schedules.table import execution_order
from tests.checking.guided import guided, random_rows
from tests.model_checker import CheckError, Explorer, Setting, explore, replay
from tests.model_checker.catalogue import PIPELINE_ONLY, ahead_settings, small_graphs
from tests.model_checker.random_walk import random_walk

DEEP = PipelineGraph(3, 3, (Edge(0, 1, False), Edge(0, 2, False), Edge(1, 2)))
"""An encoder that two chunks of the decoder read."""
TOWER = PipelineGraph(3, 3, (Edge(0, 1), Edge(1, 2)), frozen=frozenset({0, 1}))
"""An encoder of two chunks."""
SPLIT_TOWER = replace(TOWER, split=frozenset({0, 1, 2}))
SKIPPING = PipelineGraph(3, 3, (Edge(0, 2, False, True), Edge(1, 2, False, True)), absent=((0, 1), (1, 0b110)))
"""Two encoders, which the decoder does without where they are absent."""

CASES = {
    "own stage": (small_graphs(2, 3)["frozen first chunk"], linear(2)),
    "split": (small_graphs(2, 3, split=True)["frozen first chunk"], linear(2)),
    "shared stage": (small_graphs(3, 3)["frozen first chunk"], Placement((0, 0, 1))),
    "two encoders": (small_graphs(3, 2)["two encoders, one frozen"], linear(3)),
    "two readers": (DEEP, linear(3)),
    "two readers, one at home": (DEEP, Placement((0, 0, 1))),
    "tower": (TOWER, linear(3)),
    "tower on one stage": (SPLIT_TOWER, Placement((0, 0, 1))),
    "tower around": (small_graphs(4, 2)["frozen first chunk"], looped(2, 2)),
    "skipping": (SKIPPING, linear(3)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_hint_window_and_bound(name):
    num_explored = 0
    for settings in ahead_settings(*CASES[name], PIPELINE_ONLY):
        explorer = Explorer()
        for setting in settings:
            num_explored += explorer.explore(setting).num_states
    assert num_explored > 100


def setting(graph=DEEP, placement=None, limits=(1,), windows=2, hint="bf", **more):
    placement = placement or linear(graph.num_chunks)
    chunks = [c for c in range(graph.num_chunks) if graph.reads_ahead(c)]
    bounds = tuple(AheadBound(chunk=c, limit=limit) for c, limit in zip(chunks, limits, strict=True))
    return Setting(
        graph=graph,
        placement=placement,
        windows=(windows,) * placement.num_stages,
        policies=(HINTS[hint],) * placement.num_stages,
        rules=more.pop("rules", PIPELINE_ONLY),
        read_ahead=more.pop("read_ahead", bounds),
        **more,
    )


TWO = small_graphs(2, 3)["frozen first chunk"]


@pytest.mark.parametrize(
    "more",
    [
        {"certain_ahead": True},
        {"decides_early": True},
        {"rules": StepRules(agreement=Agreement.NONE), "absences": ((), ((0, 1), (1, 1)))},
        {"rules": StepRules(), "absences": ((), ())},
        {"groups": (2, 1)},
        {"groups": (2, 2), "collective": False},
        {"groups": (2, 1), "protocol": GroupProtocol.PROPOSE},
        {"policies": "strict"},
    ],
    ids=",".join,
)
@pytest.mark.parametrize("limit", [1, 2])
def test_every_way_to_drive_a_stage(more, limit):
    graph = replace(TWO, num_microbatches=2) if "groups" in more or "absences" in more else TWO
    if more.get("policies"):
        rows = random_rows(graph, linear(2), Random(7))
        made = replace(setting(graph, limits=(limit,)), policies=rows)
    else:
        made = setting(graph, limits=(limit,), **more)
    assert explore(made).num_states > 10


@pytest.mark.parametrize("name", ["own stage", "two readers", "tower"])
def test_without_reductions(name):
    graph, placement = CASES[name]
    graph = replace(graph, num_microbatches=2)
    limits = (1,) * sum(map(graph.reads_ahead, range(graph.num_chunks)))
    made = setting(graph, placement, limits)
    full, reduced = explore(made, reduced=False), explore(made)
    assert full.num_states > reduced.num_states


# -- tables ------------------------------------------------------------------------------------------------------------


def bounds_of(graph, rows, extra=0, *, by_number=False):
    order, _ = execution_order(graph, rows)
    named = {chunk: () if by_number else found for chunk, found in turns_of_table(graph, order).items()}
    return tuple(
        AheadBound(chunk=chunk, limit=peak_of_turns(holding_turns(graph.range_of(chunk), found)) + extra, turns=found)
        for chunk, found in named.items()
    )


@pytest.mark.parametrize("foresight", [False, True])
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_random_tables_in_their_footprint(name, extra, foresight):
    graph, placement = CASES[name]
    random = Random(f"{name} {extra}")
    for _ in range(3):
        rows = random_rows(graph, placement, random)
        explore(guided(graph, placement, rows, foresight=foresight, read_ahead=bounds_of(graph, rows, extra)))


def test_every_order_of_encoder_and_decoder():
    explorer = Explorer()
    for ahead in permutations(range(3)):
        for behind in permutations(range(3)):
            rows = (
                tuple(Task(TaskKind.F, 0, m) for m in ahead),
                tuple(Task(kind, 1, m) for m in behind for kind in (TaskKind.F, TaskKind.B)),
            )
            explorer.explore(guided(TWO, linear(2), rows, read_ahead=bounds_of(TWO, rows)))


def test_turns_by_number_would_deadlock_with_another_table():
    rows = (
        tuple(Task(TaskKind.F, 0, m) for m in range(3)),
        tuple(Task(kind, 1, m) for m in (1, 2, 0) for kind in (TaskKind.F, TaskKind.B)),
    )
    with pytest.raises(CheckError, match="deadlock"):
        explore(guided(TWO, linear(2), rows, foresight=False, read_ahead=bounds_of(TWO, rows, by_number=True)))


# -- random walks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_larger_pipelines_at_random(seed):
    random = Random(seed)
    draw = random.randrange
    graph, placement = [
        (small_graphs(4, 12)["two encoders, one frozen"], linear(4)),
        (PipelineGraph(4, 12, (Edge(0, 1), Edge(1, 2), Edge(1, 3), Edge(2, 3)), frozen=frozenset({0, 1})), linear(4)),
        (small_graphs(6, 8, split=True)["two encoders, one frozen"], looped(3, 2)),
    ][seed % 3]
    limits = tuple(random.randint(1, 3) for c in range(graph.num_chunks) if graph.reads_ahead(c))
    rules, steps = StepRules(agreement=[Agreement.NONE, Agreement.ALL][seed % 2]), ((), (), ())
    named = setting(graph, placement, limits, windows=random.randint(1, 4), rules=rules, absences=steps)
    assert random_walk(replace(named, decides_early=seed % 2 == 1), draw).num_tasks
    rows = random_rows(graph, placement, random)
    by_table = guided(graph, placement, rows, read_ahead=bounds_of(graph, rows, seed % 2), rules=rules, absences=steps)
    assert random_walk(by_table, draw).num_tasks


# -- broken arbiters ---------------------------------------------------------------------------------------------------


class WithoutReserve(Window):
    """Admits whatever finds room, whether or not the oldest finds any later."""

    __slots__ = ()

    def admits(self, microbatch):
        return microbatch in self.held or self.load < self.limit


class Greedy(StageArbiter):
    def _begin(self, ranked):
        super()._begin(ranked)
        for reserve in self._ahead.windows if self._ahead else ():
            reserve.__class__ = WithoutReserve

    def validate(self):
        """Its invariant is what is left out here."""


class Unbounded(StageArbiter):
    def _begin(self, ranked):
        super()._begin(ranked)
        for reserve in self._ahead.windows if self._ahead else ():
            reserve.limit += 1

    def validate(self):
        """As above."""


class Deaf(StageArbiter):
    """Never hears that something was taken elsewhere."""

    def _arrive(self, event, out):
        ahead = self._ahead
        if event.message.kind is MessageKind.TAKEN:
            self._ahead = None
        super()._arrive(event, out)
        self._ahead = ahead

    def validate(self):
        """As above."""


@pytest.mark.parametrize(
    ("arbiter", "demand_work", "why"),
    [
        (Greedy, True, "deadlock"),
        (Unbounded, True, "outputs of 2 have not been taken"),
        (Deaf, True, "idles although"),
        (Deaf, False, "deadlock"),
    ],
)
def test_broken_arbiters_are_caught(arbiter, demand_work, why):
    made = replace(setting(TOWER, limits=(2, 1), arbiter=arbiter), windows=(2, 2, 1))
    with pytest.raises(CheckError, match=why) as caught:
        explore(made, demand_work=demand_work)
    assert len(list(replay(made, caught.value.trace))) == len(caught.value.trace)
    explore(replace(made, arbiter=StageArbiter), demand_work=demand_work)
