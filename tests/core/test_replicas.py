"""Data parallelism as a larger pipeline: numbers, graphs, tables, and what the arbiters make of them."""

import pytest

from rrfp_jax.core import Agreement, Message, MessageKind, Ordering, StepRules, stage_plan
from rrfp_jax.core.hints import BF, FB
from rrfp_jax.core.replicas import microbatches_per_replica, replicated_graph, replicated_placement, replication
from rrfp_jax.schedules import ScheduleRequest, Task, TaskKind, build_schedule, chain, linear, looped
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
