"""Losses at every transition of real arbiters: who knows which verdict, and what recovery makes of it.

A unit that freezes, or dies, at some moment looks to all others like one that is slow from then on. So where the units
stand when all survivors have frozen is a state that a run without losses reaches too, for every moment of the death and
every order of freezing; and all of these are explored. What they do afterwards is a run of other arbiters, with other
owners, to which no message of the first ones comes.
"""

from itertools import combinations, product

import pytest

from rrfp_jax.core import HINTS, Agreement, StageArbiter, StepRules
from rrfp_jax.core.membership import (
    EpochDeclared,
    FinishDecided,
    PeerNote,
    RankMembership,
    ResumeFrom,
    StepDecided,
    TellRank,
)
from rrfp_jax.core.plan import FINISHED
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.schedules import Edge, PipelineGraph, TaskKind, absences, chain, linear
from tests.model_checker import Explorer, Setting, explore
from tests.model_checker.membership import MembershipSearch, MembershipSetting, Phase

BF = HINTS["bf"]
UNITS = range(4)
"""Unit u is replica u // 2 of stage u % 2, and rank u hosts it."""


def setting(num_microbatches=1, *, num_steps=2, evaluates=frozenset(), agreement=Agreement.ALL):
    """Two stages in two replicas, each with so many microbatches."""
    return Setting(
        graph=replicated_graph(chain(2, num_microbatches), 2),
        placement=replicated_placement(linear(2), 2),
        windows=(2,) * 4,
        policies=(BF,) * 4,
        rules=StepRules(agreement=agreement),
        absences=((),) * num_steps,
        evaluates=evaluates,
    )


TRAINS = {"num_steps": 2}
EVALUATES = {"num_steps": 3, "evaluates": frozenset({1})}


def reached(setting):
    """For every state that a run reaches, the place of each unit: its step, what it does next, and whether it has all
    sums of that step."""
    search = Explorer().search(setting)
    frontier = [search.start]
    while frontier:
        frontier, _ = search.advance(frontier)
    known = {}
    for state in search.came_from:
        for unit, at in enumerate(state):
            if (unit, at) not in known:
                account, arbiter = search.automata[unit].account(at), search.automata[unit].arbiter(at)
                known[unit, at] = place_of(arbiter) if account.is_active else (account.step + 1, Phase.SUMS, False)
        yield tuple(known[unit, at] for unit, at in enumerate(state))


def place_of(arbiter: StageArbiter):
    plan, waiting = arbiter._ranked.plan, arbiter._waiting
    gates = {name: waiting[len(plan.tasks) + number] == FINISHED for number, name in enumerate(plan.gate_names)}
    has_sums = all(waiting[node] == FINISHED for node, task in plan.present() if task.kind is not TaskKind.U)
    phase = Phase.UPDATE if gates["verdict"] else Phase.VERDICT if gates["report"] else Phase.SUMS
    return arbiter.step, phase, has_sums


def recover(places, survivors):
    """What survivors are told to finish, and where to go on, when they stand at these places."""
    ranks = {rank: RankMembership(rank, len(places)) for rank in survivors}
    for rank, machine in ranks.items():
        step, phase, _ = places[rank]
        for decided in range(step + (phase is Phase.UPDATE)):
            machine.handle(StepDecided(decided, f"verdict {decided}"))
    answers = {rank: machine.handle(EpochDeclared(1, tuple(survivors), "")) for rank, machine in ranks.items()}
    told = list(answers.items())
    while told:
        sender, instructions = told.pop()
        for instruction in instructions:
            if isinstance(instruction, TellRank):
                answer = ranks[instruction.rank].handle(PeerNote(sender, instruction.epoch, instruction.note))
                answers[instruction.rank] += answer
                told.append((instruction.rank, answer))
    finished = {rank: [i.step for i in answer if isinstance(i, FinishDecided)] for rank, answer in answers.items()}
    resumed = {rank: [i.step for i in answer if isinstance(i, ResumeFrom)] for rank, answer in answers.items()}
    return finished, resumed


def check_recovery(places, survivors):
    """Survivors go on with one step, and each has then finished all steps before it, each of them once."""
    finished, resumed = recover(places, survivors)
    (following,) = {tuple(steps) for steps in resumed.values()}
    assert len(following) == 1
    for rank in survivors:
        step, phase, has_sums = places[rank]
        assert (not finished[rank]) or (finished[rank] == [step] and has_sums), (places, survivors)
        assert step + (phase is Phase.UPDATE) + len(finished[rank]) == following[0], (places, survivors)


def groups_of_survivors():
    some = [units for number in (2, 3) for units in combinations(UNITS, number)]
    return [units for units in some if {unit % 2 for unit in units} == {0, 1}]


@pytest.mark.parametrize("steps", [TRAINS, EVALUATES], ids=["trains", "evaluates"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_survivors_agree_wherever_units_stand(steps, num_microbatches):
    every = set(reached(setting(num_microbatches, **steps)))
    found = {"finished": 0, "redone": 0}
    for places, survivors in product(every, groups_of_survivors()):
        check_recovery(places, survivors)
        finished, _ = recover(places, survivors)
        found["finished" if any(finished.values()) else "redone"] += 1
    assert min(found.values()) > 20, found


@pytest.mark.parametrize("steps", [TRAINS, EVALUATES], ids=["trains", "evaluates"])
def test_the_abstract_steps_of_membership_cover_those_of_arbiters(steps):
    real = {tuple(place[:2] for place in places) for places in reached(setting(**steps))}
    search = MembershipSearch(MembershipSetting(**steps, deaths=0))
    search.explore()
    abstract = set()
    for state in search.came_from:
        ranks = [search.ranks.values[at] for at in state.ranks]
        abstract.add(tuple((rank.step, rank.phase) for rank in ranks))
    assert real <= abstract
    assert len(real) > 60


def test_an_agreement_on_the_loss_alone_is_found():
    """The verdict may be there before all sums are, so survivors cannot finish the step."""
    faults = 0
    for places, survivors in product(set(reached(setting(agreement=Agreement.LOSS))), groups_of_survivors()):
        try:
            check_recovery(places, survivors)
        except AssertionError:
            faults += 1
    assert faults > 20


# -- the step that is done again ---------------------------------------------------------------------------------------


def surviving(units, owners):
    """The pipeline of two stages on these units; ``owners[stage][microbatch]`` is the replica that runs it there."""
    below, above = ([unit for unit in units if unit % 2 == stage] for stage in (0, 1))
    chunks = {unit: number for number, unit in enumerate([*below, *above])}
    num_microbatches = len(owners[0])
    missing = [(chunks[unit], m) for unit in units for m in range(num_microbatches) if owners[unit % 2][m] != unit // 2]
    replicas = tuple(tuple(chunks[unit] for unit in stage) for stage in (below, above) if len(stage) > 1)
    edges = tuple(Edge(chunks[a], chunks[b], is_optional=True) for a in below for b in above)
    return PipelineGraph(len(units), num_microbatches, edges, absent=absences(missing), shared=replicas)


@pytest.mark.parametrize("survivors", groups_of_survivors(), ids=str)
def test_survivors_do_a_step_again_with_other_owners(survivors):
    replicas = [[unit // 2 for unit in survivors if unit % 2 == stage] for stage in (0, 1)]
    for owners in product(*(set(product(of_stage, repeat=2)) for of_stage in replicas)):
        graph = surviving(survivors, owners)
        explore(
            Setting(
                graph=graph,
                placement=linear(len(survivors)),
                windows=(2,) * len(survivors),
                policies=(BF,) * len(survivors),
                absences=((),) * 2,
            )
        )
