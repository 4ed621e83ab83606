"""Every interleaving of small pipelines with operations: engines beside compute, and memory that they take and free."""

from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

import pytest

from rrfp_jax.core import HINTS, Agreement, GroupProtocol, StageArbiter, StepRules, group_arbiter
from rrfp_jax.core.groups import FollowingMember, LeadingMember, ProposingMember
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.runtime.operations import offload as moving
from rrfp_jax.schedules import (
    Edge,
    Op,
    PipelineGraph,
    ScheduleRequest,
    Task,
    TaskKind,
    absences,
    build_schedule,
    chain,
    linear,
    looped,
    schedule_entry,
    schedule_names,
    v_shaped,
    with_operations,
)
from tests.checking.guided import random_rows
from tests.checking.operated import ONE, TWO, by_hint, by_row, offload, recompute, strictly, with_ops
from tests.checking.test_reductions import check_same
from tests.model_checker import CheckError, Explorer, Setting, explore
from tests.model_checker.operations import Operations

LANES = pytest.mark.parametrize("lanes", [TWO, ONE], ids=["two engines", "one engine"])
SPLIT_OR_NOT = pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
WAYS = [strictly, by_row]
"""The row is kept to, or ranks what is ready, with every hold that foresight might choose."""


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def tables(size, ops, names=None):
    """The graph, placement and rows of registered schedules of whole sequences of this size, with operations."""
    num_stages, per_stage, num_microbatches = size
    request = ScheduleRequest(num_stages=num_stages, num_microbatches=num_microbatches, chunks_per_stage=per_stage)
    for name in names or [name for name in schedule_names() if not schedule_entry(name).shape.is_sliced]:
        try:
            table = with_operations(build_schedule(name, request), ops)
        except ValueError:
            continue
        yield table.graph, table.placement, table.orders


def table(name, num_stages, num_microbatches, ops):
    built = build_schedule(name, ScheduleRequest(num_stages=num_stages, num_microbatches=num_microbatches))
    made = with_operations(built, ops)
    return made.graph, made.placement, made.orders


def drawn(graph, placement, number):
    return graph, placement, random_rows(graph, placement, Random(number))


SIZES = [(1, 1, 3), (2, 1, 2), (2, 1, 3), (3, 1, 2), (3, 1, 3), (2, 1, 4), (1, 2, 3), (2, 2, 2), (2, 2, 3), (3, 2, 2)]
"""Stages, chunks of each, microbatches."""


# -- activations that go elsewhere and come back -----------------------------------------------------------------------


@LANES
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_schedule_from_its_own_peak_up(name, lanes):
    for lead, extra, way in product((0, 1), (0, 1), WAYS):
        (given,) = tables((2, 1, 2), offload(lanes=lanes, lead=lead), [name])
        explore(way(*given, extra=extra))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@LANES
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_schedule_from_its_own_peak_up(size, lanes):
    found = [given for lead in (0, 1, 2) for given in tables(size, offload(lanes=lanes, lead=lead))]
    assert len(found) >= 9
    for number, (given, way) in enumerate(product(found, WAYS)):
        explore(way(*given))
        if size[0] < 3 or not number % 3:
            explore(way(*given, extra=1))


@LANES
@pytest.mark.parametrize(
    ("name", "num_microbatches", "slots"),
    [("gpipe", 3, 1), ("hanayo", 2, 1), ("breadth-first", 2, 1), ("interleaved-1f1b-split", 2, 1)],
)
def test_ways_back_that_wait_for_ways_out(name, num_microbatches, slots, lanes):
    plain = build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=num_microbatches))
    made = moving(plain, slots, copy_ms=0.01, lanes=lanes)
    assert any(op.waits for op in made.graph.ops)
    for rows, way, extra in product(filter(None, (made, made.hint)), WAYS, (0, 1)):
        explore(way(made.graph, made.placement, rows.orders, extra=extra))


@LANES
@SPLIT_OR_NOT
@pytest.mark.parametrize("size", [(2, 1, 2), *slow((2, 1, 3), (3, 1, 3), (2, 2, 2))], ids=str)
def test_any_row_with_copies_of_some_microbatches(size, split, lanes):
    """Rows drawn at random, in which copies stand anywhere between what they come after and before."""
    num_stages, per_stage, num_microbatches = size
    placement = looped(num_stages, per_stage)
    plain = chain(placement.num_chunks, num_microbatches, split=split)
    every = [(c, m) for c in range(plain.num_chunks) for m in range(num_microbatches)]
    for number in range(4):
        pairs = frozenset(Random(number).sample(every, len(every) // 2 + number % 2))
        graph = with_ops(plain, offload(pairs if number else None, lanes=lanes, part=(1.0, 0.5)[number % 2]))
        for way in WAYS:
            explore(way(*drawn(graph, placement, number)))


@LANES
@SPLIT_OR_NOT
@pytest.mark.parametrize("name", ["bf", "f-priority", *slow(*sorted(HINTS.keys() - {"bf", "f-priority"}))])
def test_hints_reserve_memory_microbatch_by_microbatch(name, split, lanes):
    for ops in (
        offload(lanes=lanes),
        offload(lanes=lanes, part=0.5),
        offload(frozenset({(0, 0), (1, 1)}), lanes=lanes),
    ):
        for window in (1, 2):
            explore(by_hint(with_ops(chain(2, 2 + (not split), split=split), ops), linear(2), name, window=window))


@LANES
def test_hints_with_two_chunks_on_a_stage(lanes):
    for name, placement in product(("bf", "fb"), (looped(1, 2), v_shaped(1))):
        explore(by_hint(with_ops(chain(2, 3), offload(lanes=lanes)), placement, name))
    explore(by_hint(with_ops(chain(4, 2), offload(lanes=lanes)), looped(2, 2), "bf-deep"))


@pytest.mark.slow
@LANES
@SPLIT_OR_NOT
@pytest.mark.parametrize("name", list(HINTS))
@pytest.mark.parametrize("size", [(2, 1, 4), (3, 1, 3), (2, 2, 2), (2, 2, 3)], ids=str)
def test_hints_in_larger_pipelines(size, name, split, lanes):
    num_stages, per_stage, num_microbatches = size
    for placement, window in product({looped(num_stages, per_stage), linear(num_stages)}, (1, 2)):
        graph = with_ops(chain(placement.num_chunks, num_microbatches, split=split), offload(lanes=lanes))
        explore(by_hint(graph, placement, name, window=window))


# -- other operations --------------------------------------------------------------------------------------------------


SCRATCH = (Op("S", after="F", holds=0.5, frees=0.5),)
BESIDE = (Op("S", after="F", lane="net", holds=0.5, frees=0.5),)
PREFETCH = (Op("P", before="F", lane="net", holds=0.5),)
CHAINED = (Op("L", after="F", before="B", lane="h2d", holds=1.0), Op("X", after="L", before="B", frees=0.5))
TWICE = (*offload(part=0.5), Op("OO", after="F", lane="d2h", frees=0.5), Op("LL", after="OO", before="B", holds=0.5))


@SPLIT_OR_NOT
@pytest.mark.parametrize(
    "ops",
    [recompute(), SCRATCH, BESIDE, PREFETCH, CHAINED, *slow(TWICE)],
    ids=lambda ops: "".join(op.letter for op in ops),
)
def test_what_takes_memory_waits_for_it_on_any_lane(ops, split):
    graph = with_ops(chain(2, 2, split=split), ops)
    for number, way in product(range(2), WAYS):
        explore(way(*drawn(graph, linear(2), number)))
    for name, window in product(("bf", "f-priority"), (2, 3)):
        explore(by_hint(graph, linear(2), name, window=window))


def test_forwards_that_take_unlike_parts_pass_each_other():
    """What a microbatch with little of its own takes may fit where another one, before it in the row, does not."""
    graph = with_ops(chain(2, 3), recompute(0.75)[:1])
    (again,) = graph.ops
    graph = with_ops(chain(2, 3), (replace(again, pairs=frozenset({(0, 2)})),))
    row = tuple(map(Task.parse, ["0F0", "0B0", "0F1", "0F2", "0B1", "0C2", "0B2"]))
    other = tuple(map(Task.parse, ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]))
    setting = by_row(graph, linear(2), (row, other), foresight=False)
    explore(setting)
    explore(replace(setting, footprints=(setting.footprints[0] + 1, setting.footprints[1])))


ONCE = [
    *(Op("G", before="F", per="chunk", lane=lane) for lane in ("net", "compute")),
    *(Op("E", after="B", per="step", lane=lane) for lane in ("net", "compute")),
    Op("E", after="R", before="U", per="chunk"),
    Op("E", after="U", per="chunk", lane="net"),
    Op("E", before="U", per="chunk", lane="net"),
]


@pytest.mark.parametrize("op", ONCE, ids=lambda op: f"{op.letter} {op.lane} {op.per} {op.after} {op.before}")
@pytest.mark.parametrize("agreement", [Agreement.ALL, *slow(Agreement.LOSS, Agreement.NONE)])
def test_operations_once_per_chunk_or_step(op, agreement):
    rules = StepRules(agreement=agreement)
    graph, placement, rows = table("1f1b", 2, 2, (op, *offload(frozenset({(0, 1)}))))
    for way in WAYS:
        explore(way(graph, placement, rows, rules=rules))
    explore(by_hint(with_ops(chain(2, 2), (op,)), linear(2), "bf", rules=rules, absences=((), ())))


@pytest.mark.parametrize("lane", ["net", "compute"])
def test_operations_without_memory_leave_the_window_as_it_is(lane):
    ops = (Op("P", before="F", lane=lane), Op("S", after="F", lane=lane), Op("T", after="B", lane=lane))
    for name, window in product(("bf", "fb"), (1, 2)):
        explore(by_hint(with_ops(chain(2, 3), ops), linear(2), name, window=window))


# -- whatever else a step may have -------------------------------------------------------------------------------------


@LANES
def test_steps_that_lack_pairs(lanes):
    lacking = ((), absences({(0, 0), (1, 0)}))
    graph, placement, rows = table("1f1b", 2, 2, offload(lanes=lanes))
    for way in WAYS:
        explore(way(graph, placement, rows, absences=lacking))
    explore(by_hint(graph, placement, "bf", absences=lacking, rules=StepRules()))


def test_a_step_that_lacks_a_reader_of_what_an_operation_comes_before():
    graph = with_ops(PipelineGraph(3, 2, (Edge(0, 1), Edge(0, 2))), PREFETCH)
    for number, way in product(range(2), WAYS):
        explore(way(*drawn(graph, linear(3), number), absences=(absences({(2, 0)}),)))


@LANES
def test_early_decisions(lanes):
    """What is about to end has freed its memory for the queue behind it, and not yet for engines."""
    more = {"decides_early": True}
    for way in WAYS:
        explore(way(*table("1f1b", 2, 2, offload(lanes=lanes)), **more))
    for name, window in product(("bf", "f-priority"), (1, 2)):
        explore(by_hint(with_ops(chain(2, 2), offload(lanes=lanes)), linear(2), name, window=window, **more))
    explore(by_row(*table("1f1b", 2, 3, recompute()), **more))


@pytest.mark.slow
@LANES
@SPLIT_OR_NOT
def test_early_decisions_in_larger_pipelines(lanes, split):
    for number, size in enumerate([(2, 1, 3), (3, 1, 2), (2, 2, 2)]):
        placement = looped(*size[:2])
        graph = with_ops(chain(placement.num_chunks, size[2], split=split), offload(lanes=lanes))
        more = {"decides_early": True}
        for way in WAYS:
            explore(way(*drawn(graph, placement, number), **more))
        explore(by_hint(graph, placement, "bf", window=2, **more))


@LANES
def test_accumulation_in_order(lanes):
    for way in WAYS:
        explore(way(*table("1f1b", 2, 3, offload(lanes=lanes)), rules=StepRules(ordered=True)))


def test_replicas():
    graph = replicated_graph(with_ops(chain(2, 1), (*offload(), Op("E", after="U", per="chunk", lane="net"))), 2)
    placement = replicated_placement(linear(2), 2)
    explore(by_hint(graph, placement, "bf", rules=StepRules(agreement=Agreement.LOSS)))
    explore(by_row(*drawn(graph, placement, 1), rules=StepRules(agreement=Agreement.LOSS)))


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_runs_operations_of_its_compute_lane():
    graph, placement, rows = table("1f1b", 2, 2, recompute())
    for collective in (True, False):
        explore(by_row(graph, placement, rows, groups=(2, 1), collective=collective))


GROUPS = pytest.mark.parametrize("groups", [(2, 1), (1, 2)], ids=str)
COPIED = frozenset({(0, 1), (1, 0)})
"""One of the two microbatches on each stage."""


@LANES
@GROUPS
def test_a_group_copies_beside_its_tasks(groups, lanes):
    """A copy ends on each member by itself, also where tasks are collectives."""
    given = table("1f1b", 2, 2, offload(COPIED, lanes=lanes))
    explore(strictly(*given, groups=groups))
    explore(by_row(*given, groups=groups, collective=False))
    explore(by_row(*given, groups=groups, extra=1))


@pytest.mark.slow
@LANES
@GROUPS
def test_a_group_copies_along_any_row(groups, lanes):
    for number, pairs in enumerate([None, frozenset({(0, 0), (0, 1), (1, 2)})]):
        graph = with_ops(chain(2, 2 + number), offload(pairs, lanes=lanes, lead=number))
        for seed, way in product(range(2), WAYS):
            given = drawn(graph, linear(2), seed)
            explore(way(*given, extra=seed, groups=groups, collective=number > 0 or way is strictly))


@pytest.mark.slow
@LANES
@GROUPS
def test_a_group_copies_whatever_else_a_step_may_have(groups, lanes):
    given, more = table("1f1b", 2, 2, offload(COPIED, lanes=lanes)), {"groups": groups}
    for way in WAYS:
        explore(way(*given, decides_early=True, **more))
        explore(way(*given, absences=((), absences({(0, 0), (1, 0)})), **more))
        explore(way(*given, rules=StepRules(ordered=True), **more))
    for name, window in product(("bf", "f-priority"), (1, 2)):
        graph = with_ops(chain(2, 2), offload(lanes=lanes, part=0.5))
        explore(by_hint(graph, linear(2), name, window=window, decides_early=window == 1, **more))
    for op in ONCE:
        if op.lane != "compute":
            explore(by_row(*table("1f1b", 2, 1, (op, *offload(lanes=lanes))), rules=StepRules(), **more))


@pytest.mark.slow
@LANES
def test_larger_groups_copy(lanes):
    given = table("1f1b", 2, 2, offload(COPIED, lanes=lanes))
    for groups, degree in product([(3, 1), (1, 3)], (1, 2)):
        explore(by_row(*given, groups=groups, make_member=partial(group_arbiter, degree=degree), foresight=False))
    explore(strictly(*given, groups=(2, 2)))


class OnlyComputes(LeadingMember):
    """Tells nothing of engines."""

    _start_beside = StageArbiter._start_beside


class CopiesByItself(FollowingMember):
    """Hands its engines what may start, as a stage of one process does."""

    _start_beside = StageArbiter._start_beside

    def _dispatch(self, out):
        self._dispatch_beside(self._engines, out)
        super()._dispatch(out)


class ProposesBesideCopies(ProposingMember):
    """Hands its engines what may start, and proposes what else may."""

    def _dispatch(self, out):
        if self._engines is not None:
            self._dispatch_beside(self._engines, out)
        super()._dispatch(out)


@pytest.mark.parametrize(
    ("protocol", "what"),
    [
        (GroupProtocol.LEADER, "deadlock: member 0 of stage 0, member 1 of stage 0"),
        (GroupProtocol.PROPOSE, "member 0 of stage 0 runs 0F2 and holds 3 activations of 2"),
    ],
)
def test_members_whose_engines_choose_by_themselves_fail(protocol, what):
    """On a follower microbatch 0 comes back into the slot in which the leader has started 0F2: the leader's engine was
    busy. What would free the slot comes behind 0F2 in the leader's order. Or it comes back into the slot for which a
    member has proposed 0F2."""

    def make(_, setup, *place):
        if protocol is GroupProtocol.PROPOSE:
            return ProposesBesideCopies(setup, *place)
        return (CopiesByItself if place[0] else OnlyComputes)(setup, *place)

    graph = with_ops(chain(2, 3), offload(frozenset({(0, 0), (0, 1)}), lanes=ONE, lead=0))
    row = tuple(map(Task.parse, ["0F1", "0F0", "0O1", "0O0", "0L1", "0B1", "0F2", "0L0", "0B0", "0B2"]))
    other = tuple(map(Task.parse, ["1F1", "1B1", "1F0", "1B0", "1F2", "1B2"]))
    sound = by_row(graph, linear(2), (row, other), groups=(2, 1), foresight=False)
    with pytest.raises(CheckError, match=what):
        explore(replace(sound, make_member=make, protocol=protocol))
    explore(sound)


# -- what is explored --------------------------------------------------------------------------------------------------


def test_copies_run_beside_tasks_and_hold_them_up():
    setting = by_hint(with_ops(chain(2, 3), offload()), linear(2), "bf", window=1)
    search = Explorer().search(setting)
    frontier = [search.start]
    while frontier:
        frontier, _ = search.advance(frontier)
    running = [set(a.running(n)) for a in search.automata for n in range(a.num_states)]
    kinds = [{str(task.kind) for task in tasks} for tasks in running]
    assert {"F", "O"} not in kinds, "one microbatch alone is held"
    roomy = Explorer().search(replace(setting, footprints=(2, 2)))
    frontier = [roomy.start]
    while frontier:
        frontier, _ = roomy.advance(frontier)
    kinds = [{str(task.kind) for task in a.running(n)} for a in roomy.automata for n in range(a.num_states)]
    assert {"F", "O"} in kinds
    assert {"L", "F"} in kinds


def test_same_visible_states_without_the_reductions():
    check_same(by_row(*table("1f1b", 2, 2, offload())))
    check_same(by_row(*table("1f1b", 2, 2, offload(lanes=ONE)), decides_early=True))
    check_same(by_hint(with_ops(chain(2, 2), offload()), linear(2), window=2, decides_early=True))
    check_same(strictly(*table("1f1b", 2, 2, offload())))


def test_the_checker_and_the_graph_read_operations_alike():
    """The checker derives what operations demand from their records; it must come to what the graph says."""
    for ops, split in product((offload(), CHAINED, TWICE, PREFETCH, tuple(ONCE[:1]), tuple(ONCE[2:3])), (False, True)):
        graph = with_ops(chain(2, 2, split=split), ops)
        own = Operations(graph)
        for task in graph.tasks():
            assert {*own.bare_dependencies(task), *own.needs.get(task, ())} == {*graph.dependencies(task)}
            takes, frees = own.effect(task)
            assert graph.memory_effect(task) == (takes / own.unit, frees / own.unit)
            assert own.lane(task) == graph.lane(task.kind)
        assert own.once == [*graph.operations.once(range(2))]


def test_a_setting_says_what_its_operations_are():
    setting = Setting(
        graph=with_ops(chain(1, 1), (Op("S", after="F", lane="net"),)),
        placement=linear(1),
        windows=(1,),
        policies=(HINTS["bf"],),
    )
    assert "operations S on net" in str(setting)
    assert TaskKind("S") in {task.kind for task in setting.graph.tasks()}
