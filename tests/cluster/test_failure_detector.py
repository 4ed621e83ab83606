"""Who is lost and where only a connection broke, as all ranks conclude it from what they tell each other."""

import random
from typing import Any

import pytest

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.cluster.failure_detector import Broken, FailureDetector, Left, Lost, Suspicion, lost_sight, watched
from rrfp_jax.cluster.wire import pack_plain, unpack_plain

HOSTS = ["a", "a", "b", "b"]
ANSWER_S = 0.3


def told(
    source: FailureDetector, target: FailureDetector, now_s: float, *, hears: Any = (), leaves: bool = False
) -> bool:
    return target.learn(unpack_plain(pack_plain(source.news(leaves=leaves))), now_s, hears=hears)


def test_who_does_not_answer_is_lost_and_named_once() -> None:
    detector = FailureDetector(0, HOSTS, ANSWER_S)
    assert detector.suspect(Suspicion(0, 2, "silent for 4.4 s"), 10.0)
    assert not detector.suspect(Suspicion(0, 2, "silent for 4.5 s"), 10.1)
    assert not detector.suspect(Suspicion(1, 2, "silent for 4.6 s"), 10.1)
    assert detector.conclusions(10.2) == []
    assert detector.next_due_s() == 10.3
    assert detector.conclusions(10.3) == [Lost(2, "silent for 4.4 s")]
    assert not detector.suspect(Suspicion(3, 2, "silent"), 11.0)
    assert not detector.answer(2, 11.0)
    assert detector.conclusions(99.0) == []
    assert detector.next_due_s() is None
    assert detector.present == {1, 3}


def test_who_is_gone_for_certain_is_lost_at_once_but_for_who_still_has_a_connection() -> None:
    source, target, watcher = (FailureDetector(rank, HOSTS, ANSWER_S) for rank in (0, 1, 3))
    assert source.suspect(Suspicion(0, 2, "closed its connection", True), 1.0, hears={2})
    assert source.conclusions(1.0) == [Lost(2, "closed its connection")]
    assert told(source, target, 5.0)
    assert target.conclusions(5.0) == [Lost(2, "closed its connection")]
    assert told(source, watcher, 5.0, hears={2})
    assert watcher.conclusions(5.2) == []
    assert watcher.conclusions(5.3) == [Lost(2, "closed its connection")]


def test_who_stood_still_does_not_answer_so_that_no_connection_is_blamed() -> None:
    reporter, suspect = (FailureDetector(rank, HOSTS, ANSWER_S) for rank in (0, 2))
    reporter.suspect(Suspicion(0, 2, "silent for 6 s"), 1.0)
    suspect.has_just_woken = True
    assert told(reporter, suspect, 1.1)
    assert suspect.news() == {"accusations": [[0, 2, "silent for 6 s", False]]}
    assert suspect.conclusions(9.0) == []
    told(suspect, reporter, 1.1)
    assert reporter.conclusions(1.3) == [Lost(2, "silent for 6 s")]


def test_who_is_accused_and_lives_answers_and_the_connection_is_named() -> None:
    reporter, suspect, other = (FailureDetector(rank, HOSTS, ANSWER_S) for rank in (0, 2, 3))
    reporter.suspect(Suspicion(0, 2, "silent"), 1.0)
    assert told(reporter, suspect, 1.01)
    assert told(reporter, other, 1.01)
    assert told(suspect, other, 1.02)
    assert told(suspect, reporter, 1.02)
    text = "rank 0 and rank 2 lost sight of each other: the network between a and b"
    for detector in (reporter, suspect, other):
        assert detector.conclusions(1.1) == []
        assert detector.conclusions(1.2) == [Broken(text)]
        assert detector.conclusions(99.0) == []
    assert other.present == {0, 1, 2}


def test_who_is_not_heard_goes_before_the_head_although_it_answers() -> None:
    reporter, suspect, other = (FailureDetector(rank, HOSTS, ANSWER_S) for rank in (0, 2, 3))
    for detector in (reporter, suspect, other):
        detector.has_head = True
    reporter.suspect(Suspicion(0, 2, "silent"), 1.0)
    for source, target in ((reporter, suspect), (reporter, other), (suspect, other), (suspect, reporter)):
        assert not told(source, target, 1.01)
    assert reporter.conclusions(1.3) == [Lost(2, "silent")]
    assert suspect.conclusions(99.0) == other.conclusions(99.0) == []
    assert told(reporter, suspect, 2.0, leaves=True)
    assert suspect.conclusions(99.0) == [Left(0)]


def test_one_way_broken_between_two_hosts() -> None:
    """What comes from b no longer reaches a. In a, b is lost; in b nobody is, and both sides are named."""
    ranks = [FailureDetector(rank, HOSTS, ANSWER_S) for rank in range(4)]
    for reporter, suspect in ((0, 2), (0, 3), (1, 2), (1, 3)):
        ranks[reporter].suspect(Suspicion(reporter, suspect, "silent for 4.4 s"), 1.0)
    for _ in range(3):
        for source in ranks:
            for target in ranks:
                if source is not target and not (ranks.index(source) >= 2 > ranks.index(target)):
                    told(source, target, 1.1, hears={0, 1, 2, 3})
    text = "ranks 0-1 and ranks 2-3 lost sight of each other: the network between a and b"
    assert [detector.conclusions(2.0) for detector in ranks] == [
        *[[Lost(2, "silent for 4.4 s"), Lost(3, "silent for 4.4 s")]] * 2,
        *[[Broken(text)]] * 2,
    ]
    told(ranks[0], ranks[3], 2.1, leaves=True)
    assert ranks[3].conclusions(2.1) == [Left(0)]  # and not: 2 and 3 are lost


def test_a_farewell_names_the_cause_first_and_takes_an_accusation_back() -> None:
    source, target = (FailureDetector(rank, HOSTS, ANSWER_S) for rank in (1, 0))
    source.suspect(Suspicion(1, 3, "closed its connection", True), 1.0)
    source.conclusions(1.0)
    target.suspect(Suspicion(0, 1, "closed its connection"), 1.1)
    assert told(source, target, 1.2, hears={3}, leaves=True)
    assert target.conclusions(1.2) == [Lost(3, "closed its connection"), Left(1)]
    assert target.conclusions(9.0) == []
    further = FailureDetector(2, HOSTS, ANSWER_S)
    assert told(target, further, 1.3)
    assert further.conclusions(1.3) == [Lost(3, "closed its connection"), Left(1)]


def test_who_leaves_taking_this_rank_for_lost_has_lost_sight_of_it() -> None:
    source, target = (FailureDetector(rank, HOSTS, ANSWER_S) for rank in (0, 2))
    source.suspect(Suspicion(0, 2, "silent"), 1.0)
    source.conclusions(2.0)
    assert told(source, target, 2.0, leaves=True)
    assert target.conclusions(2.0) == [
        Broken("rank 0 and rank 2 lost sight of each other: the network between a and b"),
        Left(0),
    ]


def test_a_loop_that_hangs_cannot_be_answered_for() -> None:
    hung = FailureDetector(2, HOSTS, ANSWER_S)
    assert hung.suspect(Suspicion(0, 2, "its event loop has not run for 9 s", True), 1.0)
    assert hung.news() == {"accusations": [[0, 2, "its event loop has not run for 9 s", True]]}
    assert hung.conclusions(9.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_news_reaches_all_whoever_vanishes_and_is_told_on_once(seed: int) -> None:
    chance, num_ranks = random.Random(seed), 40
    gone = set(chance.sample(range(num_ranks), 3))
    ranks = {rank: FailureDetector(rank, ["h"] * num_ranks, ANSWER_S) for rank in set(range(num_ranks)) - gone}
    tellers, num_told = [], dict.fromkeys(ranks, 0)
    for rank, detector in ranks.items():
        for other in watched(rank, num_ranks) & gone:
            tellers += [rank] * detector.suspect(Suspicion(rank, other, "closed", True), 0.0)
    while tellers:
        source = tellers.pop(chance.randrange(len(tellers)))
        num_told[source] += 1
        for other in sorted(watched(source, num_ranks) - gone):
            tellers += [other] * told(ranks[source], ranks[other], 0.0)
    for detector in ranks.values():
        assert {verdict.rank for verdict in detector.conclusions(0.0) if isinstance(verdict, Lost)} == gone
    assert max(num_told.values()) <= len(gone) + 1


@pytest.mark.parametrize(
    "news",
    [
        7,
        {"accusations": 7},
        {"accusations": [7]},
        {"accusations": [[0, 9, "?", True]]},
        {"accusations": [[0, "x", "?", True]]},
        {"alive": [-1]},
        {"alive": [None]},
        {"left": [[1]]},
        {"left": [[1, [[2]]]]},
        {"left": [[17, []]]},
        {"left": [[1, [2]]]},
        {"lost": [[2, "?"], [9, "?"]]},
    ],
)
def test_nonsense_is_refused_and_changes_nothing(news: Any) -> None:
    detector = FailureDetector(0, HOSTS, ANSWER_S)
    with pytest.raises(MalformedMessage):
        detector.learn(news, 0.0)
    assert (detector.news(), detector.conclusions(9.0)) == ({}, [])


def test_what_is_told_is_bounded() -> None:
    num_ranks = 5000
    detector = FailureDetector(0, ["h"] * num_ranks, ANSWER_S)
    for rank in range(1, num_ranks):
        detector.suspect(Suspicion(rank - 1, rank, "x" * 10_000), 0.0)
        detector.leave(rank, dict.fromkeys(range(50), "x" * 10000), 0.0)
    assert len(pack_plain(detector.news(leaves=True))) < 1 << 20


def test_sentences_name_both_sides_by_host() -> None:
    assert lost_sight({(0, 2), (1, 3), (1, 2)}, HOSTS) == (
        "ranks 0-1 and ranks 2-3 lost sight of each other: the network between a and b"
    )
    assert lost_sight({(0, 1)}, HOSTS) == "rank 0 and rank 1 lost sight of each other: a connection within a"
    assert lost_sight({(0, 3), (2, 3)}, HOSTS) == (
        "rank 0 and rank 3 lost sight of each other: the network between a and b; "
        "rank 2 and rank 3 lost sight of each other: a connection within b"
    )


def test_what_concerned_the_process_before_is_not_heard_of_the_new_one() -> None:
    one, other, back = (FailureDetector(rank, HOSTS, ANSWER_S) for rank in (0, 1, 2))
    back.take_up(2, 1)
    for detector in (one, other):
        detector.suspect(Suspicion(detector._rank, 2, "closed its connection", True), 1.0)
        assert detector.conclusions(1.0) == [Lost(2, "closed its connection")]
    one.take_up(2, 1)
    assert one.present == {1, 2, 3}
    assert not told(other, one, 1.1)
    assert not told(other, back, 1.1), "it would answer"
    one.suspect(Suspicion(0, 2, "silent"), 2.0)
    assert not told(one, other, 2.0), "which knows only the process before"
    other.take_up(2, 1)
    assert told(one, other, 2.1)
    assert told(one, back, 2.1), "it answers"
    assert told(back, other, 2.2)
    assert isinstance(other.conclusions(9.0)[0], Broken)
