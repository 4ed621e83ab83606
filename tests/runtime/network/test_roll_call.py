"""The rendezvous' rules: who is refused, and what a verdict names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.runtime.network import Hello, MalformedMessage, Member, configuration_digest
from rrfp_jax.runtime.network.configuration import differences, name_ranks
from rrfp_jax.runtime.network.roll_call import RollCall

CONFIGURATION = {"seed": 0, "optimizer": {"lr": 0.001, "betas": [0.9, 0.95]}, "model": {}}


def hello(rank: int, *, num_ranks: int = 3, pid: int | None = None, **changes: Any) -> Hello:
    member = Member(rank=rank, host="here", pid=100 + rank if pid is None else pid, address={"messages": "tcp://x"})
    return Hello.of(member, num_ranks, CONFIGURATION | changes)


def test_all_present_and_equal_is_success_in_any_order() -> None:
    roll = RollCall(3)
    for rank in (2, 0, 1):
        assert not roll.is_decided
        assert roll.admit(hello(rank)) is None
    assert roll.members is not None
    assert [member.rank for member in roll.members] == [0, 1, 2]
    assert roll.admit(hello(1)) is None, "saying hello again is harmless"


def test_missing_ranks_are_named_at_the_deadline() -> None:
    roll = RollCall(6)
    roll.admit(hello(3, num_ranks=6))
    roll.expire(60.0)
    assert roll.failure == (
        "the rendezvous failed: the rendezvous was not complete after 60 s\n  missing: ranks 0-2, 4-5"
    )


def test_differing_keys_are_named_with_all_values_and_the_missing_ranks_too() -> None:
    roll = RollCall(4)
    roll.admit(hello(0, num_ranks=4))
    roll.admit(hello(1, num_ranks=4, seed=1, optimizer={"lr": 0.01, "betas": [0.9, 0.95]}))
    roll.admit(hello(2, num_ranks=3))
    roll.expire(5.0)
    assert roll.failure is not None
    assert roll.failure.splitlines()[1:] == [
        "  missing: rank 3",
        "  4 ranks are expected, rank 2 was told of 3",
        "  optimizer.lr is 0.001 on ranks 0, 2, 0.01 on rank 1",
        "  seed is 0 on ranks 0, 2, 1 on rank 1",
    ]


def test_an_exit_before_the_end_is_the_verdict_and_one_after_changes_nothing() -> None:
    roll = RollCall(2)
    roll.admit(hello(0, num_ranks=2))
    roll.exited(1, 17)
    assert roll.failure is not None
    assert roll.failure.splitlines() == [
        "the rendezvous failed: rank 1 ended with code 17 before all ranks had come",
        "  missing: rank 1",
        "  rank 1 ended with code 17",
    ]
    done = RollCall(1)
    done.admit(hello(0, num_ranks=1))
    done.exited(0, -9)
    assert (done.failure, done.exits) == (None, {0: -9})


def test_who_comes_after_the_exit_of_another_is_not_to_blame() -> None:
    roll = RollCall(3)
    roll.exited(1, 6)
    assert roll.failure is not None
    assert roll.failure.splitlines()[1:] == [
        "  missing: rank 1",
        "  not here yet: ranks 0, 2",
        "  rank 1 ended with code 6",
    ]
    assert roll.admit(hello(2)) == roll.failure
    assert "rank 1 came late" in (roll.admit(hello(1)) or "")


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (hello(3), "rank 3 .* is out of range: this run has 3 ranks, 0 to 2"),
        (hello(-1), "rank -1 .* is out of range"),
        (hello(0, pid=7), "rank 0 was started twice: it is here as pid 100 on host here, this is pid 7"),
    ],
)
def test_impossible_ranks_are_refused_with_a_sentence(late: Hello, message: str) -> None:
    roll = RollCall(3)
    roll.admit(hello(0))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(roll.admit(late))
    assert not roll.is_decided


def test_a_late_rank_is_refused_after_a_failure() -> None:
    roll = RollCall(2)
    roll.expire(1.0)
    refusal = roll.admit(hello(0, num_ranks=2))
    assert refusal is not None
    late, why, missing = refusal.split("\n  ")
    assert late == "rank 0 came late: the rendezvous had failed before; start all ranks together again"
    assert (why, missing) == ("the rendezvous failed: the rendezvous was not complete after 1 s", "missing: ranks 0-1")


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    digest = configuration_digest({"a": 1, "b": {"c": 2, "d": 3}})
    assert configuration_digest({"b": {"d": 3, "c": 2}, "a": 1}) == digest
    assert configuration_digest({"a": 2, "b": {"c": 2, "d": 3}}) != digest


def test_absent_keys_are_differences_and_many_are_summed_up() -> None:
    assert differences({0: {"a": {"b": None}}, 1: {"a": {}}}) == [
        "a is nothing on rank 0, {} on rank 1",
        "a.b is null on rank 0, nothing on rank 1",
    ]
    many = differences({0: {f"k{i:02}": 0 for i in range(15)}, 1: {f"k{i:02}": 1 for i in range(15)}})
    assert len(many) == 11
    assert many[-1] == "and 5 more keys"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), PLAIN, max_size=3), min_size=1, max_size=4))
def test_differences_are_found_exactly_where_digests_differ(configurations: list[dict[str, Any]]) -> None:
    digests = {configuration_digest(configuration) for configuration in configurations}
    assert bool(differences(dict(enumerate(configurations)))) == (len(digests) > 1)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 1], "ranks 0-1, 5"), ([0, 2], "ranks 0, 2")]
)
def test_ranks_are_named_briefly(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_hellos_travel_as_plain_data() -> None:
    sent = hello(1)
    assert Hello.from_dict(sent.as_dict()) == sent
    for name in ("member", "num_ranks", "configuration", "digest"):
        with pytest.raises(MalformedMessage, match=f"field '{name}'"):
            Hello.from_dict({key: value for key, value in sent.as_dict().items() if key != name})
