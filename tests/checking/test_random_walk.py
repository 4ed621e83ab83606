"""Large random pipelines under random delays, reordering, duplicated messages and early steps."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core import HINTS, Agreement, GroupProtocol, StepRules, schedule_hint
from rrfp_jax.schedules import Edge, PipelineGraph, Placement, absences, chain, linear, looped
from tests.model_checker import Setting
from tests.model_checker.random_walk import random_walk


def random_placement(random, num_stages, most_chunks):
    chunks = [s for s in range(num_stages) for _ in range(random.randint(1, most_chunks))]
    random.shuffle(chunks)
    return Placement(tuple(chunks))


def random_edges(random, num_chunks):
    """A random graph in which every chunk but the first has a predecessor."""
    edges = {(random.randrange(max(0, c - 3), c), c) for c in range(1, num_chunks) if random.random() < 0.9}
    edges |= {tuple(sorted(random.sample(range(num_chunks), 2))) for _ in range(random.randint(0, 3)) if num_chunks > 1}
    return tuple(Edge(a, b, random.random() < 0.85) for a, b in sorted(edges))


def random_absences(random, graph):
    """Pairs that can be left out without leaving a chunk without input or an output without reader."""
    absent = set()
    for _ in range(random.choice((0, 0, 2, 8))):
        pair = (random.randrange(graph.num_chunks), random.randrange(graph.num_microbatches))
        try:
            graph.skipping(absences(absent | {pair}))
        except ValueError:
            continue
        absent.add(pair)
    return absences(absent)


def random_policies(random, graph, placement):
    hints = [HINTS[random.choice(list(HINTS))] for _ in range(placement.num_stages)]
    kind = random.choice(("one", "mixed", "tables"))
    if kind == "one":
        return tuple(hints[:1] * placement.num_stages)
    if kind == "mixed":
        return tuple(hints)
    rows = [random.sample(tasks, len(tasks)) for tasks in (list(graph.tasks(c)) for c in placement.chunks_of_stage)]
    return tuple(schedule_hint(row[: random.randint(0, len(row))]) for row in rows)


def random_graph(random, num_chunks, num_microbatches):
    edges = random_edges(random, num_chunks) if random.random() < 0.6 else chain(num_chunks, 1).edges
    split = frozenset(c for c in range(num_chunks) if random.random() < random.choice((0, 0.5, 1)))
    sharing = tuple(sorted(random.sample(range(num_chunks), min(num_chunks, random.randint(2, 3)))))
    shared = (sharing,) if len(sharing) > 1 and random.random() < 0.4 else ()
    graph = PipelineGraph(num_chunks, num_microbatches, edges, split=split, shared=shared)
    return graph.skipping(random_absences(random, graph))


def random_setting(random, *, most_stages=6, most_microbatches=12, most_chunks=3):
    placement = random_placement(random, random.randint(1, most_stages), most_chunks)
    graph = random_graph(random, placement.num_chunks, random.randint(1, most_microbatches))
    windows = [random.choice((1, 1, 2, 2, 3, 4, 8, 32)) for _ in range(placement.num_stages)]
    return Setting(
        graph=graph,
        placement=placement,
        windows=tuple(windows),
        policies=random_policies(random, graph, placement),
        rules=StepRules(
            ordered=random.random() < 0.5, updates=random.random() < 0.7, agreement=random.choice(list(Agreement))
        ),
        absences=tuple(random_absences(random, graph) for _ in range(random.randint(1, 3))),
        certain_ahead=random.random() < 0.5,
        decides_early=random.random() < 0.5,
        **random_groups(random, placement.num_stages),
    )


def random_groups(random, num_stages):
    if random.random() < 0.5:
        return {}
    return {
        "groups": tuple(random.choice((1, 2, 2, 3)) for _ in range(num_stages)),
        "protocol": random.choice((GroupProtocol.LEADER, GroupProtocol.PROPOSE)),
        "collective": random.random() < 0.7,
    }


def check(random, **sizes):
    setting = random_setting(random, **sizes)
    report = random_walk(setting, random.randrange)
    num_tasks = sum(len(list(setting.graph_of_step(step).tasks())) for step in range(setting.num_steps))
    assert report.num_tasks >= num_tasks
    assert report.num_events >= report.num_tasks + setting.num_steps * setting.num_stages


@given(st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_random_pipelines_shrinkable(random):
    check(random, most_stages=3, most_microbatches=4, most_chunks=2)


@pytest.mark.slow
@given(st.integers(0, 2**64))
@settings(max_examples=20)
def test_large_random_pipelines(seed):
    check(Random(seed))


@pytest.mark.slow
@given(st.integers(0, 2**64))
@settings(max_examples=2000)
@pytest.mark.timeout(1800)
def test_very_many_random_pipelines(seed):
    check(Random(seed))


def simple(**more):
    return Setting(graph=chain(4, 3), placement=looped(2, 2), windows=(2, 2), policies=(HINTS["bf"],) * 2, **more)


def test_the_same_draws_give_the_same_run():
    runs = [random_walk(simple(), Random(5).randrange) for _ in range(2)]
    assert runs[0] == runs[1] != random_walk(simple(), Random(6).randrange)


def test_a_walk_without_delays_or_copies_has_one_event_per_task_packet_and_start():
    report = random_walk(simple(rules=StepRules(updates=False, agreement=Agreement.NONE)), lambda n: 0)
    num_messages = 2 * 3 * 3
    assert report == (24 + num_messages + 2, 24, 0.0)


def test_steps_may_start_before_the_last_has_ended():
    report = random_walk(simple(absences=((),) * 3), lambda n: 0)
    assert report.num_tasks == 3 * (24 + 8)
    assert random_walk(simple(), lambda n: n - 1).makespan_s > 100


def test_strict_rows_walk_too():
    rows = tuple(tuple(chain(2, 2).tasks([c])) for c in (0, 1))
    strict_setting = Setting(graph=chain(2, 2), placement=linear(2), windows=(1, 1), policies=rows)
    assert random_walk(strict_setting, Random(1).randrange).num_tasks == 8 + 4
