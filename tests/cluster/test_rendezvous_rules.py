"""The rendezvous' rules: who is refused, and what a verdict names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.cluster import JoinRequest, Member
from rrfp_jax.cluster.rendezvous import ProcessEnding, Rendezvous, configuration_differences, name_hosts, name_ranks
from rrfp_jax.records import MalformedRecord, from_plain, to_plain

KILLED = ProcessEnding(code=137, at_s=1.0)
CONFIGURATION = {"seed": 0, "optimizer": {"lr": 0.001, "betas": [0.9, 0.95]}, "model": {}}


def hello(rank: int, *, num_ranks: int = 3, token: str = "a", **changes: Any) -> JoinRequest:
    member = Member(rank=rank, host="here", pid=1, address={"messages": "tcp://x"}, token=f"{token}{rank}")
    return JoinRequest.of(member, num_ranks, CONFIGURATION | changes)


def test_all_present_and_equal_is_success_in_any_order() -> None:
    rules = Rendezvous(3)
    for rank in (2, 0, 1):
        assert not rules.is_decided
        assert rules.admit(hello(rank)) is None
    assert rules.members is not None
    assert [member.rank for member in rules.members] == [0, 1, 2]
    assert rules.admit(hello(1)) is None, "saying hello again is harmless"


def test_the_service_is_asked_for_as_soon_as_one_rank_needs_it_and_never_else() -> None:
    rules = Rendezvous(2)
    rules.admit(hello(0, num_ranks=2))
    assert not rules.status().needs_service
    rules.admit(JoinRequest.of(hello(1).member, 2, CONFIGURATION, needs_service=True))
    assert rules.status().needs_service
    assert rules.members is not None


def test_missing_ranks_are_named_at_the_deadline() -> None:
    rules = Rendezvous(6)
    rules.admit(hello(3, num_ranks=6))
    rules.expire(60.0)
    assert rules.failure == (
        "the rendezvous failed: the rendezvous was not complete after 60 s\n  missing: ranks 0-2, 4-5"
    )


def test_differing_keys_are_named_with_all_values_and_the_missing_ranks_too() -> None:
    rules = Rendezvous(4)
    rules.admit(hello(0, num_ranks=4))
    rules.admit(hello(1, num_ranks=4, seed=1, optimizer={"lr": 0.01, "betas": [0.9, 0.95]}))
    rules.admit(hello(2, num_ranks=3))
    rules.expire(5.0)
    assert rules.failure is not None
    assert rules.failure.splitlines()[1:] == [
        "  missing: rank 3",
        "  4 ranks are expected, rank 2 was told of 3",
        "  optimizer.lr is 0.001 on ranks 0, 2, 0.01 on rank 1",
        "  seed is 0 on ranks 0, 2, 1 on rank 1",
    ]


def test_an_exit_before_the_end_is_the_verdict_and_one_after_changes_nothing() -> None:
    rules = Rendezvous(2)
    rules.admit(hello(0, num_ranks=2))
    rules.ended(1, ProcessEnding(code=17, at_s=1.0))
    assert rules.failure is not None
    assert rules.failure.splitlines() == ["the rendezvous failed: rank 1 ended with code 17 before all ranks had come"]
    done = Rendezvous(1)
    done.admit(hello(0, num_ranks=1))
    done.ended(0, KILLED)
    assert (done.failure, done.endings) == (None, {0: KILLED})


def test_who_comes_after_the_end_of_another_is_neither_to_blame_nor_called_missing() -> None:
    rules = Rendezvous(4)
    rules.admit(hello(0, num_ranks=4))
    rules.ended(1, KILLED)
    verdict = "the rendezvous failed: rank 1 ended with code 137 before all ranks had come"
    assert (rules.failure or "").splitlines() == [verdict, "  not here yet: ranks 2-3"]
    assert (rules.admit(hello(2, num_ranks=4)) or "").splitlines() == [verdict, "  not here yet: rank 3"]
    assert rules.admit(hello(3, num_ranks=4)) == verdict
    assert "rank 1 came late" in (rules.admit(hello(1, num_ranks=4)) or "")


def test_ranks_that_would_be_refused_are_to_be_ended() -> None:
    rules = Rendezvous(4)
    rules.admit(hello(0, num_ranks=4))
    rules.ended(1, KILLED)
    assert rules.status().doomed == (2, 3)
    rules.admit(hello(2, num_ranks=4))
    assert rules.status().doomed == (3,)
    rules.ended(3, KILLED)
    assert rules.status().doomed == ()

    late = Rendezvous(3)
    late.admit(hello(2))
    late.expire(9.0)
    assert late.status().doomed == (0, 1)

    slow = Rendezvous(3)
    slow.expire(9.0)
    assert slow.status().doomed == ()
    assert "rank 2 came late" in (slow.admit(hello(2)) or "")
    assert slow.status().doomed == (0, 1)


def test_ranks_are_left_alone_that_may_not_mean_to_come() -> None:
    helped, elsewhere = Rendezvous(2), Rendezvous(2)
    helped.ended(0, ProcessEnding(code=0, at_s=1.0))  # it has printed its help, as all others will
    elsewhere.expire(9.0)  # nobody has come
    assert helped.failure
    assert elsewhere.failure
    assert helped.status().doomed == elsewhere.status().doomed == ()


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (hello(3), "rank 3 .* is out of range: this run has 3 ranks, 0 to 2"),
        (hello(-1), "rank -1 .* is out of range"),
        (
            hello(0, token="b"),
            "rank 0 was started twice: it is here as pid 1 on host here, this is another process, pid 1",
        ),
    ],
)
def test_impossible_ranks_are_refused_with_a_sentence(late: JoinRequest, message: str) -> None:
    rules = Rendezvous(3)
    rules.admit(hello(0))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(rules.admit(late))
    assert not rules.is_decided


def test_a_late_rank_is_refused_after_a_failure() -> None:
    rules = Rendezvous(2)
    rules.expire(1.0)
    refusal = rules.admit(hello(0, num_ranks=2))
    assert refusal is not None
    late, why, missing = refusal.split("\n  ")
    assert late == "rank 0 came late: the rendezvous had failed before; start all ranks together again"
    assert (why, missing) == ("the rendezvous failed: the rendezvous was not complete after 1 s", "missing: ranks 0-1")


def text(configuration: dict[str, Any]) -> str:
    return JoinRequest.of(hello(0).member, 1, configuration).configuration


def test_the_order_of_keys_makes_no_difference() -> None:
    assert text({"a": 1, "b": {"c": 2, "d": 3}}) == text({"b": {"d": 3, "c": 2}, "a": 1})


def test_absent_keys_are_differences_and_many_are_summed_up() -> None:
    assert configuration_differences({0: text({"a": {"b": None}}), 1: text({"a": {}})}) == [
        "a is nothing on rank 0, {} on rank 1",
        "a.b is null on rank 0, nothing on rank 1",
    ]
    many = configuration_differences({rank: text({f"k{i:02}": rank for i in range(15)}) for rank in range(2)})
    assert len(many) == 11
    assert many[-1] == "and 5 more keys"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), PLAIN, max_size=3), min_size=1, max_size=4))
def test_differences_are_found_exactly_where_texts_differ(configurations: list[dict[str, Any]]) -> None:
    texts = [text(configuration) for configuration in configurations]
    assert bool(configuration_differences(dict(enumerate(texts)))) == (len(set(texts)) > 1)


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 1], "ranks 0-1, 5"), ([0, 2], "ranks 0, 2")]
)
def test_ranks_are_named_briefly(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words


def test_hellos_travel_as_plain_data() -> None:
    sent = hello(1)
    assert from_plain(JoinRequest, to_plain(sent)) == sent
    for name in ("member", "num_ranks", "configuration", "needs_service"):
        with pytest.raises(MalformedRecord, match="an object with member, num_ranks, configuration, needs_service is"):
            from_plain(JoinRequest, {key: value for key, value in to_plain(sent).items() if key != name})
    for configuration in ("[1]", "{", ""):
        with pytest.raises(MalformedRecord):
            from_plain(JoinRequest, {**to_plain(sent), "configuration": configuration})


def test_what_does_not_fit_the_head_is_named_and_who_says_nothing_of_it_is_welcome() -> None:
    rules = Rendezvous(3, {"service": "open", "other": 1})
    rules.admit(hello(0, service="secured"))
    rules.admit(hello(1))
    rules.admit(hello(2, service="secured"))
    assert rules.failure is not None
    assert rules.failure.splitlines()[1] == '  service is "open" on the head, but "secured" on ranks 0, 2'
    equal = Rendezvous(1, {"service": "open"})
    assert equal.admit(hello(0, num_ranks=1, service="open")) is None
    assert equal.members is not None


def test_hosts_are_told_apart_where_they_have_one_name() -> None:
    def member(rank: int, host: str, address: str, boot: str) -> Member:
        return Member(rank=rank, host=host, pid=1, boot=boot, address={"messages": f"tcp://{address}:{7000 + rank}"})

    places = [("w", "10.0.0.1", "a"), ("w", "10.0.0.1", "a"), ("w", "10.0.0.2", "b"), ("v", "[fe80::1]", "c")]
    one, other, third, fourth = name_hosts([member(rank, *place) for rank, place in enumerate(places)])
    assert (one, other, third) == (*["w (at 10.0.0.1, boot a)"] * 2, "w (at 10.0.0.2, boot b)")
    assert fourth == "v"
    containers = name_hosts([member(0, "w", "172.17.0.2", "a"), member(1, "w", "172.17.0.3", "a")])
    assert len(set(containers)) == 2, "of one machine, each with devices of its own"
    assert name_hosts([member(0, "w", "10.0.0.1", "a"), member(1, "w", "10.0.0.1", "a")]) == ("w", "w")


def test_a_process_comes_back_with_the_configuration_of_the_one_before_it() -> None:
    rules = Rendezvous(2)
    back = hello(1, num_ranks=2, token="b")
    assert rules.refuse_newcomer(back) == "rank 1 comes back to a run that has not begun"
    rules.admit(hello(0, num_ranks=2))
    rules.admit(hello(1, num_ranks=2))
    assert rules.refuse_newcomer(back) is None
    assert "seed is 0 on rank 0, 1 on rank 1" in str(rules.refuse_newcomer(hello(1, num_ranks=2, seed=1)))
    rules.take_back(back.member)
    assert rules.members is not None
    assert rules.members[1].token == "b1"
    rules.ended(1, KILLED)
    rules.ended(1, ProcessEnding(code=0, at_s=3.0, number=1))
    rules.ended(1, KILLED)
    assert rules.endings[1].number == 1
