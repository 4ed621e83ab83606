"""One report from what all ranks say."""

import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rrfp_jax.cluster import LoopThread
from rrfp_jax.cluster.wire import pack_plain, unpack_plain
from rrfp_jax.layout import Layout
from rrfp_jax.records import from_plain, to_plain
from rrfp_jax.runtime.failure import (
    Failure,
    FailureNews,
    FailureReport,
    NoProgress,
    PeerLost,
    StageState,
    TaskFailed,
    TransportFailed,
    failure_elsewhere,
    lost_rank,
)

LAYOUT = Layout(num_stages=4, num_ranks=4)


def state(stage: int, *, running: str | None = None, waits: tuple[int, ...] = ()) -> StageState:
    return StageState(
        stage=stage,
        step=3,
        running=running,
        failed=False,
        since_s=1.0,
        idle_reason=None if running else "input",
        held=(),
        waits=tuple(f"F waits for stage {other}" for other in waits),
        waits_for_stages=waits,
        rank=stage,
    )


@pytest.mark.parametrize(
    ("running", "launching", "said"),
    [
        (("2F5, 2F6", "2F5"), (), "stage 2 has launched 2F5 on ranks 0-1; all these live: look at the links between"),
        (("2F5", None), (), "stage 2 has launched 2F5 on rank 0, nothing on rank 1; all these live: look for what"),
        (("2F5", "2F5"), (1,), "stage 2 has launched 2F5 on rank 0, still launching 2F5 on rank 1; all these live"),
        ((None, None), (), None),
    ],
)
def test_a_report_tells_which_ranks_of_a_stage_have_launched_the_task_that_hangs(
    running: tuple[str | None, ...], launching: tuple[int, ...], said: str | None
) -> None:
    states = [
        replace(state(2, running=task), rank=rank, is_launching=rank in launching) for rank, task in enumerate(running)
    ]
    for more, lost in (([], {}), ([state(1, waits=(2,))], {}), ([], {3: "gone"})):
        failure = Failure(NoProgress, "no task finished", [*states, *more], lost=lost)
        lines = [line for line in str(failure.error(LAYOUT)).splitlines() if "has launched" in line]
        assert len(lines) == (said is not None and not lost)
        assert all(line.startswith(said) for line in lines if said)


def over_the_wire(failure: Failure, rank: int) -> FailureNews:
    told = failure.news({rank: failure.states}, failure.lost, rank)
    return from_plain(FailureNews, unpack_plain(pack_plain(to_plain(told))))


class DeafPeers:
    """Nobody can be told anything."""

    layout, rank = LAYOUT, 0

    def announce(self, failure: object) -> None:
        raise OSError("the network is broken")


def test_nothing_keeps_a_run_from_ending() -> None:
    loop, ended = LoopThread(), []
    report = FailureReport(loop.loop, DeafPeers(), 10.0, list, ended.append)  # type: ignore[arg-type]
    loop.loop.call_soon_threadsafe(report.begin, Failure(TaskFailed, "x" * 5_000_000, [state(0)]))
    assert isinstance(error := report.wait(), TaskFailed)
    assert len(str(error)) < 10_000
    loop.close()
    assert ended == [error]


def test_the_error_is_waited_for_however_long_the_loop_is_busy() -> None:
    loop = LoopThread()
    report = FailureReport(loop.loop, None, 10.0, list, lambda _: None)
    loop.loop.call_soon_threadsafe(time.sleep, 2.5)
    loop.loop.call_soon_threadsafe(report.begin, Failure(TaskFailed, "it failed", [state(0)]))
    assert isinstance(report.wait(), TaskFailed)
    loop.close()


def test_a_signal_is_noticed_while_the_report_is_waited_for() -> None:
    loop = LoopThread()
    report = FailureReport(loop.loop, None, 10.0, list, lambda _: None)
    late = Failure(TaskFailed, "it failed", [state(0)])
    loop.loop.call_soon_threadsafe(loop.loop.call_later, 6.0, report.begin, late)
    other = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    handler_before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start_s = time.monotonic()
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            report.wait()
    finally:
        signal.signal(signal.SIGINT, handler_before)
    assert time.monotonic() - start_s < 5
    loop.close()


def test_a_lost_rank_is_named_and_found_to_be_what_all_wait_for() -> None:
    mine = lost_rank(LAYOUT, 1, "connection closed", [state(2, waits=(1,))])
    theirs = over_the_wire(lost_rank(LAYOUT, 1, "silent for 5 s", [state(3, waits=(2,))]), 3)
    assert not mine.is_complete(LAYOUT, 2)
    assert mine.hear(theirs, 2) == replace(theirs, summary=mine.summary, origin=2, lost={})
    assert mine.hear(theirs, 2) is None
    mine.hear(over_the_wire(lost_rank(LAYOUT, 1, "connection closed", [state(0, waits=(1,))]), 0), 2)
    assert mine.is_complete(LAYOUT, 2)
    error = mine.error(LAYOUT)
    assert isinstance(error, PeerLost)
    assert "rank 1 (stage 1) was lost" in str(error)
    assert [s.stage for s in error.report.stages] == [0, 2, 3]
    assert error.report.culprits() == (1,)
    assert (error.report.lost_ranks, error.report.lost_stages) == ((1,), (1,))


def test_a_report_tells_of_so_many_stages_only() -> None:
    layout = Layout(num_stages=1000, num_ranks=1000)
    mine = lost_rank(layout, 1, "connection closed", [state(0)])
    told = [mine.hear(over_the_wire(lost_rank(layout, 1, "", [state(r)]), r), 0) for r in range(2, 1000)]
    assert sum(news is not None for news in told) == 64
    assert len(mine.error(layout).report.stages) == 65


def test_a_second_loss_is_added_to_the_summary() -> None:
    failure = lost_rank(LAYOUT, 1, "connection closed", [state(0)])
    failure.lost.setdefault(2, "connection closed")
    text = str(failure.error(LAYOUT))
    assert text.count("rank 1 (stage 1) was lost") == 1
    assert "rank 2 (stage 2) was lost" in text


def test_a_task_that_failed_elsewhere_is_a_lost_peer_here_and_no_progress_is_everybodys() -> None:
    failed = Failure(TaskFailed, "step 3: 1F2 on stage 1 failed", [state(1, running="1F2")])
    news = over_the_wire(failed, 1)
    failure = failure_elsewhere(news, [state(0)])
    failure.hear(news, 0)
    heard = failure.error(LAYOUT)
    assert isinstance(heard, PeerLost)
    assert "rank 1 gave up: step 3: 1F2 on stage 1 failed" in str(heard)
    assert {s.stage for s in heard.report.stages} == {0, 1}
    stalled = Failure(NoProgress, "no task finished for 60 s", [state(1)])
    assert isinstance(failure_elsewhere(over_the_wire(stalled, 1), []).error(LAYOUT), NoProgress)


def test_alone_there_is_nobody_to_hear() -> None:
    error = Failure(TaskFailed, "it failed", [state(0)], ValueError("cause")).error(None)
    assert isinstance(error, TaskFailed)
    assert isinstance(error.__cause__, ValueError)
    assert str(error).startswith("it failed")


def test_a_transport_that_failed_since_a_rank_was_lost_or_the_network_broke_is_told_as_that() -> None:
    for happens in ("lost", "broken"):
        peers: Any = SimpleNamespace(rank=0, layout=LAYOUT, others_go_on=False, announce=lambda _: None)
        loop: Any = SimpleNamespace(call_later=lambda *_: None)
        report = FailureReport(loop, peers, 8.0, list, lambda error: None)
        cause = TransportFailed("rank 0 could not fetch the activation from rank 1")
        report.begin(Failure(TaskFailed, f"a transport failed: {cause}", [state(0)], cause))
        report.lost(1, "connection closed") if happens == "lost" else report.broken("ranks 0 and 1 lost sight")
        report._end()
        assert isinstance(report.error, PeerLost), happens


def test_where_the_network_broke_nobody_is_named_who_is_well() -> None:
    """Ranks 0 and 1 no longer hear 2 and 3, take them for lost and say so; this is rank 3's report."""
    text = "ranks 0-1 and ranks 2-3 lost sight of each other: the network between HOST0 and HOST1"
    claims = {2: "silent for 4.4 s", 3: "silent for 4.4 s"}
    news = FailureNews(kind="PeerLost", origin=0, summary="rank 2 (stage 2) was lost: silent", states={}, lost=claims)
    for comes_first in ("news", "broken"):
        told: list[FailureNews] = []
        peers: Any = SimpleNamespace(
            rank=3, layout=Layout(num_stages=4, num_ranks=4), others_go_on=False, announce=told.append
        )
        loop: Any = SimpleNamespace(call_later=lambda *_: None)
        report = FailureReport(loop, peers, 8.0, list, lambda error: None)
        for what in ("news", "broken") if comes_first == "news" else ("broken", "news"):
            report.heard(news) if what == "news" else report.broken(text)
        report._end()
        assert isinstance(report.error, PeerLost), comes_first
        assert report.error.report.summary == text
        assert report.error.report.lost_ranks == ()


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_rank_never_quotes_that_it_was_lost_itself(is_judged: bool) -> None:
    """What ranks 2 and 3 say no longer reaches 0 and 1, whose news still come; this is rank 2's report."""
    text = "ranks 0-1 and ranks 2-3 lost sight of each other: the network between HOST0 and HOST1"
    peers: Any = SimpleNamespace(rank=2, layout=LAYOUT, others_go_on=False, announce=lambda news: None)
    loop: Any = SimpleNamespace(call_later=lambda *_: None)
    report = FailureReport(loop, peers, 8.0, list, lambda error: None)
    for rank in (0, 1, 3):
        states = {each: [state(each)] for each in (0, 1, 3)}
        lost = lost_rank(LAYOUT, 2, "silent for 4.0 s", [])
        report.heard(lost.news(states, lost.lost, rank))
    for rank in (0, 1):
        report.lost(rank, "silent for 3.6 s")
    assert report.error is None, "the network may yet say what broke"
    if is_judged:
        report.broken(text)
    else:
        report._end()
    assert isinstance(report.error, PeerLost)
    assert report.error.report.summary == (text if is_judged else "rank 0 and rank 2 lost sight of each other")
    assert report.error.report.lost_ranks == ()


def test_what_another_says_of_losses_is_quoted_and_gives_way_to_what_was_seen_here() -> None:
    """Rank 0 no longer hears rank 2, which this rank 3 does; rank 3 no longer hears rank 0."""
    news = over_the_wire(lost_rank(LAYOUT, 2, "silent for 4.4 s", [state(0)]), 0)
    mine = failure_elsewhere(news, [state(3)])
    mine.hear(news, 3)
    quoted = mine.error(LAYOUT).report
    assert quoted.summary == "rank 0 gave up: rank 2 (stage 2) was lost: silent for 4.4 s"
    assert quoted.lost_ranks == ()
    mine.heard |= {1: [], 2: []}
    assert not mine.is_complete(LAYOUT, 3)
    mine.heard.clear()
    mine.lost[0] = "silent for 3.9 s"
    seen = mine.error(LAYOUT).report
    assert (seen.summary, seen.lost_ranks) == ("rank 0 (stage 0) was lost: silent for 3.9 s", (0,))


def test_a_stage_of_a_replica_is_named_as_one() -> None:
    layout = Layout(num_stages=2, data=2, num_ranks=4)
    waiting = replace(state(0, waits=(3,)), rank=0, stages_of_replica=layout.stages_of_replica)
    failed = replace(state(3, running="3R"), failed=True, stages_of_replica=layout.stages_of_replica)
    text = str(lost_rank(layout, 1, "silent for 4.4 s", [waiting, failed]).error(layout))
    assert "rank 1 (stage 0, replica 1) was lost: silent for 4.4 s" in text
    assert "rank 0: stage 0, replica 0 has been idle" in text
    assert "rank 3: stage 1, replica 1 failed in 3R" in text
    assert text.endswith("for stage 1, replica 1")
    both = str(lost_rank(Layout(num_stages=2, data=2, num_ranks=2), 1, "gone", []).error(Layout(num_stages=2, data=2)))
    assert "rank 1 (stage 1, replica 0 and stage 1, replica 1) was lost" in both


def test_the_lines_of_code_are_told_by_the_rank_that_failed_alone() -> None:
    frames = '\n  File "mine.py", line 3, in apply\n    raise ValueError'
    failure = Failure(TaskFailed, f"step 1: 1F0 on stage 1 failed: ValueError: odd{frames}", [state(1)])
    assert frames in str(failure.error(LAYOUT))
    elsewhere = failure_elsewhere(over_the_wire(failure, 1), [state(0)]).error(LAYOUT)
    assert "rank 1 gave up: step 1: 1F0 on stage 1 failed: ValueError: odd (rank 1 tells where" in str(elsewhere)
    assert "mine.py" not in str(elsewhere)
    assert frames in elsewhere.report.summary, "for failure.json"
