"""Data parallelism as a larger pipeline: numbers, graphs, tables, and what the arbiters make of them."""

import random
from dataclasses import replace

import pytest

from rrfp_jax.core import Agreement, ForesightRules, Message, MessageKind, Ordering, StagePlan, StepRules, stage_plan
from rrfp_jax.core.hints import BF, FB
from rrfp_jax.core.plan import share_holders
from rrfp_jax.core.replicas import (
    Owners,
    StepOwners,
    block_owners,
    microbatches_per_replica,
    moved_pairs,
    replicated_graph,
    replicated_placement,
    replication,
    with_owners,
)
from rrfp_jax.schedules import (
    Edge,
    Op,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    Task,
    TaskKind,
    absences,
    bits,
    build_schedule,
    chain,
    linear,
    looped,
)
from rrfp_jax.simulation import Costs, constant, simulate
from tests.model_checker import explore
from tests.model_checker.setting import Setting


def test_each_replica_runs_its_own_microbatches() -> None:
    graph = replicated_graph(chain(2, 3), 2)
    assert [graph.microbatches(chunk) for chunk in range(4)] == [(0, 1, 2), (3, 4, 5), (0, 1, 2), (3, 4, 5)]
    assert graph.predecessors(3) == (1,)
    assert graph.sharing(1) == (0, 1)
    assert replicated_placement(looped(2, 2), 2).stage_of_chunk == (0, 2, 1, 3, 0, 2, 1, 3)


def test_tied_chunks_are_shared_by_all_copies_in_all_replicas() -> None:
    graph = replicated_graph(chain(3, 1, shared=((0, 2),)), 2)
    assert graph.sharing(0) == (0, 1, 4, 5)
    assert graph.sharing(3) == (2, 3)


def test_absent_pairs_keep_the_numbers_of_the_step() -> None:
    copies = replication(chain(2, 3), 2)
    assert copies.pairs([(1, 2), (0, 4)]) == ((1, 0b10000), (2, 0b100))
    assert [(copies.base(c), copies.replica(c)) for c in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert copies.task(Task(TaskKind.W, 1, 2), 1) == Task(TaskKind.W, 3, 5)
    assert copies.task(Task(TaskKind.U, 1), 1) == Task(TaskKind.U, 3)


def test_a_reduction_waits_for_the_gradients_of_every_replica() -> None:
    graph, placement = replicated_graph(chain(2, 1), 2), replicated_placement(linear(2), 2)
    plan = stage_plan(graph, placement, 1, StepRules(agreement=Agreement.NONE))
    here, everywhere = len(plan.tasks), len(plan.tasks) + 1
    assert plan.prerequisites[plan.index[Task(TaskKind.R, 2)]] == (everywhere,)
    assert plan.prerequisites[everywhere] == (here,)
    assert plan.prerequisites[here] == (plan.index[Task(TaskKind.B, 2, 0)], Message(MessageKind.SHARED, 3, 2))


def test_replicas_tell_each_other_along_a_tree() -> None:
    num_replicas = 64
    graph, placement = replicated_graph(chain(2, 1), num_replicas), replicated_placement(linear(2), num_replicas)
    rules = StepRules(agreement=Agreement.NONE, lockstep=True)
    plans = [stage_plan(graph, placement, 2 * replica + 1, rules) for replica in range(num_replicas)]
    sent = [sum(m.kind is MessageKind.SHARED for sends in plan.sends for m, _ in sends) for plan in plans]
    assert max(sent) == rules.tree_degree + 1
    assert sum(sent) == 2 * (num_replicas - 1)
    told = {(m, stage) for plan in plans for sends in plan.sends for m, stage in sends if m.kind is MessageKind.SHARED}
    assert told == {(m, plan.stage) for plan in plans for m in plan.arrivals if m.kind is MessageKind.SHARED}


def test_in_lockstep_reductions_descend_as_backwards_do_and_updates_follow_ascending() -> None:
    rules = StepRules(agreement=Agreement.LOSS, lockstep=True)
    plan = stage_plan(replicated_graph(chain(4, 1), 2), replicated_placement(looped(2, 2), 2), 2, rules)
    update = {chunk: set(plan.prerequisites[plan.index[Task(TaskKind.U, chunk)]]) for chunk in (1, 5)}
    assert plan.index[Task(TaskKind.R, 5)] in plan.prerequisites[plan.index[Task(TaskKind.R, 1)]]
    assert plan.index[Task(TaskKind.R, 1)] in update[1] & update[5]
    assert plan.index[Task(TaskKind.U, 1)] in update[5]


def exchanged(plans: list[StagePlan], kind: MessageKind) -> set[tuple[Message, int]]:
    sent = {(m, stage) for plan in plans for sends in plan.sends for m, stage in sends if m.kind is kind}
    assert sent == {(m, plan.stage) for plan in plans for m in plan.arrivals if m.kind is kind}
    return sent


@pytest.mark.parametrize("lost", [(), (2,), (0, 5), (0, 2)])
def test_replicas_that_add_up_by_messages_exchange_every_piece_once(lost: tuple[int, ...]) -> None:
    """Units 0, 2, 4 are the replicas of stage 0, and 1, 3, 5 those of stage 1."""
    graph, placement = replicated_graph(chain(2, 1), 3), replicated_placement(linear(2), 3)
    alive = [[r for r in range(3) if 2 * r + stage not in lost] for stage in range(2)]
    owners = tuple(tuple(living[m % len(living)] for m in range(3)) for living in alive)
    graph = with_owners(graph, placement, StepOwners(owners, lost))
    plans = [stage_plan(graph, placement, unit, StepRules(by_messages=True)) for unit in range(6) if unit not in lost]
    sums = []
    for base in (0, 1):
        copies = [c for c in range(3 * base, 3 * base + 3) if c not in graph.lost]
        sums += [(copies[k % len(copies)], c, k) for k in range(3) for c in copies if c != copies[k % len(copies)]]
    assert sorted((m.source, m.target, m.microbatch) for m, _ in exchanged(plans, MessageKind.SUM)) == sorted(sums)
    assert sorted((m.target, m.source, m.microbatch) for m, _ in exchanged(plans, MessageKind.PIECE)) == sorted(sums)


def test_pieces_of_shared_layers_go_straight_to_those_that_add_them_up() -> None:
    graph, placement = replicated_graph(chain(3, 1, shared=((0, 2),)), 2), replicated_placement(linear(3), 2)
    plans = [stage_plan(graph, placement, stage, StepRules(by_messages=True)) for stage in range(6)]
    pieces = {(m.source, m.target, m.microbatch) for m, _ in exchanged(plans, MessageKind.PIECE)}
    assert {source for source, target, k in pieces if (target, k) == (4, 0)} == {0, 1, 5}
    assert all(target % 2 == k for _, target, k in pieces)
    assert not exchanged(plans, MessageKind.SHARED)


@pytest.mark.parametrize("lost", [(), (1,), (0, 3), (1, 2)])
def test_every_replica_gets_each_share_that_it_does_not_hold_once(lost: tuple[int, ...]) -> None:
    graph, placement = replicated_graph(chain(1, 1), 4), replicated_placement(linear(1), 4)
    living = [r for r in range(4) if r not in lost]
    graph = with_owners(graph, placement, StepOwners((tuple(living[m % len(living)] for m in range(4)),), lost))
    rules = StepRules(by_messages=True, shares=True)
    plans = [stage_plan(graph, placement, unit, rules) for unit in living]
    holders = {share: [r % 4 for r in range(share, share + 4) if r % 4 in living][:2] for share in range(4)}
    assert all(share_holders(share, living, 4) == tuple(held) for share, held in holders.items())
    shares = {(holders[k][0], r, k) for k in range(4) for r in living if r not in holders[k]}
    assert {(m.source, m.target, m.microbatch) for m, _ in exchanged(plans, MessageKind.SHARE)} == shares
    for before in range(4):
        earlier = [r for r in [*living, before] if before in lost]
        assert all(set(share_holders(k, earlier, 4)) & set(living) <= set(holders[k]) for k in range(4) if earlier)


def test_sums_by_messages_are_not_in_lockstep() -> None:
    with pytest.raises(ValueError, match="lockstep"):
        StepRules(by_messages=True, lockstep=True)
    with pytest.raises(ValueError, match="shares of parameters add up by messages"):
        StepRules(shares=True)


@pytest.mark.parametrize("consume", ["ready", "strict"])
def test_a_table_is_followed_by_every_replica(consume: str) -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=3))
    order = Ordering(schedule=table, consume=consume).resolve(table.placement, table.graph, num_replicas=2)
    assert order.table is not None
    order.table.validate()
    assert [str(task) for task in order.table.orders[2]] == ["1F3", "1F4", "1B3", "1F5", "1B4", "1B5"]
    assert order.windows == (2, 1, 2, 1) if consume == "strict" else (32,) * 4


@pytest.mark.parametrize("degree", [1, 2])
def test_replicas_below_replicas_wait_for_each_other(degree: int) -> None:
    """Every interleaving of three replicas of a stage with two chunks, which share parameters or do not."""
    for shared in ((), ((0, 1),)):
        setting = Setting(
            graph=replicated_graph(chain(2, 1, shared=shared), 3),
            placement=replicated_placement(looped(1, 2), 3),
            windows=(1,) * 3,
            policies=(BF,) * 3,
            rules=StepRules(agreement=Agreement.NONE, lockstep=True, tree_degree=degree),
        )
        assert explore(setting).num_states > 1


def test_tied_chunks_of_two_stages_and_two_replicas() -> None:
    setting = Setting(
        graph=replicated_graph(chain(2, 1, shared=((0, 1),)), 2),
        placement=replicated_placement(linear(2), 2),
        windows=(1,) * 4,
        policies=(BF,) * 4,
        rules=StepRules(agreement=Agreement.NONE, lockstep=True),
    )
    assert explore(setting).num_states > 1


@pytest.mark.parametrize("agreement", list(Agreement))
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("per_stage", [1, 2])
def test_replicas_end_every_step_in_lockstep(agreement: Agreement, window: int, per_stage: int) -> None:
    """Every interleaving of two replicas of one stage, and of two stages where the space stays small."""
    num_stages = 2 if per_stage == 1 and window == 1 else 1
    base = chain(num_stages * per_stage, 1)
    setting = Setting(
        graph=replicated_graph(base, 2),
        placement=replicated_placement(looped(num_stages, per_stage), 2),
        windows=(window,) * (num_stages * 2),
        policies=(BF, FB) * num_stages,
        rules=StepRules(agreement=agreement, lockstep=True),
    )
    assert explore(setting).num_states > 1


def test_microbatches_must_divide() -> None:
    assert microbatches_per_replica(8, 2) == 4
    with pytest.raises(ValueError, match=r"9 microbatches cannot be dealt out evenly to 2.*multiple of 2"):
        microbatches_per_replica(9, 2)


# -- other owners ------------------------------------------------------------------------------------------------------

ENCODERS = PipelineGraph(
    4,
    3,
    (Edge(0, 2), Edge(1, 2, is_optional=True), Edge(2, 3)),
    absent=absences([(1, 0), (1, 2)]),
    shared=((2, 3),),
    frozen=frozenset({0}),
)


def random_owners(num_stages: int, num_microbatches: int, num_replicas: int, num_lost: int = 0) -> StepOwners:
    """Owners drawn at random, where some units own nothing and every stage keeps one that does."""
    units = [(stage, replica) for stage in range(num_stages) for replica in range(num_replicas)]
    lost: list[tuple[int, int]] = []
    for unit in random.sample(units, len(units)):
        if len(lost) < num_lost and sum(stage == unit[0] for stage, _ in lost) < num_replicas - 1:
            lost.append(unit)
    owners = []
    for stage in range(num_stages):
        living = [r for r in range(num_replicas) if (stage, r) not in lost]
        owners.append(tuple(random.choice(living) for _ in range(num_microbatches)))
    return StepOwners(tuple(owners), tuple(sorted(r * num_stages + s for s, r in lost)))


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("base", [chain(4, 3, split=True), ENCODERS], ids=["chain", "encoders"])
def test_owners_give_every_microbatch_to_one_copy(base: PipelineGraph, num_replicas: int) -> None:
    for num_lost in (0, 1, 2):
        graph, placement = replicated_graph(base, num_replicas), replicated_placement(looped(2, 2), num_replicas)
        given = random_owners(2, graph.num_microbatches, num_replicas, num_lost)
        made = with_owners(graph, placement, given)
        copies = replication(base, num_replicas)
        for c in range(base.num_chunks):
            for m in range(made.num_microbatches):
                owner = given.owners[c % 2][m]
                there = [r for r in range(num_replicas) if made.exists(copies.chunk(c, r), m)]
                assert there == ([owner] if base.exists(c, m % base.num_microbatches) else [])
                around = [(base.predecessors(c), made.predecessors), (base.successors(c), made.successors)]
                for others, neighbours in around if there else ():
                    found = made.of_each_base(neighbours(copies.chunk(c, owner)), m)
                    expected = [copies.chunk(o, given.owners[o % 2][m]) for o in others]
                    present = [base.exists(o, m % base.num_microbatches) for o in others]
                    assert found == tuple(
                        o if is_there else None for o, is_there in zip(expected, present, strict=True)
                    )
            alike = [(made.has_backward(copies.chunk(c, r)), base.has_backward(c)) for r in range(num_replicas)]
            assert all(own == of_base for own, of_base in alike)
        assert made.lost == {c for unit in given.lost for c in placement.chunks_of_stage[unit]}
        assert not any(made.trains(c) for c in made.lost)


def test_the_blocks_as_owners_are_the_graph_itself() -> None:
    for base, placement in ((chain(4, 3), looped(2, 2)), (ENCODERS, Placement((0, 1, 0, 1)))):
        graph, placed = replicated_graph(base, 3), replicated_placement(placement, 3)
        made = with_owners(graph, placed, StepOwners(block_owners(2, 9, 3)))
        assert sorted(made.edges) == sorted(graph.edges)
        assert replace(made, edges=graph.edges, holders=()) == graph
        assert made.holders == ((0, 1, 2),) * base.num_chunks


def test_pairs_that_a_step_lacks_move_with_their_microbatches() -> None:
    graph, placement = replicated_graph(chain(3, 2), 2), replicated_placement(linear(3), 2)
    made = with_owners(graph, placement, StepOwners(((0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1))))
    copies = replication(chain(3, 2), 2)
    moved = moved_pairs(copies.pairs([(0, 1), (1, 1), (1, 2)]), made)
    assert [(c, m) for c, mask in moved for m in bits(mask)] == [(1, 1), (2, 2), (3, 1)]


@pytest.mark.parametrize(
    ("owners", "lost", "message"),
    [
        (((0, 0),), (), r"of 1 stages and 2 microbatches, the pipeline has 2 and 4"),
        (((0, 0, 1, 1), (0, 2, 1, 1)), (), r"microbatch 1 of stage 1 is owned by replica 2, and there are 2"),
        (((0, 0, 1, 1), (0, 0, 1, 1)), (3,), r"microbatch 2 of stage 1 is owned by replica 1, which is lost there"),
        (((0, 0, 1, 1), (0, 0, 1, 1)), (4,), r"unit 4 is lost, and there are 4"),
    ],
)
def test_owners_that_do_not_fit_are_refused(owners: Owners, lost: tuple[int, ...], message: str) -> None:
    graph, placement = replicated_graph(chain(2, 2), 2), replicated_placement(linear(2), 2)
    with pytest.raises(ValueError, match=message):
        with_owners(graph, placement, StepOwners(owners, lost))


def test_a_table_that_must_be_kept_to_cannot_have_other_owners() -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=2))
    given = StepOwners(((0, 1, 0, 1), (0, 0, 1, 1)))
    strict = Ordering(schedule=table, consume="strict").resolve(table.placement, table.graph, num_replicas=2)
    with pytest.raises(ValueError, match="strict consumption keeps to its table's microbatches"):
        strict.arbiters(StepRules())[0].plan_without((), owners=given)
    moves = Op("O", after="F", before="B", pairs=frozenset({(0, 0)}))
    graph = replicated_graph(replace(chain(2, 2), ops=(moves,)), 2)
    with pytest.raises(ValueError, match="operation O belongs to certain microbatches of each replica"):
        with_owners(graph, replicated_placement(linear(2), 2), given)


def test_a_table_is_made_anew_for_as_many_microbatches_as_a_stage_owns() -> None:
    table = build_schedule("zb-h1", ScheduleRequest(num_stages=2, num_microbatches=4))
    order = Ordering(schedule=table).resolve(table.placement, table.graph, num_replicas=2)
    unit = order.arbiters(StepRules())[2]  # the first stage of the second replica
    given = StepOwners(((0, 1, 1, 0, 1, 1, 1, 0), (0, 0, 0, 0, 1, 1, 1, 1)))
    taken = unit.setup.with_owners(given)
    five = build_schedule("zb-h1", ScheduleRequest(num_stages=2, num_microbatches=5)).orders[0]
    # By their places in the blocks 0..3 and 4..7: 4, 1, 5, 2, 6.
    assert taken.consumption.hint.row == tuple(Task(t.kind, 1, (4, 1, 5, 2, 6)[t.microbatch]) for t in five)
    assert (taken.footprint, taken.foresight) == (unit.setup.footprint, ForesightRules())


def test_without_such_a_table_bf_ranks() -> None:
    table = build_schedule("interleaved-1f1b", ScheduleRequest(num_stages=2, num_microbatches=4))
    order = Ordering(schedule=replace(table, for_microbatches=None)).resolve(
        table.placement, table.graph, num_replicas=2
    )
    taken = order.arbiters(StepRules())[0].setup.with_owners(random_owners(2, 8, 2))
    assert (taken.consumption.hint.name, taken.foresight) == ("bf-deep", None)


@pytest.mark.parametrize(
    "words", [{"window": 2}, {"schedule": "1f1b"}, {"schedule": "zb-v"}, {"schedule": "v-half"}], ids=str
)
@pytest.mark.parametrize("num_lost", [0, 1, 3])
def test_steps_with_other_owners_end_and_hold_no_more(words: dict[str, str | int], num_lost: int) -> None:
    """Owners at random for every step, between steps with the normal ones; invariants hold after every event."""
    share, name = 4, str(words.get("schedule", "1f1b"))
    table = build_schedule(name, ScheduleRequest(num_stages=3, num_microbatches=share))
    ordering = Ordering(schedule=table) if "schedule" in words else Ordering(window=2)
    order = ordering.resolve(table.placement, table.graph, num_replicas=3)
    arbiters = order.arbiters(StepRules(agreement=Agreement.ALL), evaluation_batches=1)
    costs = Costs(durations_ms=constant((1.0, 1.2, 0.9), order.graph))
    first = random_owners(3, 3 * share, 3, num_lost)
    owners = [first, None, random_owners(3, 3 * share, 3), first] if not num_lost else [first, first]
    found = simulate(arbiters, costs, num_steps=len(owners), owners=owners, record_events=True)
    for unit, log in enumerate(found.logs):
        fresh = arbiters[unit].fresh(None)
        for event, instructions in log:
            assert tuple(fresh.handle(event)) == instructions
            fresh.validate()
        assert fresh.key() == arbiters[unit].key()
    lost = set(first.lost)
    held = [0] * 9
    peaks = [0] * 9
    for span in sorted(found.timeline.spans, key=lambda span: (span.end_s, span.start_s)):
        assert span.stage not in lost
    events = sorted(
        [(s.start_s, 1, s.stage) for s in found.timeline.spans if s.task.kind is TaskKind.F]
        + [
            (s.end_s, -1, s.stage)
            for s in found.timeline.spans
            if s.task.microbatch >= 0 and s.task.kind is order.graph.accumulating_kind(s.task.chunk)
        ]
    )
    for _, change, unit in events:
        held[unit] += change
        peaks[unit] = max(peaks[unit], held[unit])
    passes = [len(chunks) for chunks in order.placement.chunks_of_stage]
    limits = order.footprints or tuple(w * each for w, each in zip(order.windows, passes, strict=True))
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    ran = {(s.step, s.task) for s in found.timeline.spans}
    for step, given in enumerate(owners):
        graph = order.graph if given is None else with_owners(order.graph, order.placement, given)
        assert {task for of, task in ran if of == step and task.microbatch >= 0} == set(graph.tasks())


def test_a_lost_unit_is_left_out_of_the_tree_of_reports() -> None:
    graph, placement = replicated_graph(chain(2, 2), 2), replicated_placement(linear(2), 2)
    made = with_owners(graph, placement, StepOwners(((1, 1, 1, 1), (0, 0, 1, 1)), (0,)))
    with pytest.raises(ValueError, match="stage 0 is lost"):
        stage_plan(made, placement, 0, StepRules())
    root = stage_plan(made, placement, 1, StepRules())
    assert {m for m in root.arrivals if m.kind is MessageKind.REPORT} == {
        Message(MessageKind.REPORT, stage, 1) for stage in (2, 3)
    }
    sums = [
        m
        for u in (1, 2, 3)
        for m in stage_plan(made, placement, u, StepRules()).arrivals
        if m.kind is MessageKind.SHARED
    ]
    assert sorted(sums) == [Message(MessageKind.SHARED, 2, 3), Message(MessageKind.SHARED, 3, 2)]


def test_a_unit_that_owns_nothing_still_sums_and_updates() -> None:
    graph, placement = replicated_graph(chain(2, 2), 2), replicated_placement(linear(2), 2)
    made = with_owners(graph, placement, StepOwners(((1, 1, 1, 1), (0, 0, 1, 1))))
    plan = stage_plan(made, placement, 0, StepRules())
    assert [str(task) for task in plan.tasks] == ["0R", "0U"]
