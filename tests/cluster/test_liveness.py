"""Who is lost, who is silent and who has left: with processes that are killed, stopped, woken, busy or just done."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rrfp_jax.cluster import ClusterConfig, PeerAddress, RunKey
from tests.cluster.mesh import Node, Process, processes, running_loop

DEADLINE_S = 1.2
NOTICED_S = 2.0


@contextmanager
def unused_place() -> Iterator[str]:
    """An address where nobody listens, nor will."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{unused.getsockname()[1]}"


def test_a_killed_rank_is_noticed_at_once_by_all_others() -> None:
    with processes(3, silence_deadline_s=30.0) as members:
        killed_s = members[0].signal(signal.SIGKILL)
        for member in members[1:]:
            assert member.wait_for("lost", NOTICED_S) == ("lost", 0, "closed its connection")
        assert time.monotonic() - killed_s < NOTICED_S
        members[1].tell("send", 2, {}, 1, 10)
        assert members[2].wait_for("note")[1] == 1
        assert not [event for member in members[1:] for event in member.drain()]


def test_a_rank_that_exits_without_farewell_counts_as_lost() -> None:
    with processes(2, silence_deadline_s=30.0) as members:
        members[1].signal(signal.SIGTERM)
        assert members[0].wait_for("lost", NOTICED_S)[1] == 1


def test_a_stopped_rank_is_named_by_the_deadline() -> None:
    with processes(3, silence_deadline_s=DEADLINE_S) as members:
        stopped_s = members[1].signal(signal.SIGSTOP)
        for member in (members[0], members[2]):
            _, rank, reason = member.wait_for("lost", 2 * DEADLINE_S + 1)
            assert rank == 1
            assert reason.startswith("silent for 1.")
        assert DEADLINE_S * 0.7 < time.monotonic() - stopped_s < 2 * DEADLINE_S + 1


@pytest.mark.slow
def test_a_rank_that_stands_still_names_a_stopped_one_long_before_the_deadline() -> None:
    with processes(3, silence_deadline_s=60.0) as members:
        members[1].tell("wait", "stage 1 waits", [])
        members[0].tell("wait", "stage 0 runs 0F3 of step 5", [1, 2])
        stopped_s = members[1].signal(signal.SIGSTOP)
        for member in (members[0], members[2]):
            _, rank, reason = member.wait_for("lost", 30)
            assert rank == 1
            assert re.fullmatch(
                r"silent for [\d.]+ s and takes no connection: see on 127.0.0.1 whether its process is stopped "
                r"\(ps shows T\) or the host cut off; last heard: .*; here: stage 0 runs 0F3 of step 5",
                reason,
            )
        print(f"named after {time.monotonic() - stopped_s:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("why", ["busy", "spared"])
def test_a_silent_rank_that_takes_connections_or_holds_nobody_up_is_not_named(why: str) -> None:
    with processes(2, silence_deadline_s=60.0) as members:
        members[0].tell("wait", "stage 0 runs 0F3 of step 5", [1] if why == "busy" else [])
        members[1].tell("send", 0, {}, 1, 10)
        members[0].wait_for("note")
        if why == "busy":
            members[1].tell("hold", 9)
        else:
            members[1].signal(signal.SIGSTOP)
        time.sleep(9)
        members[1].signal(signal.SIGCONT)
        time.sleep(0.5)
        assert [member.drain() for member in members] == [[], []]


def test_a_short_stop_is_forgiven_and_nothing_is_lost() -> None:
    with processes(2, silence_deadline_s=4 * DEADLINE_S) as members:
        members[1].signal(signal.SIGSTOP)
        members[0].tell("send", 1, {"number": 1}, 1, 100_000)
        time.sleep(1.5 * DEADLINE_S)
        members[1].signal(signal.SIGCONT)
        assert members[1].wait_for("note")[2] == {"number": 1}
        time.sleep(0.5)
        assert [member.drain() for member in members] == [[], []]


def test_all_ranks_stopped_together_wake_up_without_blame() -> None:
    with processes(2, silence_deadline_s=DEADLINE_S) as members:
        for member in members:
            member.signal(signal.SIGSTOP)
        time.sleep(2 * DEADLINE_S)
        for member in members:
            member.signal(signal.SIGCONT)
        time.sleep(DEADLINE_S)
        assert [member.drain() for member in members] == [[], []]


def test_a_busy_loop_is_healthy_until_the_deadline_and_a_hanging_one_is_named() -> None:
    with processes(2, silence_deadline_s=DEADLINE_S) as members:
        for _ in range(2):
            members[1].tell("block", 0.75 * DEADLINE_S)
            time.sleep(DEADLINE_S)
        assert members[0].drain() == []
        members[1].tell("block", 3 * DEADLINE_S)
        _, rank, reason = members[0].wait_for("lost", 3 * DEADLINE_S)
        assert rank == 1
        assert reason.startswith("its event loop has not run for 1.")


def test_much_traffic_is_no_silence() -> None:
    with processes(2, silence_deadline_s=DEADLINE_S) as members:
        for number in range(40):
            members[0].tell("send", 1, {"number": number}, 1, 4 << 20)
        for _ in range(40):
            members[1].wait_for("note")
        assert [member.drain() for member in members] == [[], []]


def test_a_rank_that_closes_has_left_and_what_it_sent_arrives() -> None:
    with processes(3) as members:
        for number in range(20):
            members[2].tell("send", 0, {"number": number}, 1, 1 << 18)
        members[2].tell("close")
        assert [members[0].wait_for("note")[2]["number"] for _ in range(20)] == list(range(20))
        for member in members[:2]:
            assert member.wait_for("left") == ("left", 2)
        members[2].wait_for("closed")
        members[2].process.join(5)
        time.sleep(0.7)  # longer than the farewell could have been late
        assert [member.drain() for member in members[:2]] == [[], []]


def test_a_farewell_names_whom_its_sender_has_lost_so_that_the_cause_comes_first() -> None:
    with processes(3, deadlines_s={0: DEADLINE_S}, silence_deadline_s=4 * DEADLINE_S) as members:
        members[2].signal(signal.SIGSTOP)
        reason = members[0].wait_for("lost", 2 * DEADLINE_S + 1)[2]
        members[0].tell("close")
        assert members[1].wait_for("left") == ("left", 0)
        assert members[1].events == [("lost", 2, reason)]


def test_a_peer_that_has_died_before_the_start_fails_the_connecting() -> None:
    node = Node(0, 2, RunKey.generate(), ClusterConfig(silence_deadline_s=30.0))
    with running_loop() as loop, unused_place() as nowhere:
        node.start(loop, {1: PeerAddress(heartbeats=nowhere, messages=nowhere)})
        started_s = time.monotonic()
        with pytest.raises(ConnectionError, match="rank 0 could not connect to rank 1: closed: it no longer listens"):
            node.network.wait_connected(5.0)
        assert time.monotonic() - started_s < 3
        node.network.close()


def test_whoever_is_missed_at_the_start_is_named_with_all_others_that_are() -> None:
    key = RunKey.generate()
    node, other = (Node(rank, 4, key, ClusterConfig(silence_deadline_s=30.0)) for rank in (0, 3))
    with running_loop() as loop, unused_place() as nowhere, unused_place() as nowhere_else:
        dead = {
            rank: PeerAddress(heartbeats=place, messages=place) for rank, place in ((1, nowhere), (2, nowhere_else))
        }
        node.start(loop, {**dead, 3: other.network.address})
        with pytest.raises(ConnectionError) as caught:
            node.network.wait_connected(5.0)
        other.network.close()
        node.network.close()
    gone = "closed: it no longer listens"
    assert str(caught.value) in {
        f"rank 0 could not connect to rank {first}: {gone}; rank {second}: {gone}" for first, second in ((1, 2), (2, 1))
    }


def test_a_peer_that_never_answers_fails_the_connecting_by_the_deadline() -> None:
    node = Node(0, 2, RunKey.generate(), ClusterConfig(silence_deadline_s=DEADLINE_S))
    with socket.create_server(("127.0.0.1", 0)) as mute, running_loop() as loop:
        place = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        node.start(loop, {1: PeerAddress(heartbeats=place, messages=place)})
        with pytest.raises(ConnectionError, match="rank 1: silent for 1"):
            node.network.wait_connected(3 * DEADLINE_S)
        node.network.close()


def test_a_signal_is_noticed_while_a_peer_is_waited_for() -> None:
    node = Node(0, 2, RunKey.generate(), ClusterConfig(silence_deadline_s=30.0))
    other = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    handler_before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with socket.create_server(("127.0.0.1", 0)) as mute, running_loop() as loop:
        place = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        node.start(loop, {1: PeerAddress(heartbeats=place, messages=place)})
        started_s = time.monotonic()
        try:
            other.start()
            with pytest.raises(KeyboardInterrupt):
                node.network.wait_connected(6.0)
        finally:
            signal.signal(signal.SIGINT, handler_before)
        assert time.monotonic() - started_s < 5
        node.network.close()


def test_a_process_that_ends_leaves_no_descendants() -> None:
    with processes(2) as members:
        pids = [member.process.pid for member in members]
        for member in members:
            member.tell("close")
        for member in members:
            member.wait_for("closed")
            member.process.join(5)
            assert member.process.exitcode == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def come_back(members: list[Process], rank: int, numbers: dict[int, int]) -> None:
    """Puts a new process of a rank, connected to those that live, in the place of the old one."""
    old, living = members[rank], [member for member in members if member.rank != rank]
    settings = {"silence_deadline_s": 30.0, "number": numbers[rank], "taken_up": {"numbers": numbers}}
    back = members[rank] = Process(rank, len(members), old.key, settings)
    old.end()
    back.address = back.wait_for("address")[1]
    back.pipe.send({member.rank: member.address for member in members})
    for member in living:
        member.tell("take up", rank, numbers[rank], back.address)
    for member in living:
        member.wait_for("taken up")
    back.wait_for("ready")


def test_a_new_process_of_a_lost_rank_exchanges_messages_and_is_watched() -> None:
    numbers: dict[int, int] = {}
    with processes(3, silence_deadline_s=30.0) as members:
        for one, other in ((0, 1), (0, 2), (1, 2)):
            members[one].tell("open", other)
        for struck in (1, 2, 1):
            members[struck].signal(signal.SIGKILL)
            living = [member for member in members if member.rank != struck]
            for member in living:
                assert member.wait_for("lost", NOTICED_S)[1] == struck
            numbers[struck] = numbers.get(struck, 0) + 1
            come_back(members, struck, numbers)
            back = members[struck]
            for member in living:
                for source, target in ((member, back), (back, member)):
                    for size in (10, 1 << 19):
                        source.tell("send", target.rank, {}, 1, size)
                        source.tell("send arrays", target.rank, {}, 1, size)
            for member in living:
                assert [member.wait_for("note")[1] for _ in range(4)] == [struck] * 4
            assert sorted(back.wait_for("note")[1] for _ in range(8)) == sorted(4 * [m.rank for m in living])
            time.sleep(0.5)
            assert not [event for member in members for event in member.drain()]
