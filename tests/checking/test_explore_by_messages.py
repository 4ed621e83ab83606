"""Replicas that add up by messages, in every interleaving: all steps end, and no update comes before all sums."""

import random

import pytest

from rrfp_jax.core import HINTS, Agreement, InputArrived, MessageKind, Send, StageArbiter, StepRules, TaskFinished, plan
from rrfp_jax.core.replicas import StepOwners, replicated_graph, replicated_placement
from rrfp_jax.schedules import TaskKind, absences, chain, linear, looped
from tests.model_checker import CheckError, Setting, explore
from tests.model_checker.random_walk import random_walk

TIED = ((0, 1),)


def setting_of(base, placement, *, num_replicas=2, hints=("bf", "fb"), window=2, arbiter=StageArbiter, **more):
    graph, everywhere = replicated_graph(base, num_replicas), replicated_placement(placement, num_replicas)
    rules = StepRules(by_messages=True, **more.pop("rules", {}))
    return Setting(
        graph=graph,
        placement=everywhere,
        windows=(window,) * everywhere.num_stages,
        policies=tuple(HINTS[hints[stage % len(hints)]] for stage in range(everywhere.num_stages)),
        rules=rules,
        arbiter=arbiter,
        **more,
    )


@pytest.mark.parametrize("agreement", list(Agreement))
@pytest.mark.parametrize("shared", [(), TIED], ids=["untied", "tied"])
def test_two_stages_of_two_replicas(agreement, shared):
    setting = setting_of(chain(2, 1, shared=shared), linear(2), rules={"agreement": agreement})
    assert explore(setting).num_states > 1


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_two_stages_of_two_replicas_and_two_microbatches_each(split):
    setting = setting_of(chain(2, 2, split=split, shared=TIED), linear(2), window=1, hints=("bf",))
    assert explore(setting).num_states > 1


@pytest.mark.parametrize("shared", [(), TIED], ids=["untied", "tied"])
def test_two_chunks_of_one_stage(shared):
    assert explore(setting_of(chain(2, 1, shared=shared), looped(1, 2), window=1)).num_states > 1


def test_three_replicas():
    setting = setting_of(chain(1, 1), linear(1), num_replicas=3, rules={"tree_degree": 1})
    assert explore(setting).num_states > 1


@pytest.mark.parametrize("agreement", list(Agreement))
def test_three_replicas_send_each_other_shares(agreement):
    rules = {"tree_degree": 1, "shares": True, "agreement": agreement}
    setting = setting_of(chain(1, 1), linear(1), num_replicas=3, rules=rules, absences=((), ()))
    assert explore(setting).num_states > 1


def test_shares_of_units_that_are_lost():
    rules, base = {"shares": True}, chain(1, 1)
    for lost, owners in (((0,), (1, 1, 2)), ((0, 2), (1, 1, 1))):
        given = (StepOwners((owners,), lost=lost),)
        setting = setting_of(base, linear(1), num_replicas=3, rules=rules, owners=given, lost=lost)
        assert explore(setting).num_states > 1


def test_a_chunk_that_every_microbatch_of_a_replica_skips_still_sends_its_pieces():
    setting = setting_of(chain(1, 2), linear(1), absences=((), absences({(0, 0), (0, 1)})))
    assert explore(setting).num_states > 1


def test_units_that_are_lost():
    owners = StepOwners(((1, 1), (0, 1)), lost=(0,))
    for shared in ((), TIED):
        setting = setting_of(chain(2, 1, shared=shared), linear(2), owners=(owners,), lost=(0,))
        assert explore(setting).num_states > 1


@pytest.mark.parametrize("shared", [(), TIED], ids=["untied", "tied"])
def test_deterministic_runs_add_up_each_block_by_itself(shared):
    ordered = {"rules": {"ordered": True}}
    for num, owners in [
        (1, StepOwners(((1, 1), (0, 1)), lost=(0,))),
        (2, StepOwners(((1, 1, 1, 1), (0, 0, 1, 1)), lost=(0,))),
        (1, StepOwners(((1, 1), (1, 0)))),
    ]:
        setting = setting_of(
            chain(2, num, shared=shared), linear(2), owners=(owners,), lost=owners.lost, hints=("bf",), **ordered
        )
        assert explore(setting).num_states > 1


def test_deterministic_runs_refuse_owners_that_share_out_a_block():
    setting = setting_of(
        chain(2, 2), linear(2), owners=(StepOwners(((0, 1, 0, 1), (0, 0, 1, 1))),), rules={"ordered": True}
    )
    with pytest.raises(CheckError, match="give all microbatches of a block to one replica"):
        explore(setting)


def test_choices_ahead():
    setting = setting_of(chain(1, 1), linear(1), certain_ahead=True, decides_early=True)
    assert explore(setting).num_states > 1


class _Holding(StageArbiter):
    """Checks the argument by which memory is forecast (:class:`rrfp_jax.programs.pieces.PieceBytes`): pieces of others
    lie here of one step at a time, and so do sums."""

    def __init__(self, setup):
        super().__init__(setup)
        self.come, self.here = set(), {MessageKind.PIECE: set(), MessageKind.SUM: set()}

    def handle(self, event):
        if isinstance(event, InputArrived) and event.message.kind in self.here:
            held, key = self.here[event.message.kind], event[:1] + event[2:]
            if key not in self.come:  # the second delivery of a message is dropped
                self.come.add(key)
                held.add((event.step, event.message))
                assert len({step for step, message in held if message.target == event.message.target}) == 1
        elif isinstance(event, TaskFinished) and event.task.kind in (TaskKind.R, TaskKind.U):
            held = self.here[MessageKind.PIECE if event.task.kind is TaskKind.R else MessageKind.SUM]
            held.difference_update([each for each in held if each[1].target == event.task.chunk])
        return super().handle(event)


@pytest.mark.parametrize("agreement", list(Agreement))
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_pieces_and_sums_are_of_one_step_at_a_time(agreement, num_replicas):
    for seed in range(10):
        draw = random.Random(seed).randrange
        base = chain(3, 2, split=draw(2) == 1, shared=((0, 2),) if draw(2) else ())
        setting = setting_of(
            base,
            linear(3),
            num_replicas=num_replicas,
            rules={"agreement": agreement},
            arbiter=_Holding,
            absences=((),) * 4,
        )
        random_walk(setting, draw)


class _Silent(StageArbiter):
    """Loses the messages of one kind."""

    lost = MessageKind.PIECE

    def handle(self, event):
        instructions = super().handle(event)
        return [each for each in instructions if not isinstance(each, Send) or each.message.kind is not self.lost]


class _SilentSums(_Silent):
    lost = MessageKind.SUM


class _SilentShares(_Silent):
    lost = MessageKind.SHARE


@pytest.mark.parametrize("arbiter", [_Silent, _SilentSums])
def test_a_message_that_is_not_sent_is_found(arbiter):
    with pytest.raises(CheckError):
        explore(setting_of(chain(2, 1), linear(2), arbiter=arbiter))


def test_a_share_that_is_not_sent_or_not_awaited_is_found(monkeypatch):
    options = {"num_replicas": 3, "rules": {"shares": True}}
    with pytest.raises(CheckError):
        explore(setting_of(chain(1, 1), linear(1), arbiter=_SilentShares, **options))
    wire = plan._PlanBuilder._wire_shares

    def hasty(self, chunk):
        wire(self, chunk)
        gate = self.arrivals[next(message for message in self.arrivals if message.kind is MessageKind.SHARE)]
        self.arrivals = {m: node for m, node in self.arrivals.items() if m.kind is not MessageKind.SHARE}
        self.needs[gate] = 1

    monkeypatch.setattr(plan._PlanBuilder, "_wire_shares", hasty)
    with pytest.raises(CheckError):
        explore(setting_of(chain(1, 1), linear(1), **options))


@pytest.mark.parametrize("agreement", list(Agreement))
def test_an_update_before_the_sums_of_others_is_found(monkeypatch, agreement):
    wire = plan._PlanBuilder._wire_agreement

    def hasty(self):
        self.sums.clear()
        wire(self)

    monkeypatch.setattr(plan._PlanBuilder, "_wire_agreement", hasty)
    with pytest.raises(CheckError):
        explore(setting_of(chain(2, 1), linear(2), rules={"agreement": agreement}))
