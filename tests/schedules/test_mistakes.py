"""Mistakes in descriptions: each is refused in one sentence that names the stage, the place and the remedy."""

import math
import sys
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from rrfp_jax.schedules import Op, ScheduleRequest, TaskKind, linear, schedule
from rrfp_jax.schedules import registry as description
from rrfp_jax.schedules.language import (
    B,
    F,
    I,
    Stage,
    W,
    block,
    given,
    like,
    nothing,
    owed,
    quickest,
    rounds,
    rule,
    slots,
    stream,
    turns,
)
from rrfp_jax.schedules.registry import Description, ScheduleEntry
from rrfp_jax.schedules.request import ONE_EACH, ScheduleShape, V

CALLS: Iterator[int] = count()


def alternating(s: Stage) -> object:
    """Another order whenever it is called."""
    return F.rest + B.rest if next(CALLS) % 8 < 4 else rounds(F.ahead(s.p - 1 - s.i), B)


def of_stage_1(wrong: Callable[[Stage], object]) -> Callable[[Stage], object]:
    """1F1B on all stages but one."""
    return lambda s: wrong(s) if s.i == 1 else rounds(F.ahead(s.p - 1 - s.i), B)


def crossed(s: Stage) -> object:
    """Stage 0 wants its first B before the second F, for which stage 1 waits before its own first B."""
    return given("0F0 0B0 0F1 0B1" if s.i == 0 else f"{s.i}F0 {s.i}F1 {s.i}B0 {s.i}B1") + F.rest + B.rest


MISTAKES: dict[str, tuple[Callable[[Stage], object], list[str]]] = {
    "a chunk of another stage": (
        of_stage_1(lambda s: F[3].rest + B.rest),
        ["stage 1", "chunk 3 is none of this stage's chunks [1]", "did you mean 1?"],
    ),
    "a chunk that there is not, in a list": (
        of_stage_1(lambda s: rounds(F.over([(9, 0)]), B)),
        ["stage 1", "chunk 9 is none", "did you mean 1?"],
    ),
    "a kind that there is not": (
        of_stage_1(lambda s: rounds(F, stream("BB"))),
        ["stage 1", "no microbatch has a task of kind 'BB'", "did you mean B?"],
    ),
    "a kind that runs once per step": (
        of_stage_1(lambda s: rounds(F, B, stream("R"))),
        ["stage 1", "no microbatch has a task of kind 'R'", "the kinds are F, B, I, W"],
    ),
    "a filter that leaves nothing": (
        of_stage_1(lambda s: rounds(F.only(lambda task: task.microbatch > 99), B)),
        ["stage 1", "the stream F holds no pass", ".only leave some"],
    ),
    "an empty list": (
        of_stage_1(lambda s: rounds(F, B.over([]))),
        ["stage 1", "the stream B holds no pass", "let .over list some"],
    ),
    "a microbatch that there is not": (
        of_stage_1(lambda s: rounds(F.over([(1, 0), (1, 7)]), B)),
        ["stage 1", "lists microbatch 7 of 4: use 0..3"],
    ),
    "a task twice in its rounds": (
        of_stage_1(lambda s: rounds(F, B, F.behind(1))),
        ["stage 1", "1F0 stands at 0 and again at 4: keep one"],
    ),
    "a task twice in phases": (
        of_stage_1(lambda s: rounds(F, B) + given("1F2")),
        ["stage 1", "1F2 stands at 4 and again at 8: keep one"],
    ),
    "two tasks in a slot": (
        of_stage_1(lambda s: slots(lambda task: 2 * task.microbatch + 2 * (task.kind is TaskKind.B))),
        ["stage 1", "1B0 and 1F1 both start in slot 2: shift one"],
    ),
    "a slot that is no number": (
        of_stage_1(lambda s: slots(lambda task: None)),
        ["stage 1", "1F0 starts at None: give the number of a slot"],
    ),
    "a backward before its forward": (
        of_stage_1(lambda s: rounds(B, F)),
        ["stage 1 runs 1B0 before 1F0", "exchange them"],
    ),
    "a circle over stages": (
        crossed,
        ["0B0 on stage 0 waits for 1B0, which stage 1 runs only after 1F1", "1F1 on stage 1 waits for 0F1"],
    ),
    "more than the limit": (
        lambda s: rounds(F.ahead(s.p - 1 - s.i), B).within(2),
        ["stage 0", "0F2 at 2 brings what is held to 3 activations, and the limit is 2", "fewer forwards"],
    ),
    "another order at every call": (
        alternating,
        ["stage 1", "called twice, it gives other orders from 3 on", "depend on the stage alone"],
    ),
    "tasks left out": (
        of_stage_1(lambda s: rounds(F, B.only(lambda task: task.microbatch == 0))),
        ["stage 1 leaves out 1B1, 1B2, 1B3", "add them, with + B.rest"],
    ),
    "many tasks left out": (
        lambda s: nothing,
        ["stage 0 leaves out 0F0, 0B0, 0F1, 0B1, 0F2 and 3 more", "F.rest + B.rest"],
    ),
    "a loop without an end": (
        of_stage_1(lambda s: F.rest + nothing.until(B[1])),
        ["stage 1", "repeated until B[1] adds nothing: let it contain B[1]"],
    ),
    "fewer than no repetitions": (
        lambda s: F * (s.i - 1) + F.rest + B.rest,
        ["stage 0", "cannot be repeated -1 times: give a whole number, 0 or more"],
    ),
    "every no rounds": (of_stage_1(lambda s: rounds(F.every(0), B)), ["stage 1", "F cannot run every 0 rounds"]),
    "a phase among streams": (
        of_stage_1(lambda s: rounds(F.rest, B)),
        ["stage 1", "rounds take streams", "add phases to rounds with +"],
    ),
    "no order": (of_stage_1(lambda s: None), ["stage 1 gives None", "return an order, for example rounds"]),
    "a list": (of_stage_1(lambda s: ["1F0"]), ["stage 1 gives a list: write given(...) around it"]),
    "a rule that is not frozen": (of_stage_1(lambda s: rule(turns(B, F))), ["stage 1 gives a rule", "add .frozen()"]),
    "a block that does not repeat": (
        of_stage_1(lambda s: block({F[1]: 0})),
        ["stage 1 gives a block of one microbatch: add .every(slots)"],
    ),
    "a block that is too dense": (
        of_stage_1(lambda s: block({F: 0, B: 1}).every(1)),
        ["stage 1", "2 passes do not fit in 1 slots"],
    ),
    "two makers": (
        of_stage_1(lambda s: rule(B, F).frozen()),
        ["stage 1 gives a Frozen, stage 0 a TaskOrder", "in one way"],
    ),
    "an error of its own": (of_stage_1(lambda s: 1 // 0), ["stage 1", "ZeroDivisionError in line", "test_mistakes.py"]),
    "a lane twice": (of_stage_1(lambda s: rule(F, B, F).frozen()), ["stage 1", "the rule has F in two lanes"]),
    "a key without a lane": (of_stage_1(lambda s: rule(F, B, W="chunk").frozen()), ["stage 1", "a key for W"]),
    "a word that there is not": (
        of_stage_1(lambda s: rule(F, B, F="age").frozen()),
        ["stage 1", "the key has the word 'age'", "microbatch"],
    ),
    "a fraction of a repetition": (lambda s: F * 1.5 + B.rest, ["stage 0", "repeated 1.5 times: give a whole number"]),
    "rounds that are no number": (of_stage_1(lambda s: rounds(F.ahead("1"), B)), ["stage 1", "'1' rounds ahead"]),
    "a repetition until an order": (of_stage_1(lambda s: F.until(nothing)), ["stage 1", "write .until(F[0])"]),
    "slots of a mapping": (of_stage_1(lambda s: slots({F: 0})), ["stage 1", "write block(...).every(n)"]),
    "a choice of nothing": (of_stage_1(lambda s: quickest()), ["stage 1", "nothing to choose from"]),
    "an error within a filter": (
        of_stage_1(lambda s: rounds(F.only(lambda task: 1 // 0), B)),
        ["'mine', stage 1: ZeroDivisionError in line", "test_mistakes.py"],
    ),
    "an exit": (of_stage_1(lambda s: sys.exit(3)), ["stage 1", "SystemExit in line"]),
    "something else added": (of_stage_1(lambda s: F.rest + "B"), ["stage 1", "'B' is no order"]),
    "a task of another stage": (of_stage_1(lambda s: given("0F0") + F.rest), ["stage 1", "chunk 0 is none"]),
    "rounds beyond all bounds": (
        of_stage_1(lambda s: rounds(F.ahead(math.nan), B)),
        ["stage 1", "F cannot run nan rounds"],
    ),
    "every word of rounds": (
        of_stage_1(lambda s: rounds(F.every("2"), B)),
        ["stage 1", "F cannot run every '2' rounds"],
    ),
    "a chunk that is a word": (
        of_stage_1(lambda s: F["1"].rest),
        ["stage 1", "F['1'] is of no chunk: give the number"],
    ),
    "a list of microbatches": (of_stage_1(lambda s: rounds(F.over(range(4)), B)), ["stage 1", "F.over takes pairs"]),
    "a filter that is none": (of_stage_1(lambda s: rounds(F.only(3), B)), ["stage 1", "F.only takes a function"]),
    "a function that gives no rounds": (
        of_stage_1(lambda s: rounds(F.ahead(lambda chunk: None), B)),
        ["stage 1: TypeError", "'NoneType'"],
    ),
    "repetitions in words": (of_stage_1(lambda s: F * "2"), ["stage 1", "repeated '2' times: give a whole number"]),
    "a limit in words": (
        of_stage_1(lambda s: (F.rest + B.rest).within("3")),
        ["stage 1", "within is '3': give a number"],
    ),
    "what is no task": (of_stage_1(lambda s: given("1F0 zz")), ["stage 1", "given takes tasks", "'zz' is not a task"]),
    "numbers for tasks": (of_stage_1(lambda s: given([1, 2])), ["stage 1", "given takes tasks", "not [1, 2]"]),
    "a stream of a number": (of_stage_1(lambda s: rounds(F, B, stream(3))), ["stage 1", "not of 3"]),
    "a slot that is not finite": (of_stage_1(lambda s: slots(lambda task: math.nan)), ["stage 1", "1F0 starts at nan"]),
    "a block of letters": (
        of_stage_1(lambda s: block({"F": 0, "B": 1}).every(2)),
        ["stage 1", "a block maps streams to slots, such as {F[0]: 0"],
    ),
    "a fraction of a slot": (
        of_stage_1(lambda s: block({F: 0.5, B: 1}).every(2)),
        ["stage 1", "F of the block starts at 0.5", "a whole one"],
    ),
    "lengths that are a number": (of_stage_1(lambda s: rule(B, F).frozen(lengths=2)), ["stage 1", "lengths is 2"]),
    "lengths below nothing": (
        lambda s: rule(B, F).frozen(lengths=lambda task: math.nan if task.chunk == 1 else 1),
        ["stage 1", "1F0 would last nan: let lengths give 0 or more"],
    ),
    "a way that takes less than no time": (of_stage_1(lambda s: rule(B, F).frozen(hop=-1)), ["stage 1", "hop is -1"]),
    "limits that differ": (
        lambda s: rule(B, F).frozen(under_way=1 + (s.i == 1)),
        ["stage 1", "give all stages the same"],
    ),
    "a lane of one chunk": (
        of_stage_1(lambda s: rule(F[1], B).frozen()),
        ["stage 1", "a kind on all chunks", "'F[1]'"],
    ),
    "a lane that holds nothing": (
        lambda s: rule(B, F, stream("X")).frozen(),
        ["stage 0", "no microbatch has a task of kind 'X'"],
    ),
    "a key that is a number": (
        of_stage_1(lambda s: rule(B, F, key=3).frozen()),
        ["stage 1", "the key is 3: write chunk"],
    ),
    "a choice among words": (of_stage_1(lambda s: quickest("a")), ["stage 1", "chooses among orders, not 'a'"]),
    "fewer to choose from": (
        lambda s: quickest(*[F.rest + B.rest] * (1 if s.i == 1 else 2)),
        ["stage 1", "chooses among fewer orders than others"],
    ),
    "a chunk too many": (
        of_stage_1(lambda s: [down for down, _ in [s.chunks]]),
        ["stage 1", "ValueError in line", "test_mistakes.py: not enough values to unpack"],
    ),
    "a limit of microbatches in words": (
        of_stage_1(lambda s: rule(B, F).frozen(under_way="2")),
        ["stage 1", "under_way is '2': give a number"],
    ),
    "a limit of activations in words": (
        of_stage_1(lambda s: rule(B, F).frozen(holding="2")),
        ["stage 1", "holding is '2': give a number"],
    ),
    "keys that cannot be compared": (
        lambda s: rule(B, F, key=lambda task: (task.microbatch if s.i == 0 or task.microbatch else "0",)).frozen(),
        ["stage 1", "the keys of B cannot be compared", "give tuples of numbers"],
    ),
    "a key that is nothing": (
        lambda s: rule(B, F, F=lambda task: None if s.i == 1 else (1,)).frozen(),
        ["stage 1", "the keys of F cannot be compared", "give tuples of numbers"],
    ),
    "lengths in words": (
        lambda s: rule(B, F).frozen(lengths=lambda task: "1" if task.chunk == 1 else 1),
        ["stage 1", "1F0 would last '1': let lengths give 0 or more"],
    ),
    "an error within lengths": (
        lambda s: rule(B, F).frozen(lengths=lambda task: {0: 1}[task.chunk]),
        ["stage 1", "KeyError in line", "test_mistakes.py"],
    ),
    "two orders to be like": (
        of_stage_1(lambda s: rule(like(F.rest, s), like(B.rest, s)).frozen()),
        ["stage 1", "like two orders: keep one of them, or add them with +"],
    ),
    "a chunk that is a truth": (of_stage_1(lambda s: F[True].rest), ["stage 1", "F[True] is of no chunk"]),
    "a task that there is not": (of_stage_1(lambda s: given("1F9")), ["stage 1", "1F9 names microbatch 9", "0..3"]),
}


def refusal(describe: Description, **facts: object) -> str:
    entry = ScheduleEntry(name="mine", describe=describe, **{"shape": ONE_EACH} | facts)
    with pytest.raises(ValueError, match="mine") as caught:
        entry.table(ScheduleRequest(num_stages=4 if "shape" not in facts else 2, num_microbatches=4))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_its_stage_its_place_and_the_remedy(mistake: str) -> None:
    describe, words = MISTAKES[mistake]
    message = refusal(describe)
    assert [word for word in words if word not in message] == [], message


def test_what_may_be_of_two_chunks_must_say_which() -> None:
    message = refusal(lambda s: F * 2 + F.rest + B.rest, shape=V)
    assert "stage 0: F may be of chunks [0, 3]: say which, for example F[0]" in message


def test_halves_of_a_backward_are_for_split_ones() -> None:
    message = refusal(lambda s: rounds(F.ahead(s.p - 1 - s.i), I, W), split_backward=False)
    assert "stage 0: I[0] is not there, the backward is whole: write B, or split_backward=True" in message
    message = refusal(lambda s: rounds(F.ahead(s.p - 1 - s.i), I), split_backward=True)
    assert "stage 0 leaves out 0W0, 0W1, 0W2, 0W3: add them, with + W.rest" in message
    entry = ScheduleEntry(name="mine", describe=lambda s: rule(I, F, W).frozen(), shape=ONE_EACH)
    assert entry.table(ScheduleRequest(num_stages=2, num_microbatches=2)).graph.split, "a lane of I asks for it too"


def test_a_packed_block_holds_f_and_i_and_no_slot_twice() -> None:
    message = refusal(lambda s: block({F: s.i, B: 7 - s.i}).every(3).packed(), split_backward=True)
    assert "packed() gives W their slots itself" in message
    message = refusal(lambda s: block({F: s.i, I: 3 + s.i}).every(3).packed(), split_backward=True)
    assert "stage 0: 0F1 and 0I0 both start in slot 3" in message
    message = refusal(lambda s: block({F: s.i}).every(3).packed(), split_backward=True)
    assert "stage 0 leaves out 0I0, 0W0" in message
    assert "let the block hold I too" in message


def test_a_rule_whose_limits_admit_nothing_more_leaves_tasks_out() -> None:
    message = refusal(lambda s: rule(B, F).frozen(holding=0))
    assert "stage 0 leaves out 0F0" in message
    assert "a larger limit" in message


@pytest.mark.parametrize(
    "describe", [lambda s: [None for _ in count()], lambda s: F.over((s.i, m) for m in count())], ids=["list", "passes"]
)
def test_a_loop_without_an_end_is_ended(describe: Description, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MOST_LINES", 1000)
    assert "stage 0: it has run 1000 lines and goes on: let its loops end" in refusal(describe)
    assert sys.gettrace() is None


def test_operations_left_out_are_added_by_their_letters_and_those_of_a_step_are_not() -> None:
    noted, once = Op("O", after="F", ms=1.0), Op("Z", after="B", per="step", ms=1.0)
    message = refusal(
        lambda s: rounds(F.ahead(s.p - 1 - s.i), B, stream("O").only(lambda t: t.microbatch)), ops=(noted,)
    )
    assert 'stage 0 leaves out 0O0: add them, with + stream("O").rest' in message
    message = refusal(lambda s: rounds(F.ahead(s.p - 1 - s.i), B) + stream("Z").rest, ops=(once,))
    assert "stage 0: Z runs once per step, when what it comes after is done: leave it out of the order" in message


def test_what_is_no_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule 'mine' has the shape 'V': give one of"):
        schedule("mine", shape="V")(alternating)
    message = refusal(lambda s: F.rest + B.rest, shape=ScheduleShape("mine", linear))
    assert "'mine': TypeError: " in message


def test_what_is_no_operation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule 'mine' has 'O' among its operations: give Op\(...\)"):
        schedule("mine", ops=("O",), source="a test")(alternating)


def test_more_repetitions_than_there_are_microbatches_add_nothing() -> None:
    entry = ScheduleEntry(name="mine", describe=lambda s: F * 10**9 + B.rest, shape=ONE_EACH)
    table = entry.table(ScheduleRequest(num_stages=2, num_microbatches=3))
    assert [str(task) for task in table.orders[0]] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]


def test_what_owes_nothing_adds_nothing() -> None:
    describe: Description = lambda s: rounds(F.ahead(s.p - 1 - s.i), I) + owed * 2 + owed.rest + owed.rest  # noqa: E731
    entry = ScheduleEntry(name="mine", describe=describe, shape=ONE_EACH)
    table = entry.table(ScheduleRequest(num_stages=2, num_microbatches=3))
    assert [str(task) for task in table.orders[0]] == ["0F0", "0F1", "0I0", "0F2", "0I1", "0I2", "0W0", "0W1", "0W2"]
