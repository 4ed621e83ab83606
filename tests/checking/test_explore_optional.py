"""Optional inputs and frozen chunks explored: microbatches and whole steps without images, in every interleaving."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from rrfp_jax.core import HINTS, Agreement, AheadBound, StepRules
from rrfp_jax.schedules import PipelineGraph, Placement, TaskKind, linear
from tests.checking.guided import guided, random_rows
from tests.model_checker import Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, optional_graphs, skipped
from tests.model_checker.random_walk import random_walk

NAMES = list(optional_graphs(1))
HINT_NAMES = ("bf", "f-priority", "b-priority")
WITH_UPDATES = StepRules(agreement=Agreement.LOSS)


def patterns(graph: PipelineGraph):
    """What each of two steps lacks: nothing, then one microbatch's encoders; all of them, then nothing."""
    everything = range(graph.num_microbatches)
    some, nothing, all_text = skipped(graph, [1]), (), skipped(graph, everything)
    return [(some,), (all_text,), (all_text, nothing), (some, all_text)]


def placements(graph: PipelineGraph) -> list[Placement]:
    shared = [1, *[0] * (graph.num_chunks - 1)]
    return [linear(graph.num_chunks), Placement(tuple(shared[::-1])), Placement(tuple(shared))]


def ahead(graph: PipelineGraph, limit: int) -> tuple[AheadBound, ...]:
    return tuple(AheadBound(chunk=c, limit=limit) for c in range(graph.num_chunks) if graph.reads_ahead(c))


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", NAMES)
def test_ready(name, split):
    graph = optional_graphs(2, split=split)[name]
    for placement, lacking in product(placements(graph), patterns(graph)):
        rules = [PIPELINE_ONLY, replace(PIPELINE_ONLY, ordered=True)]
        for hint, rule in product(HINT_NAMES, rules if len(lacking) == 1 else [WITH_UPDATES]):
            explorer = Explorer()
            for window in (1, 2):
                explorer.explore(
                    Setting(
                        graph=graph,
                        placement=placement,
                        windows=(window,) * placement.num_stages,
                        policies=(HINTS[hint],) * placement.num_stages,
                        rules=rule,
                        absences=lacking,
                        read_ahead=ahead(graph, window),
                    )
                )


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", NAMES)
def test_tables_strictly_and_as_hints(name, split):
    graph = optional_graphs(2, split=split)[name]
    random = Random(name)
    for placement, lacking in product(placements(graph), patterns(graph)):
        rows = random_rows(graph, placement, random)
        made = guided(graph, placement, rows, absences=lacking, rules=WITH_UPDATES)
        explore(replace(made, policies=rows, footprints=(), foresight=None))
        explore(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "two encoders", "projector"])
def test_three_microbatches(name):
    graph = optional_graphs(3)[name]
    last = max(edge.source for edge in graph.edges if edge.is_optional)
    for lacking in (skipped(graph, [0]), skipped(graph, [0, 2]), skipped(graph, [1], encoders=[last])):
        for hint in HINT_NAMES:
            made = Setting(
                graph=graph,
                placement=linear(graph.num_chunks),
                windows=(2,) * graph.num_chunks,
                policies=(HINTS[hint],) * graph.num_chunks,
                rules=PIPELINE_ONLY,
                absences=(lacking,),
                read_ahead=ahead(graph, 1),
            )
            assert explore(made).num_states > 10


@pytest.mark.parametrize("seed", range(8))
def test_larger_pipelines_at_random(seed):
    random = Random(seed)
    graph = optional_graphs(10, split=seed % 2 == 1)[NAMES[seed % len(NAMES)]]
    steps = tuple(skipped(graph, random.sample(range(10), random.choice([0, 3, 7, 10]))) for _ in range(4))
    for placement in placements(graph):
        made = Setting(
            graph=graph,
            placement=placement,
            windows=(random.randint(1, 4),) * placement.num_stages,
            policies=(HINTS[random.choice(HINT_NAMES)],) * placement.num_stages,
            rules=StepRules(agreement=random.choice(list(Agreement))),
            absences=steps,
            read_ahead=ahead(graph, random.randint(1, 3)),
        )
        expected = sum(len(list(graph.skipping(absent).tasks())) for absent in steps)
        updates = 2 * len(steps) * sum(graph.trains(c) for c in range(graph.num_chunks))
        assert random_walk(made, random.randrange).num_tasks == expected + updates
        rows = random_rows(graph, placement, random)
        assert random_walk(guided(graph, placement, rows, absences=steps), random.randrange).num_tasks == expected


def test_what_the_graphs_mean():
    graph = optional_graphs(2)["projector alone trains"]
    assert [graph.kinds(c) for c in range(3)] == [(TaskKind.F,), (TaskKind.F, TaskKind.B), (TaskKind.F, TaskKind.B)]
    assert [graph.trains(c) for c in range(3)] == [False, True, False]
    assert skipped(graph, [1]) == ((0, 2), (1, 2))
    without = graph.skipping(skipped(graph, [0, 1]))
    assert {task.chunk for task in without.tasks()} == {2}
