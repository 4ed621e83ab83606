"""The plan of a step with absent pairs, taken out of the full plan, is what its graph would give from the start."""

import random
import tracemalloc
from itertools import product
from statistics import median
from time import process_time, thread_time

import pytest

from rrfp_jax.core import (
    HINTS,
    Agreement,
    Message,
    StageArbiter,
    StagePlan,
    StageSetup,
    StepPlan,
    StepRules,
    StepStarted,
    ready,
    stage_plan,
    strict,
)
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.schedules import Absences, PipelineGraph, Placement, absences, chain, linear, looped
from tests.model_checker.catalogue import small_graphs


def described(plan: StagePlan) -> dict[str, tuple[list[str], list[str]]]:
    """What each task and gate waits for, and what it sends, by name."""
    return {
        plan.name(node): (
            sorted(str(p) if isinstance(p, Message) else plan.name(p) for p in plan.prerequisites[node]),
            [f"{message} at stage {stage}" for message, stage in plan.sends[node]],
        )
        for node in range(plan.num_nodes)
        if node not in plan.absent
    }


def draw_absences(graph: PipelineGraph, number: int) -> Absences:
    absent: set[tuple[int, int]] = set()
    for _ in range(number):
        pairs = {(c, m) for m in [random.randrange(graph.num_microbatches)] for c in range(graph.num_chunks)}
        chosen = random.choice([pairs, *({pair} for pair in pairs)])
        try:
            graph.skipping(absences(absent | chosen))
        except ValueError:
            continue
        absent |= chosen
    return absences(absent)


GRAPHS = {
    **{f"{name} {split}": g for split in (False, True) for name, g in small_graphs(4, 4, split=split).items()},
    "tied": chain(4, 4, shared=((0, 3), (1, 2))),
    "replicas": replicated_graph(chain(4, 2, split=True), 2),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("ordered", [False, True])
def test_taking_out_is_the_same_as_building_anew(name: str, ordered: bool) -> None:
    random.seed(name)
    graph = GRAPHS[name]
    placements = [linear(4), looped(2, 2), Placement((0, 0, 0, 1))]
    if graph.num_chunks == 8:
        placements = [replicated_placement(placement, 2) for placement in placements]
    for placement, agreement, num_absent in product(placements, (Agreement.ALL, Agreement.LOSS), (1, 3, 10)):
        rules = StepRules(ordered=ordered, agreement=agreement, tree_degree=2)
        absent = draw_absences(graph, num_absent)
        for stage in range(placement.num_stages):
            full = stage_plan(graph, placement, stage, rules)
            before = described(full)
            for consumption in (ready(HINTS["bf"]), strict(tuple(graph.tasks(placement.chunks_of_stage[stage])))):
                taken_out = StepPlan(full, consumption).without(absent, graph, rules, consumption)
                anew = StepPlan(stage_plan(graph.skipping(absent), placement, stage, rules), consumption)
                assert described(taken_out.plan) == described(anew.plan)
                assert taken_out.plan.tasks_per_microbatch == anew.plan.tasks_per_microbatch
                assert len(taken_out.plan.arrivals) == len(anew.plan.arrivals)
                present = [full.tasks[n] for n in taken_out.at if n not in taken_out.plan.absent]
                assert present == [anew.plan.tasks[n] for n in anew.at]
                if consumption.is_strict:
                    assert len(taken_out.at) == len(anew.at)
            assert described(full) == before


def test_the_plans_of_a_thousand_units_are_small_and_soon_made() -> None:
    """16 chunks x 32 microbatches x 64 replicas: what grew with the square of the replicas took over a minute."""
    graph = chain(16, 32)
    start_s = process_time()
    large, placement = replicated_graph(graph, 64), replicated_placement(linear(16), 64)
    plans = [stage_plan(large, placement, stage, StepRules()) for stage in range(1024)]
    assert process_time() - start_s < 1
    assert sum(plan.num_nodes for plan in plans[::16]) == 64 * (64 + 2 + 4)
    assert all(len(plan.tasks_per_microbatch) == 32 for plan in plans)
    assert not large.exists(65, 0)
    assert large.exists(65, 32)
    tracemalloc.start()
    plans = [stage_plan(large, placement, stage, StepRules()) for stage in range(0, 1024, 16)]
    assert 16 * tracemalloc.get_traced_memory()[0] < 100 << 20
    tracemalloc.stop()


def test_another_pattern_of_absences_costs_the_loop_little() -> None:
    """16 stages x 192 microbatches, a fourth of which lack some chunk: the loop has to begin the step, and no more."""
    random.seed(0)
    graph, seconds = chain(16, 192), []
    for stage in range(16):
        arbiter = StageArbiter(StageSetup(graph, linear(16), stage, consumption=ready(HINTS["bf"]), window=32))
        for _ in range(5):
            absent = absences({(random.randrange(16), m) for m in random.sample(range(192), 48)})
            plan, taken = arbiter.plan_without(absent), arbiter.copy()
            start_s = thread_time()
            taken.prepare(plan)
            taken.handle(StepStarted(0, 0.0, plan.absent, plan.weights, plan.evaluates))
            seconds.append(thread_time() - start_s)
    assert median(seconds) < 1e-3
