"""Control messages between ranks: notes, step statistics, failures, all-gathers, clocks, and requests to stop."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rrfp_jax.core import GroupHeard, Message, MessageKind, Note, TaskAnnounced, TaskChosen
from rrfp_jax.layout import CONTROL_DEGREE, Layout
from rrfp_jax.runtime.control_plane import Peers, StopRequests
from rrfp_jax.runtime.failure import FailureNews
from rrfp_jax.runtime.tree_collectives import PeerFailed, StepStatistics
from rrfp_jax.schedules import Task
from rrfp_jax.schedules.timeline import StepSums
from rrfp_jax.testing.virtual_network import VirtualNetwork
from tests.cluster.mesh import PATIENCE_S, eventually, networks, traffic

LAYOUT = Layout(num_stages=1, tensor=3, num_ranks=3)
CHOSEN = TaskChosen(2, Task.parse("0B1"), 1)
CLOCKS_LATER_S = (100.0, 142.5, 57.25)
"""What each rank's clock shows more than this machine's."""


def clock(later_s: float) -> Callable[[], float]:
    return lambda: time.perf_counter() + later_s


class Recorder:
    """A driver that keeps all that it hears."""

    def __init__(self) -> None:
        self.notes: list[tuple[int, int, int, Note]] = []
        self.ended: list[tuple[int, StepStatistics]] = []
        self.failures: list[FailureNews] = []
        self.announced: list[tuple[int, int, Message]] = []
        self.steps, self.failure = self, SimpleNamespace(heard=self.failures.append)

    def observe(self, unit: int, event: Any, step: int, *details: Any) -> None:
        if event is GroupHeard:
            self.notes.append((unit, step, *details))
        else:
            assert event is TaskAnnounced
            self.announced.append((unit, step, *details))

    def ended_everywhere(self, step: int, statistics: StepStatistics) -> None:
        self.ended.append((step, statistics))


def news(summary: str) -> FailureNews:
    return FailureNews(kind="TaskFailed", origin=2, summary=summary, states={}, lost={})


def claim(origin: int, rank: int) -> FailureNews:
    return FailureNews(kind="PeerLost", origin=origin, summary="", states={}, lost={rank: "silent for 4 s"})


@pytest.fixture
def peers() -> Iterator[list[Peers]]:
    """Three ranks in this process, connected, on one loop; nobody listens yet."""
    with networks(3) as made:
        yield [
            Peers(network, LAYOUT, clock=clock(later_s)) for network, later_s in zip(made, CLOCKS_LATER_S, strict=True)
        ]


def on_loop(peers: Peers, call: Any) -> None:
    done = threading.Event()
    peers.network.call_soon(lambda: (call(), done.set()))
    assert done.wait(PATIENCE_S)


def test_notes_reach_the_listener_also_when_it_comes_later(peers: list[Peers]) -> None:
    on_loop(peers[1], lambda: peers[1].tell(0, 2, 7, CHOSEN))
    time.sleep(0.1)
    third = Recorder()
    on_loop(peers[2], lambda: peers[2].attach(third))
    assert eventually(lambda: bool(third.notes))
    assert third.notes == [(0, 7, 1, CHOSEN)]
    on_loop(peers[2], peers[2].detach)
    on_loop(peers[0], lambda: peers[0].tell(0, 2, 8, CHOSEN))
    time.sleep(0.1)
    on_loop(peers[2], lambda: peers[2].attach(third))
    assert eventually(lambda: len(third.notes) == 2)


def test_a_decision_for_a_step_comes_before_the_notes_by_which_its_tasks_are_chosen(peers: list[Peers]) -> None:
    leader, follower = (StopRequests(each.network, LAYOUT) for each in peers[:2])
    leader.stop = True
    listener = Recorder()
    decided: list[tuple[bool, bool]] = []
    listener.observe = lambda unit, _, step, *__: decided.append(follower.decide(unit, step))  # type: ignore[method-assign]
    on_loop(peers[1], lambda: peers[1].attach(listener))

    def end_a_step() -> None:
        with ThreadPoolExecutor() as other:
            other.submit(leader.decide, 0, 7).result()
        peers[0].tell(0, 1, 8, CHOSEN)

    on_loop(peers[0], end_a_step)
    assert eventually(lambda: bool(decided))
    assert decided == [(True, False)] == [leader.decide(0, 8)]


def test_announcements_reach_the_leader_of_a_unit(peers: list[Peers]) -> None:
    leader, follower = Recorder(), Recorder()
    on_loop(peers[0], lambda: peers[0].attach(leader))
    on_loop(peers[1], lambda: peers[1].attach(follower))
    messages = [Message(MessageKind.GRADIENT, 1, 0, 7), Message(MessageKind.SHARED, 3, 0)]
    for message in messages:
        on_loop(peers[2], lambda message=message: peers[2].announce_task(0, 5, message))
    assert eventually(lambda: len(leader.announced) == 2)
    assert leader.announced == [(0, 5, message) for message in messages]
    assert not follower.announced


@pytest.mark.parametrize("garbage", [b"", b"\0" * 24, b"\7" + b"\0" * 24, b"\0" * 12 + b"\x63" + b"\0" * 12])
def test_an_announcement_that_cannot_be_is_dropped(peers: list[Peers], garbage: bytes) -> None:
    leader = Recorder()
    on_loop(peers[0], lambda: peers[0].attach(leader))
    on_loop(peers[2], lambda: peers[2].network.send_arrays(0, b"task@0", garbage, may_drop=True))
    assert eventually(lambda: traffic(peers[0].network).num_dropped == 1)
    assert not leader.announced


def test_rank_0_is_told_once_all_have_ended_a_step(peers: list[Peers]) -> None:
    listener = Recorder()
    sums = [StepSums(num_stages=3, start_s=rank, end_s=rank + 2.0, cost_s=2.0, work_s=1.0 + rank) for rank in range(3)]
    for each in peers:
        on_loop(each, lambda each=each: each.attach(listener if not each.rank else Recorder()))
    for each in reversed(peers):
        assert not listener.ended
        on_loop(
            each, lambda each=each: each.statistics.add(7, sums[each.rank], {each.rank: (100 + each.rank, each.rank)})
        )
    assert eventually(lambda: bool(listener.ended))
    (step, summary), *more = listener.ended
    assert (step, more) == (7, [])
    assert (summary.sums.makespan_s(), summary.sums.work_s) == (4.0, 6.0)
    assert summary.peak_memory_bytes() == {0: 100, 1: 101, 2: 102}
    assert summary.peak_host_bytes() == {0: 0, 1: 1, 2: 2}


def test_everybody_gets_what_everybody_brought(peers: list[Peers]) -> None:
    with ThreadPoolExecutor(3) as pool:
        for name in ("first", "second"):
            brought = list(pool.map(lambda p: p.gather(name, [p.rank, name], deadline_s=PATIENCE_S), peers))  # noqa: B023
            assert brought == [{r: [r, name] for r in range(3)}] * 3


def test_a_gathering_that_somebody_misses_ends_with_the_deadline(peers: list[Peers]) -> None:
    with ThreadPoolExecutor(2) as pool:
        gatherings = [pool.submit(p.gather, "alone", deadline_s=0.3) for p in peers[:2]]
        with pytest.raises(PeerFailed, match=r"alone: rank 2 did not come within 0.3 s"):
            gatherings[0].result()
        with pytest.raises(PeerFailed, match=r"within 0.3 s"):
            gatherings[1].result()


def test_without_a_deadline_the_slow_are_waited_for_and_the_lost_are_not(peers: list[Peers]) -> None:
    with ThreadPoolExecutor(3) as pool:
        gatherings = [pool.submit(p.gather, "slow") for p in peers[:2]]
        time.sleep(0.7)
        assert not any(gathering.done() for gathering in gatherings)
        assert peers[2].gather("slow", 2) == {0: None, 1: None, 2: 2}
        assert [gathering.result(PATIENCE_S)[2] for gathering in gatherings] == [2, 2]
        gatherings = [pool.submit(p.gather, "lost") for p in peers[:2]]
        for each in peers[:2]:
            on_loop(each, lambda each=each: each.lose("rank 2 was lost: killed"))
        for gathering in gatherings:
            with pytest.raises(PeerFailed, match="rank 2 was lost: killed"):
                gathering.result(PATIENCE_S)


def test_a_gathering_under_way_ends_when_a_rank_gives_up(peers: list[Peers]) -> None:
    listener = Recorder()
    on_loop(peers[0], lambda: peers[0].attach(listener))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peers[0].gather, "never", deadline_s=60)
        time.sleep(0.05)
        on_loop(peers[2], lambda: peers[2].announce(news("out of memory")))
        with pytest.raises(PeerFailed, match="rank 2 gave up: out of memory"):
            waiting.result(PATIENCE_S)
    assert listener.failures == [news("out of memory")]


def test_clocks_are_compared_with_rank_0s(peers: list[Peers]) -> None:
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            list(pool.map(lambda p: p.clocks.synchronise(deadline_s=PATIENCE_S), peers))
            for each, later_s in zip(peers, CLOCKS_LATER_S, strict=True):
                assert abs(each.clocks.offset_s - (CLOCKS_LATER_S[0] - later_s)) < 0.02, each.rank
    assert peers[0].clocks.offset_s == 0.0


def test_a_clock_that_goes_wrong_is_measured_again_after_a_minute(peers: list[Peers]) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda p: p.clocks.synchronise(deadline_s=PATIENCE_S), peers))
    clocks, measured_s = peers[1].clocks, peers[1].clocks.offset_s
    right = clocks._clock
    for later_s, expected_s in ((50.0, measured_s), (100.0, measured_s - 100.0)):
        clocks._clock = lambda later_s=later_s: right() + later_s
        on_loop(peers[1], clocks.refresh)
        assert eventually(lambda expected_s=expected_s: abs(clocks.offset_s - expected_s) < 0.02)


def test_every_rank_knows_how_long_a_message_takes(peers: list[Peers]) -> None:
    assert [each.clocks.round_trip_s for each in peers] == [None] * 3
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda p: p.clocks.synchronise(deadline_s=PATIENCE_S), peers))
    assert all(0 < (each.clocks.round_trip_s or 0) < 0.1 for each in peers)


def test_a_report_larger_than_any_header_reaches_the_others(peers: list[Peers]) -> None:
    listener = Recorder()
    on_loop(peers[0], lambda: peers[0].attach(listener))
    on_loop(peers[2], lambda: peers[2].announce(news("x" * 5_000_000)))
    assert eventually(lambda: bool(listener.failures))
    assert len(listener.failures[0].summary) == 5_000_000


def test_what_cannot_travel_does_not_keep_a_rank_from_giving_up(peers: list[Peers]) -> None:
    on_loop(peers[2], lambda: peers[2].announce(replace(news("a report"), lost=object())))
    with pytest.raises(PeerFailed, match="gave up: a report"):
        peers[2].gather("later")


def test_a_gathering_larger_than_any_header_comes_to_all(peers: list[Peers]) -> None:
    with ThreadPoolExecutor(3) as pool:
        brought = list(pool.map(lambda p: p.gather("large", str(p.rank) * 2_000_000), peers))
    assert all(
        {rank: len(data) for rank, data in each.items()} == dict.fromkeys(range(3), 2_000_000) for each in brought
    )


def test_what_only_rank_0_needs_comes_to_it_alone(peers: list[Peers]) -> None:
    with ThreadPoolExecutor(3) as pool:
        brought = list(pool.map(lambda p: p.gather("sizes", 7 * p.rank, to_all=False), peers))
    assert brought == [{0: 0, 1: 7, 2: 14}, {0: 0}, {0: 0}]


def test_a_gathering_waits_as_long_as_all_live(peers: list[Peers]) -> None:
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(p.gather, "unequal") for p in peers[:2]]
        time.sleep(1.0)
        assert peers[2].gather("unequal") == {0: None, 1: None, 2: None}
        assert [each.result(PATIENCE_S) for each in early] == [{0: None, 1: None, 2: None}] * 2


def test_a_signal_is_noticed_while_others_are_waited_for(peers: list[Peers]) -> None:
    other = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    handler_before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start_s = time.monotonic()
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            peers[0].gather("never", deadline_s=6)
    finally:
        signal.signal(signal.SIGINT, handler_before)
    assert time.monotonic() - start_s < 5


def test_a_note_that_is_none_is_dropped(peers: list[Peers]) -> None:
    listener = Recorder()
    on_loop(peers[0], lambda: peers[0].attach(listener))
    header = {"unit": 0, "step": 1, "member": 1, "note": ["Nonsense", 1]}
    peers[1].network.on_loop(peers[1].network.send, 0, "note", header)
    peers[1].network.on_loop(peers[1].network.send, 0, "outcome@0", {"step": "zero"}, [b""])
    assert eventually(lambda: traffic(peers[0].network).num_dropped == 2)
    assert not listener.notes
    assert not listener.ended


def test_who_lives_and_is_called_lost_says_that_the_network_broke(
    peers: list[Peers], caplog: pytest.LogCaptureFixture
) -> None:
    on_loop(peers[0], lambda: peers[0].announce(claim(7, 2)))  # no rank of this run: dropped
    on_loop(peers[0], lambda: peers[0].announce(claim(0, 2)))
    for rank in range(3):
        said = f"rank {rank}: rank 0 and rank 2 lost sight of each other: a connection within 127.0.0.1"
        assert eventually(lambda said=said: said in caplog.text)
    assert "which does not exist" in caplog.text


def test_a_rank_that_stands_still_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of its stages, or all where the run goes on without a rank that is lost."""
    network, now_s, told, looks = VirtualNetwork(4).ranks[0], [0.0], [], []
    network.patience_s, network.activities = 4.0, lambda: {1: "stage 0 waits for others", 3: "something"}
    network.tell_activity = lambda activity, standstill: told.append((activity, standstill))
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    peers = Peers(network, Layout(num_stages=2, tensor=2, num_ranks=4))
    driver = SimpleNamespace(steps=SimpleNamespace(ended_everywhere=None, num_ended=0), waits=lambda: {})
    peers.attach(driver)
    peers.watch_waits(SimpleNamespace(call_later=lambda _, look, *arguments: looks.append((look, arguments))))

    def look(seconds: float) -> Any:
        now_s[0] += seconds
        again, arguments = looks.pop()
        again(*arguments)
        return told[-1]

    driver.steps.num_ended, driver.waits = 1, lambda: {(0, True): (1.0, "stage 0 runs 0F3 of step 7")}
    assert look(2) == look(2) == ("stage 0 runs 0F3 of step 7", None)
    text = "stage 0 runs 0F3 of step 7 for 5.0 s, 0.0 s at most before"
    assert look(2)[1] == (text, {1})
    assert caplog.messages == [f"rank 0: {text}; last heard of the others: rank 1: stage 0 waits for others"]
    peers.others_go_on = True
    assert list(look(1)[1][1]) == [0, 1, 2, 3]
    assert len(caplog.messages) == 1  # once for each wait
    driver.waits = lambda: {}
    assert look(1) == ("", None)
    with peers.waiting("batch 3"):
        assert look(1) == ("rank 0 waits for all others (batch 3)", None)
        assert look(5)[1][0] == "rank 0 waits for all others (batch 3) for 6.0 s, 0.0 s at most before"
    assert look(1) == ("", None)


def requests_of(layout: Layout) -> tuple[list[StopRequests], VirtualNetwork]:
    network = VirtualNetwork(layout.num_ranks)
    return [StopRequests(rank, layout) for rank in network.ranks], network


@pytest.mark.parametrize("asking", [0, 7, 199])
def test_every_process_knows_of_a_request_to_stop_and_nobody_is_told_twice_by_another(asking: int) -> None:
    ranks, network = requests_of(Layout(num_stages=200, num_ranks=200))
    ranks[asking].ask_to_stop()
    ranks[asking].ask_to_stop()
    network.run()
    assert all(each.stop for each in ranks)
    assert max(rank.counts.num_sent for rank in network.ranks) <= CONTROL_DEGREE + 1


def test_alone_a_request_is_in_the_next_verdict() -> None:
    alone = StopRequests(None, Layout(num_stages=2))
    assert alone.decide(0, 3) == (False, False)
    alone.ask_to_stop()
    alone.is_time_to_save = lambda: True
    assert alone.decide(0, 4) == (True, True)
    assert alone.decide(0, 5) == (True, False)  # it has been said


def test_processes_of_one_stage_find_the_same_whatever_each_knows() -> None:
    ranks, network = requests_of(Layout(num_stages=1, tensor=3, num_ranks=3))
    ranks[1].stop = True  # a request on its way to the others
    ranks[2].is_time_to_save = lambda: True  # one clock decides, and this is another
    for step in range(3):
        assert {each.decide(0, step) for each in ranks} == {(False, False)}
        network.run()
    ranks[0].stop = True
    ranks[0].is_time_to_save = lambda: True
    seen = []
    for step in range(3, 6):
        (decision,) = {each.decide(0, step) for each in ranks}
        seen.append(decision)
        network.run()
    assert seen == [(False, False), (True, True), (True, False)]
