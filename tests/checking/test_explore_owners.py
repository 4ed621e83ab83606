"""Every interleaving of steps with other owners than blocks: edges across, lost units, tables, memory."""

from itertools import product

import pytest

from rrfp_jax.core import Agreement, AheadBound, ForesightRules, StepRules
from rrfp_jax.core.hints import BF, BF_DEEP, FB, schedule_hint
from rrfp_jax.core.replicas import StepOwners, block_owners, replicated_graph, replicated_placement
from rrfp_jax.schedules import Edge, PipelineGraph, Task, TaskKind, chain, linear, looped
from tests.model_checker import Explorer, Setting, explore

QUIET = StepRules(updates=False, agreement=Agreement.NONE)


def setting(base: PipelineGraph, per_stage: int = 1, num_replicas: int = 2, **words) -> Setting:
    placement = replicated_placement(looped(base.num_chunks // per_stage, per_stage), num_replicas)
    words = {"windows": (1,) * placement.num_stages, "policies": (BF,) * placement.num_stages, "rules": QUIET} | words
    words.setdefault("absences", ((),) * len(words["owners"]))
    return Setting(graph=replicated_graph(base, num_replicas), placement=placement, **words)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_every_table_of_two_stages_and_two_replicas(window: int, split: bool) -> None:
    explorer = Explorer()
    for first, second in product(product(range(2), repeat=2), repeat=2):
        given = StepOwners((first, second))
        words = {"windows": (window,) * 4, "policies": (BF, FB) * 2, "owners": (given,)}
        assert explorer.explore(setting(chain(2, 1, split=split), **words)).num_states > 1


@pytest.mark.parametrize("ordered", [False, True])
def test_two_microbatches_of_each_block(ordered: bool) -> None:
    """Microbatches 1 and 2 change places on the second stage, so that each replica waits for the other one."""
    given = StepOwners(((0, 0, 1, 1), (0, 1, 0, 1)))
    rules = StepRules(updates=False, agreement=Agreement.NONE, ordered=ordered)
    assert explore(setting(chain(2, 2), owners=(given,), rules=rules)).num_states > 1


@pytest.mark.parametrize("agreement", [Agreement.ALL, Agreement.LOSS])
@pytest.mark.parametrize("lost", range(4))
def test_a_lost_unit(agreement: Agreement, lost: int) -> None:
    """Sums, reports and updates go on without it, also where it was the root of the tree."""
    owners = [list(row) for row in block_owners(2, 2, 2)]
    owners[lost % 2] = [1 - lost // 2] * 2
    given = StepOwners(tuple(map(tuple, owners)), (lost,))
    rules = StepRules(agreement=agreement)
    assert explore(setting(chain(2, 1), owners=(given,), lost=(lost,), rules=rules)).num_states > 1


def test_owners_change_from_step_to_step() -> None:
    """Messages of a step that has other owners come while the step before is under way."""
    given = StepOwners(((1, 0), (0, 1)))
    for owners in ((None, given), (given, None), (given, StepOwners(((0, 0), (1, 1))))):
        rules = StepRules(updates=False, agreement=Agreement.LOSS)
        assert explore(setting(chain(2, 1), owners=owners, rules=rules)).num_states > 1


@pytest.mark.parametrize("foresight", [None, ForesightRules()], ids=["no-foresight", "foresight"])
def test_a_table_with_footprint(foresight: ForesightRules | None) -> None:
    """Rows of 1F1B rank what is ready, by as many microbatches as each unit owns; one unit owns three of four."""
    graph = replicated_graph(chain(2, 2), 2)

    def row(stage: int, microbatches: list[int]) -> list[Task]:
        chunk, tasks = stage % 2 * 2 + stage // 2, []
        ahead = microbatches[: 2 - stage % 2 - 1]
        tasks += [Task(TaskKind.F, chunk, m) for m in ahead]
        rest = microbatches[len(ahead) :]
        for place, m in enumerate(microbatches):
            tasks += [Task(TaskKind.F, chunk, rest[place])] if place < len(rest) else []
            tasks.append(Task(TaskKind.B, chunk, m))
        return tasks

    blocks = [[m for m in range(4) if m // 2 == stage // 2] for stage in range(4)]
    policies = tuple(schedule_hint(row(stage, blocks[stage])) for stage in range(4))
    assert {task for policy in policies for task in policy.row or ()} == set(graph.tasks())
    found = setting(
        chain(2, 2),
        policies=policies,
        footprints=(2, 1, 2, 1),
        owners=(StepOwners(((0, 0, 0, 1), (0, 1, 1, 0))),),
        other_rows={
            (stage, number): tuple(row(stage, list(range(number)))) for stage in range(4) for number in (1, 2, 3)
        },
        foresight=foresight,
    )
    assert explore(found).num_states > 1


def test_two_chunks_per_stage_share_a_footprint() -> None:
    given = StepOwners(((0, 1, 1, 0),))
    policies = tuple(schedule_hint(canonical(unit)) for unit in range(2))
    words = {"policies": policies, "footprints": (2, 2), "owners": (given,)}
    assert explore(setting(chain(2, 2), 2, **words)).num_states > 1
    assert explore(setting(chain(2, 2), 2, windows=(2, 2), policies=(BF_DEEP,) * 2, owners=(given,))).num_states > 1


def canonical(unit: int) -> list[Task]:
    kinds = [(TaskKind.F, 0), (TaskKind.F, 1), (TaskKind.B, 1), (TaskKind.B, 0)]
    return [Task(kind, base * 2 + unit, m) for m in (2 * unit, 2 * unit + 1) for kind, base in kinds]


def test_a_frozen_encoder_of_another_replica_runs_ahead_no_further_than_its_bound() -> None:
    base = PipelineGraph(2, 2, (Edge(0, 1),), frozen=frozenset({0}))
    bounds = tuple(AheadBound(chunk=chunk, limit=1) for chunk in range(2))
    given = StepOwners(((0, 1, 0, 1), (1, 0, 0, 1)))
    assert explore(setting(base, owners=(given,), read_ahead=bounds)).num_states > 1


def test_three_replicas_of_one_stage_of_which_one_is_lost() -> None:
    given = StepOwners(((0, 2, 2),), (1,))
    placement = replicated_placement(linear(1), 3)
    assert placement.num_stages == 3
    rules = StepRules(lockstep=True)
    assert explore(setting(chain(1, 1), num_replicas=3, owners=(given,), lost=(1,), rules=rules)).num_states > 1


def test_a_unit_of_two_processes() -> None:
    """The members of a group start a step with the same owners, and a leader chooses for both."""
    given = StepOwners(((1, 0), (0, 1)))
    for groups in ((2, 1, 1, 1), (1, 1, 1, 2)):
        assert explore(setting(chain(2, 1), owners=(given,), groups=groups)).num_states > 1
