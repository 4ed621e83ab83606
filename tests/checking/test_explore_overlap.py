"""Every interleaving of small pipelines on whose stages two steps are under way, and walks through larger ones."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from rrfp_jax.core import HINTS, Agreement, Instruction, StepRules
from rrfp_jax.core.overlap import OverlappedArbiter
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.schedules import Placement, chain, linear, looped, v_shaped
from tests.model_checker import CheckError, Setting
from tests.model_checker.overlapped import Book, OverlapJudge, explore_overlapped, overlapped_walk

RULES = [
    StepRules(updates=updates, agreement=agreement, ordered=ordered)
    for updates in (False, True)
    for agreement in Agreement
    for ordered in (False, True)
]


def setting(placement: Placement, num_microbatches: int, num_steps: int, **given) -> Setting:
    words = {"hint": "bf", "window": 2, "rules": StepRules(agreement=Agreement.ALL), "split": False, "replicas": 1}
    words["delays"] = (1,) * placement.num_stages
    words |= given
    replicas = words["replicas"]
    graph = chain(placement.num_chunks, num_microbatches, split=words["split"])
    placed = replicated_placement(placement, replicas)
    return Setting(
        graph=replicated_graph(graph, replicas),
        placement=placed,
        windows=(words["window"],) * placed.num_stages,
        policies=(HINTS[words["hint"]],) * placed.num_stages,
        rules=words["rules"],
        absences=((),) * num_steps,
        arbiter=words.get("arbiter", OverlappedArbiter),
        delays=words["delays"] * replicas,
    )


def test_two_stages_four_steps_every_interleaving() -> None:
    report = explore_overlapped(setting(linear(2), 2, 4))
    assert report.num_states > 3000


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize(("hint", "split"), [*product(HINTS, [False]), ("bfw", True), ("f-priority", True)])
def test_explore_rules_windows_and_hints(rules: StepRules, window: int, hint: str, split: bool) -> None:
    explore_overlapped(setting(linear(2), 2, 3, rules=rules, window=window, hint=hint, split=split))


@pytest.mark.parametrize(
    ("placement", "num_microbatches", "given"),
    [
        (linear(3), 1, {}),
        (linear(3), 2, {"window": 1}),
        (looped(2, 2), 2, {"hint": "bf-deep", "window": 1}),
        (v_shaped(2), 2, {"hint": "bf-deep"}),
        (linear(1), 2, {"replicas": 2}),
        (linear(2), 2, {"delays": (1, 0)}),
        (linear(2), 2, {"delays": (1, 0), "hint": "bfw", "split": True, "rules": RULES[0]}),
        (linear(3), 2, {"delays": (1, 1, 0), "window": 1}),
        (linear(3), 1, {"delays": (1, 0, 1), "rules": StepRules(agreement=Agreement.NONE)}),
    ],
    ids=str,
)
def test_explore_placements_and_replicas(placement: Placement, num_microbatches: int, given: dict) -> None:
    explore_overlapped(setting(placement, num_microbatches, 3, **given))


def walk(seed: int) -> None:
    draw = Random(seed)
    placement = draw.choice([linear(2), linear(3), linear(4), looped(2, 2), looped(3, 2), v_shaped(3)])
    num_microbatches, split = draw.choice([1, 2, 3, 5]), draw.random() < 0.5
    some = setting(
        placement, num_microbatches, 5, split=split, rules=draw.choice(RULES), replicas=draw.choice([1, 1, 2])
    )
    if draw.random() < 0.3:
        some = replace(some, delays=tuple(draw.choice([0, 1]) for _ in some.windows))
    windows = tuple(draw.choice([1, 2, 3, 8]) for _ in some.windows)
    hints = tuple(HINTS[draw.choice([*HINTS])] for _ in some.windows)
    overlapped_walk(replace(some, windows=windows, policies=hints), draw.randrange)


@pytest.mark.parametrize("block", range(4))
def test_random_walks_end(block: int) -> None:
    for seed in range(block * 25, (block + 1) * 25):
        walk(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_walks_end(block: int) -> None:
    for seed in range(100 + block * 1000, 100 + (block + 1) * 1000):
        walk(seed)


# -- broken arbiters are found -----------------------------------------------------------------------------------------


class OwnWindows(OverlappedArbiter):
    """Counts the microbatches of each step by themselves."""

    def _link(self) -> None:
        super()._link()
        for one in self._pair:
            one._window.other = None


class NoSlotKept(OverlappedArbiter):
    """Lets the younger step take the slot that the older one's next microbatch needs."""

    def _link(self) -> None:
        super()._link()
        for one in self._pair:
            one._window.is_older = True


class EarlyEnds(OverlappedArbiter):
    """Lets the younger step update, and end, before the older one has ended."""

    def _dispatch(self, out: list[Instruction]) -> None:
        for one in self._arbiters():
            one.release_end(out)
        super()._dispatch(out)


@pytest.mark.parametrize(
    ("arbiter", "windows", "found"),
    [
        (OwnWindows, (1, 1), "which the window does not admit"),
        (NoSlotKept, (2, 1), "which the window does not admit"),
        (EarlyEnds, (4, 4), "although the step before has not ended"),
    ],
)
def test_a_broken_arbiter_is_found(arbiter: type[OverlappedArbiter], windows: tuple[int, int], found: str) -> None:
    rules = StepRules(agreement=Agreement.NONE)
    with pytest.raises(CheckError, match=found):
        explore_overlapped(replace(setting(linear(2), 2, 3, arbiter=arbiter, rules=rules), windows=windows))


def test_a_step_that_starts_before_the_last_but_one_has_ended_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_start(self: OverlapJudge, book: Book, step: int) -> bool:
        return step == book.num_started

    monkeypatch.setattr(OverlapJudge, "may_start", may_start)
    with pytest.raises(CheckError, match="with these under way: 0, 1"):
        explore_overlapped(setting(linear(2), 2, 3))


def test_a_step_that_ends_before_the_one_before_is_found() -> None:
    rules = StepRules(updates=False, agreement=Agreement.NONE)
    with pytest.raises(CheckError, match="ends step 1, and step 0 before it is under way"):
        explore_overlapped(setting(linear(2), 2, 3, arbiter=EarlyEnds, window=4, rules=rules))
