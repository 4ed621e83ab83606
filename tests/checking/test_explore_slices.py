"""Every interleaving of small pipelines whose sequences run in slices: passes, and edges of keys and values."""

from dataclasses import replace
from itertools import combinations, product
from random import Random

import numpy as np
import pytest

from rrfp_jax.core import HINTS, Agreement, GroupProtocol, Ordering, StageArbiter, StepRules
from rrfp_jax.core.replicas import StepOwners, replicated_graph, replicated_placement
from rrfp_jax.schedules import (
    KEYS,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    absences,
    build_schedule,
    chain,
    linear,
    looped,
    sliced_chain,
)
from rrfp_jax.simulation import Costs, simulate
from tests.checking.guided import by_table
from tests.model_checker import CheckError, Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, all_hints, all_windows
from tests.model_checker.random_walk import random_walk

BF, BF_DEEP = HINTS["bf"], HINTS["bf-deep"]
ORDERED_OR_NOT = pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])


def pipeline(p: int, n: int, m: int, *, per_stage: int = 1) -> tuple[PipelineGraph, Placement]:
    return sliced_chain(chain(p * per_stage, m), n), looped(p, per_stage).repeated(n)


def without_keys(graph: PipelineGraph, num_slices: int, chunks: set[int]) -> PipelineGraph:
    """Returns a graph of slices where these chunks have no attention, so that their slices read no others."""
    edges = tuple(edge for edge in graph.edges if edge.part != KEYS or edge.source // num_slices not in chunks)
    return replace(graph, edges=edges, losses=graph.losses & {edge.source for edge in edges})


def setting(graph: PipelineGraph, placement: Placement, *, window: int = 1, hint=BF_DEEP, **more) -> Setting:
    stages = placement.num_stages
    words = {"windows": (window,) * stages, "policies": (hint,) * stages, "rules": PIPELINE_ONLY} | more
    return Setting(graph=graph, placement=placement, **words)


def tables(p: int, n: int, m: int):
    """The schedules of slices, and those of any graph."""
    for name in ("seq1f1b", "1f1b", "gpipe", "zb-h1"):
        yield build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m, slices=n))


# -- no deadlock, from a window of one sequence on ---------------------------------------------------------------------

SMALL = [(2, 2, 2), (3, 2, 1), (2, 3, 2), (3, 3, 1)]
LARGER = [(2, 2, 3), (2, 3, 3), (3, 2, 2), (3, 3, 2), (3, 2, 3)]
"""Stages, slices, microbatches."""


def explore_everything(p: int, n: int, m: int, ordered: bool, *, windows=None) -> int:
    graph, placement = pipeline(p, n, m)
    rules, most = replace(PIPELINE_ONLY, ordered=ordered), 0
    for policies in all_hints(graph, placement, ()):
        explorer = Explorer()
        for window in all_windows(placement, m) if windows is None else windows:
            report = explorer.explore(setting(graph, placement, windows=window, policies=policies, rules=rules))
            most = max(most, report.num_states)
    return most


@ORDERED_OR_NOT
@pytest.mark.parametrize("size", [*SMALL, *(pytest.param(size, marks=pytest.mark.slow) for size in LARGER)], ids=str)
def test_every_hint_and_window(size: tuple[int, int, int], ordered: bool) -> None:
    assert explore_everything(*size, ordered) > 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@ORDERED_OR_NOT
def test_the_largest_pipeline(ordered: bool) -> None:
    windows = [(1, 1, 1), (2, 2, 2), (1, 2, 3), (3, 2, 1), (3, 3, 3)]
    assert explore_everything(3, 3, 3, ordered, windows=windows) > 50_000


@ORDERED_OR_NOT
@pytest.mark.parametrize("window", [1, 2])
def test_two_chunks_per_stage(window: int, ordered: bool) -> None:
    rules = StepRules(ordered=ordered, agreement=Agreement.LOSS)
    for hint in (BF, BF_DEEP):
        explore(setting(*pipeline(2, 2, 2, per_stage=2), window=window, hint=hint, rules=rules))


@ORDERED_OR_NOT
def test_split_backward_frozen_chunks_and_chunks_without_attention(ordered: bool) -> None:
    base, rules = chain(2, 2), StepRules(ordered=ordered)
    for graph, lacking in (
        (chain(2, 2, split=True), set()),
        (replace(base, frozen=frozenset({0})), set()),
        (replace(base, frozen=frozenset({1}), split=frozenset({0})), set()),
        (base, {1}),
        (replace(base, shared=((0, 1),)), {0}),
    ):
        sliced = without_keys(sliced_chain(graph, 2), 2, lacking)
        explore(setting(sliced, linear(2).repeated(2), window=2, hint=HINTS["bfw"], rules=rules))


@pytest.mark.parametrize("lengths", [(), (3, 1)], ids=str)
def test_tables_with_foresight_and_strictly(lengths: tuple[int, ...]) -> None:
    for table in tables(2, 2, 2):
        graph = sliced_chain(chain(2, 2, split=bool(table.graph.split)), 2, lengths=lengths)
        explore(by_table(replace(table, graph=graph)))
        explore(setting(graph, table.placement, policies=table.orders))


@pytest.mark.parametrize("size", [(2, 2, 1), pytest.param((2, 2, 3), marks=pytest.mark.slow)], ids=str)
def test_slimpipe(size: tuple[int, int, int]) -> None:
    """With two chunks per stage."""
    p, n, m = size
    explore(by_table(build_schedule("slimpipe", ScheduleRequest(num_stages=p, num_microbatches=m, slices=n)), extra=1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [(2, 3, 3), (3, 2, 2), (3, 3, 2)], ids=str)
def test_tables_of_larger_pipelines(size: tuple[int, int, int]) -> None:
    for table in tables(*size):
        explore(by_table(table))


# -- a deterministic order, with absent pairs and other owners ---------------------------------------------------------


def test_steps_that_lack_a_microbatch() -> None:
    graph, placement = pipeline(2, 2, 2)
    rules = StepRules(ordered=True, agreement=Agreement.LOSS)
    lacking = [absences((c, m) for c in range(graph.num_chunks)) for m in range(2)]
    for absent in product(((), *lacking), repeat=2):
        explore(setting(graph, placement, window=2, rules=rules, absences=absent))


@pytest.mark.parametrize("by_messages", [False, True], ids=["together", "by-messages"])
def test_replicas_and_other_owners(by_messages: bool) -> None:
    base, placement = pipeline(2, 2, 1)
    graph, placed = replicated_graph(base, 2), replicated_placement(placement, 2)
    rules = StepRules(ordered=True, agreement=Agreement.LOSS, by_messages=by_messages)
    explore(setting(graph, placed, rules=rules))
    quiet = replace(rules, updates=False, agreement=Agreement.NONE)
    for rows in product(product(range(2), repeat=2), repeat=2):
        explore(setting(graph, placed, rules=quiet, owners=(StepOwners(rows),)))


# -- broken ------------------------------------------------------------------------------------------------------------


def without(removed: tuple[int, int]) -> type[StageArbiter]:
    """Arbiters that do not know of an edge."""

    class Forgets(StageArbiter):
        def __init__(self, setup):
            kept = tuple(edge for edge in setup.graph.edges if edge[:2] != removed)
            assert len(kept) == len(setup.graph.edges) - 1
            super().__init__(replace(setup, graph=replace(setup.graph, edges=kept, losses=frozenset())))

    return Forgets


@pytest.mark.parametrize(("p", "n"), [(1, 2), (2, 2), (2, 3)])
def test_a_removed_edge_of_keys_is_found(p: int, n: int) -> None:
    """A slice then runs before the one whose keys it attends to, or its backward after that one's."""
    graph, placement = pipeline(p, n, 1)
    for edge in graph.edges:
        if edge.part == KEYS and edge.target == edge.source + 1:
            with pytest.raises(CheckError, match=rf"runs ({edge.target}F0 before {edge.source}F0|.B0 before .B0)"):
                explore(setting(graph, placement, arbiter=without(edge[:2])))


def test_keys_of_slices_further_back_come_in_time_by_those_between() -> None:
    """No order shows that such an edge is missing: there it is the part that does not come."""
    graph, placement = pipeline(2, 3, 1)
    explore(setting(graph, placement, arbiter=without((0, 2))))


def test_gradients_of_passes_in_another_order_are_found() -> None:
    """Without attention nothing else keeps the passes of a chunk apart."""
    graph, placement = pipeline(1, 2, 1)
    graph = without_keys(graph, 2, {0})

    class Unordered(StageArbiter):
        def __init__(self, setup):
            super().__init__(replace(setup, rules=replace(setup.rules, ordered=False)))

    rules = replace(PIPELINE_ONLY, ordered=True)
    explore(setting(graph, placement, rules=rules, hint=BF))
    with pytest.raises(CheckError, match="runs 0B0 before 1B0"):
        explore(setting(graph, placement, rules=rules, hint=HINTS["b-priority"], arbiter=Unordered))


# -- random walks, and wild durations ----------------------------------------------------------------------------------


def random_setting(random: Random) -> Setting:
    p, n, m, per_stage = (random.choice(sizes) for sizes in ((1, 2, 3, 4), (2, 3, 4), (1, 2, 3, 5), (1, 1, 2)))
    lengths = [random.randint(1, 9) for _ in range(n)]
    lacking = {c for c in range(p * per_stage) if random.random() >= random.choice((0.5, 1, 1))}
    base = chain(p * per_stage, m, split=random.random() < 0.4)
    graph = without_keys(sliced_chain(base, n, lengths=lengths), n, lacking)
    hints = [HINTS[random.choice(list(HINTS))] for _ in range(p)]
    more = {"groups": tuple(random.choice((1, 2)) for _ in range(p))} if random.random() < 0.3 else {}
    return setting(
        graph,
        looped(p, per_stage).repeated(n),
        windows=tuple(random.choice((1, 1, 2, 3)) for _ in range(p)),
        policies=tuple(hints),
        rules=StepRules(ordered=random.random() < 0.5, agreement=random.choice(list(Agreement))),
        absences=((),) * random.randint(1, 3),
        certain_ahead=random.random() < 0.5,
        decides_early=random.random() < 0.5,
        protocol=random.choice((GroupProtocol.LEADER, GroupProtocol.PROPOSE)),
        **more,
    )


def walk(seed: int) -> None:
    random = Random(seed)
    random_walk(random_setting(random), random.randrange)


def test_some_random_walks() -> None:
    for seed in range(40):
        walk(seed)


@pytest.mark.slow
def test_many_random_walks() -> None:
    for seed in range(40, 1000):
        walk(seed)


def simulated(seed: int) -> None:
    """Raises RuntimeError where stages wait for each other."""
    random, rng = Random(seed), np.random.default_rng(seed)
    p, n, m = random.choice((2, 3, 4)), random.choice((2, 3, 4)), random.choice((1, 2, 3, 5))
    graph, placement = pipeline(p, n, m)
    windows = tuple(random.choice((1, 1, 2, 3)) for _ in range(p))
    order = Ordering(hint=random.choice(list(HINTS)), window=windows).resolve(placement, graph)
    durations_ms = rng.pareto(0.7, size=(4, graph.num_chunks, m, 3)) + 0.01
    arbiters = order.arbiters(StepRules(ordered=random.random() < 0.5, agreement=random.choice(list(Agreement))))
    simulate(arbiters, Costs(durations_ms=durations_ms, update_ms=0.3), num_steps=4)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 300), marks=pytest.mark.slow)], ids=len)
def test_no_run_with_wild_durations_gets_stuck(seeds: range) -> None:
    for seed in seeds:
        simulated(seed)


def test_edges_of_keys_are_those_of_all_pairs_of_slices() -> None:
    graph, _ = pipeline(2, 4, 1)
    keys = {edge[:2] for edge in graph.edges if edge.part == KEYS}
    assert keys == {(4 * c + q, 4 * c + later) for c in range(2) for q, later in combinations(range(4), 2)}
