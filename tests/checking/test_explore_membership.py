"""Membership under losses at every transition; broken variants must be found."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.membership import HeadMembership, HeadReached, RankMembership, Recovered
from tests.model_checker.membership import MembershipFault, MembershipSearch, MembershipSetting, Status


def explored(**setting):
    search = MembershipSearch(MembershipSetting(**setting))
    num_states = search.explore()
    assert search.num_ends > 1
    return num_states


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "setting",
    [
        {"num_steps": 1},
        {"num_steps": 1, "evaluates": frozenset({0})},
        {"num_stages": 1, "num_replicas": 3, "num_steps": 0, "gatherings": (0, 0)},
        {"num_stages": 1, "num_steps": 1, "deaths": 0, "suspicions": 2},
        {"num_stages": 1, "num_replicas": 3, "num_steps": 1, "deaths": 2},
        {"num_stages": 2, "num_replicas": 1, "num_steps": 1, "deaths": 0, "suspicions": 1},
    ],
    ids=str,
)
def test_few_faults(setting):
    explored(**setting)


BACK = {"num_steps": 2, "holds": frozenset({1}), "starts": 1}
"""A rank may come back before the second step."""


def explored_with_newcomers(**setting):
    search = MembershipSearch(MembershipSetting(**setting))
    num_states = search.explore()
    assert search.num_ends_with_newcomers > 1
    return num_states


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "setting",
    [
        {**BACK, "num_stages": 1},
        {**BACK, "num_stages": 1, "deaths": 2, "starts": 2, "gatherings": (1, 2)},
        {**BACK, "num_stages": 1, "deaths": 2, "starts": 2, "num_steps": 3, "holds": frozenset({1, 2})},
    ],
    ids=str,
)
def test_a_rank_comes_back(setting):
    explored_with_newcomers(**setting)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        BACK,
        {**BACK, "num_steps": 1, "holds": frozenset({0}), "dies_first": 3},
        {**BACK, "num_stages": 1, "num_replicas": 3, "deaths": 2},
        {**BACK, "num_stages": 1, "deaths": 2, "starts": 2, "suspicions": 1, "gatherings": (1, 2)},
    ],
    ids=str,
)
def test_ranks_come_back_among_more_faults(setting):
    assert explored_with_newcomers(**setting) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        {"num_steps": 3, "evaluates": frozenset({1})},
        {"num_steps": 2, "deaths": 2},
        {"num_steps": 2, "evaluates": frozenset({0}), "deaths": 2},
        {"num_steps": 0, "gatherings": (0, 0)},
        {"num_steps": 0, "gatherings": (0, 0), "deaths": 2},
        {"num_steps": 1, "gatherings": (1, 1)},
        {"num_steps": 1, "gatherings": (0, 1)},
        {"num_steps": 2, "deaths": 0, "suspicions": 1},
        {"num_steps": 1, "deaths": 1, "suspicions": 1},
        {"num_steps": 0, "gatherings": (0,), "deaths": 1, "suspicions": 1},
        {"num_stages": 1, "num_replicas": 3, "num_steps": 2, "deaths": 2, "suspicions": 1},
        {"num_stages": 1, "num_replicas": 3, "num_steps": 2, "gatherings": (1, 2), "deaths": 2},
        {"num_stages": 1, "num_replicas": 3, "num_steps": 1, "deaths": 0, "suspicions": 3},
    ],
    ids=str,
)
def test_more_faults(setting):
    assert explored(**setting) > 1_000


# -- broken variants ---------------------------------------------------------------------------------------------------


class ForgetfulHead(HeadMembership):
    """Tells of losses without an order: all of them are epoch 1."""

    def _declare(self, rank, reason, out):
        self.epoch = 0
        super()._declare(rank, reason, out)


class LastHead(HeadMembership):
    """Takes ranks that were lost before for living ones when it tells of another loss."""

    def _declare(self, rank, reason, out):
        self.living = tuple(range(len(self._units_of)))
        super()._declare(rank, reason, out)


class Hasty(RankMembership):
    """The first rank lets all go on with what it knows itself."""

    def _recover(self):
        return super()._recover()._replace(step=self.newest, verdict=self.verdict)


class Cautious(RankMembership):
    """Steps that not all have finished are done again by all."""

    def _recover(self):
        told = min(self._told.values(), key=lambda each: each.step)
        return super()._recover()._replace(step=told.step, verdict=told.verdict)


class Silent(RankMembership):
    """Nobody passes on the result of a gathering."""

    def _recover(self):
        return super()._recover()._replace(results=())


class Unfrozen(RankMembership):
    """A rank goes on while it waits for the others."""

    def _come_to(self, event, out):
        super()._come_to(event, out)
        self.is_frozen = False

    def _take(self, sender, note, out):
        self.is_frozen |= isinstance(note, Recovered)
        super()._take(sender, note, out)


class Undead(RankMembership):
    """A rank that was declared lost goes on."""

    def _come_to(self, event, out):
        if self.rank in event.living:
            super()._come_to(event, out)


class Hospitable(HeadMembership):
    """Takes a newcomer in once a single rank holds."""

    def _take_back(self, out):
        self._holding = dict.fromkeys(self.living, max(self._holding.values(), default=0))
        super()._take_back(out)


class Fickle(HeadMembership):
    """Lets those go on who hold now, and has others hold for the same step."""

    def _take_back(self, out):
        super()._take_back(out)
        self._released = -1


class Unprepared(HeadMembership):
    """Takes a newcomer in without the state."""

    def _take_back(self, out):
        if self._holding:
            step = max(self._holding.values())
            self.newcomers = dict.fromkeys(self.newcomers, step)
        super()._take_back(out)


class Numberless(RankMembership):
    """A newcomer counts gatherings from its first one."""

    def _go_on(self, answer, out):
        self._is_newcomer = False
        super()._go_on(answer, out)


GATHERS = {"num_stages": 1, "num_replicas": 3, "num_steps": 0, "gatherings": (0, 0)}


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "broken",
    [
        {"carries_epochs": False},
        {"reports_early": True},
        {"head": ForgetfulHead, "deaths": 2},
        {"head": LastHead, "deaths": 2},
        {"member": Hasty},
        {"member": Cautious},
        {"member": Silent, **GATHERS},
        {"member": Unfrozen},
        {"member": Undead, "num_stages": 1, "deaths": 0, "suspicions": 1},
        {"head": Hospitable, "num_stages": 1, **BACK},
        {"head": Fickle, "num_stages": 1, **BACK, "deaths": 2, "starts": 2},
        {"head": Unprepared, "num_stages": 1, **BACK},
        {"member": Numberless, "num_stages": 1, **BACK, "gatherings": (1, 2)},
    ],
    ids=str,
)
def test_broken_variants_are_found(broken):
    with pytest.raises(MembershipFault, match=r"\d+\. "):
        explored(**{"num_steps": 1, **broken})


# -- larger pipelines --------------------------------------------------------------------------------------------------


def walk(random, **setting):
    """One random run: which faults come, and when, is drawn, as is what reaches whom next."""
    search = MembershipSearch(MembershipSetting(**setting))
    state = search.start
    eager = random.random()
    while True:
        moves = search.all_moves(state)
        if not moves:
            return search.heads.values[state.head]
        faults = [move for move in moves if any(word in move[0] for word in ("dies", "suspects", "starts anew"))]
        progress = [move for move in moves if move not in faults]
        is_fault = not progress or (faults and random.random() < 0.02 + 0.1 * eager)
        if not progress and random.random() < 0.5:
            return search.heads.values[state.head]
        what, new = random.choice(faults if is_fault else progress)
        search.follow(state, what, new)
        state = new
        rank = random.randrange(len(state.ranks))
        at = search.ranks.values[state.ranks[rank]]
        # The link of a newcomer says that it is one, whenever it reaches the head.
        if random.random() < 0.05 and at.status is Status.RUNS and at.has_come:
            new = search.apply(state, rank, HeadReached())
            search.follow(state, f"rank {rank} reaches the head again", new)
            state = new


def check_walks(seed, num_stages, num_replicas):
    random = Random(seed)
    walk(
        random,
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_steps=3,
        evaluates=frozenset({random.randrange(4)}),
        gatherings=random.choice([(), (1, 3), (0, 2, 3)]),
        deaths=random.randrange(num_stages * num_replicas),
        suspicions=random.randrange(3),
        holds=frozenset(random.sample(range(3), random.randrange(3))),
        starts=random.randrange(3),
    )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), num_stages=st.integers(1, 2), num_replicas=st.integers(2, 3))
def test_random_losses(seed, num_stages, num_replicas):
    check_walks(seed, num_stages, num_replicas)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.sampled_from([(1, 5), (2, 3), (3, 2), (3, 3), (4, 2)]))
def test_random_losses_of_larger_pipelines(seed, sizes):
    check_walks(seed, *sizes)
