"""Large random pipelines with random operations: tables and hints, memory from the rows' own peak up, random delays."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rrfp_jax.core import HINTS, ForesightRules, StepRules
from rrfp_jax.core.plan import Agreement
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.schedules import Op
from tests.checking.guided import random_rows
from tests.checking.operated import by_hint, by_row, peak, strictly
from tests.checking.test_random_walk import random_absences, random_graph, random_placement
from tests.model_checker.operations import Operations
from tests.model_checker.random_walk import random_walk

LANES = ("compute", "d2h", "h2d", "d2h", "h2d", "net")
PARTS = (0.25, 0.5, 0.5, 1.0)


def random_ops(random, graph):
    """Some operations that fit the graph."""
    ops = ()
    for number in range(random.choice((1, 1, 2, 3))):
        for _ in range(20):
            drawn = random_op(random, graph, "ACEDGH"[number] * (1 + number))
            try:
                replace(graph, ops=(*ops, *drawn))
            except ValueError:
                continue
            ops = (*ops, *drawn)
            break
    return ops


def random_op(random, graph, letter):
    """One operation, or two that belong together; they may not fit."""
    part, lane = random.choice(PARTS), random.choice(LANES)
    chunks = [c for c in range(graph.num_chunks) if graph.has_backward(c)]
    chunks = frozenset(random.sample(chunks, random.randint(1, len(chunks)))) if chunks else None
    pairs = None
    if random.random() < 0.5 and chunks:
        every = [(c, m) for c in chunks for m in graph.microbatches(c)]
        pairs = frozenset(random.sample(every, random.randint(1, len(every)))) if every else None
    where = {"chunks": chunks, "pairs": pairs}
    kind = random.choice(("offload", "offload", "offload", "recompute", "workspace", "plain", "once"))
    if kind == "offload":
        out = Op(letter + "O", after="F", lane=lane, frees=part, **where)
        back = random.choice(("B", "B", "W"))
        return out, Op(letter + "L", after=out, before=back, lane=random.choice(LANES), holds=part, **where)
    if kind == "recompute":
        return (Op(letter, after="F", before="B", lane=lane, holds=part, **where),)
    if kind == "workspace":
        return (Op(letter, after=random.choice("FB"), lane=lane, holds=part, frees=part, **where),)
    words = {"after": random.choice(("F", "B", "I", ())), "before": random.choice(("F", "B", "W", ()))}
    if words == {"after": (), "before": ()}:
        words = {"after": "F"}
    if kind == "plain":
        return (Op(letter, lane=lane, **words, **where),)
    words = random.choice([words, {"after": "R"}, {"after": "U"}, {"after": "B", "before": "U"}])
    return (Op(letter, lane=lane, per=random.choice(("chunk", "step")), chunks=chunks, **words),)


def random_rules(random, ordered):
    return StepRules(ordered=ordered, updates=random.random() < 0.7, agreement=random.choice(list(Agreement)))


def random_setting(random, *, most_stages=4, most_microbatches=8, most_chunks=3):
    placement = random_placement(random, random.randint(1, most_stages), most_chunks)
    graph = random_graph(random, placement.num_chunks, random.randint(1, most_microbatches))
    graph = replace(graph, ops=random_ops(random, graph))
    if random.random() < 0.15 and graph.num_chunks < 6:
        graph, placement = replicated_graph(graph, 2), replicated_placement(placement, 2)
    ordered = random.random() < 0.4
    more = {
        "rules": random_rules(random, ordered),
        "absences": tuple(random_absences(random, graph) for _ in range(random.randint(1, 3))),
        "decides_early": random.random() < 0.5,
    }
    kind = random.choice(("strict", "row", "foresight", "hint", "hint"))
    if kind == "hint":
        setting = by_hint(graph, placement, random.choice(list(HINTS)), window=random.choice((1, 1, 2, 3)), **more)
        needed = [peak(graph, setting.memory_row(stage)) for stage in range(placement.num_stages)]
        return replace(setting, footprints=tuple(map(max, setting.footprints, needed)) if setting.footprints else ())
    rows = random_rows(graph, placement, random, ordered=ordered)
    make = strictly if kind == "strict" else by_row
    setting = make(graph, placement, rows, **more)
    extra = int(random.choice((0, 0, 0.25, 0.5, 1, 3)) * Operations(graph).unit)
    foresight = ForesightRules() if kind == "foresight" else None
    return replace(setting, footprints=tuple(units + extra for units in setting.footprints), foresight=foresight)


def check(random, *, in_groups=False, **sizes):
    setting = random_setting(random, **sizes)
    if in_groups:
        groups = tuple(random.choice((1, 2, 2, 3)) for _ in range(setting.num_stages))
        setting = replace(setting, groups=groups, collective=random.random() < 0.7)
        if setting.graph.num_replicas > 1:
            # A member behind the others may run R behind a backward that is about to end, as the others' word is here.
            setting = replace(setting, decides_early=False)
    report = random_walk(setting, random.randrange)
    steps = [setting.graph_of_step(number) for number in range(setting.num_steps)]
    assert report.num_tasks >= sum(len(list(graph.tasks())) for graph in steps)


@given(st.randoms(use_true_random=False))
@settings(max_examples=12)
def test_random_pipelines_shrinkable(random):
    check(random, most_stages=2, most_microbatches=3, most_chunks=2)


@given(st.integers(0, 2**64))
@example(2776)  # an operation per step, kept to a table's order, and a step that lacks pairs
@example(35910)  # an engine takes memory while a task of the compute lane is about to end
@settings(max_examples=8)
def test_large_random_pipelines(seed):
    check(Random(seed))


@given(st.integers(0, 2**64))
@settings(max_examples=4)
def test_random_groups(seed):
    check(Random(seed), in_groups=True, most_stages=3, most_microbatches=5)


@pytest.mark.slow
@pytest.mark.parametrize("in_groups", [False, True], ids=["stages", "groups"])
@given(seed=st.integers(0, 2**64))
@settings(max_examples=3000)
@pytest.mark.timeout(1800)
def test_very_many_random_pipelines(in_groups, seed):
    check(Random(seed), in_groups=in_groups)
