"""Messages among the ranks: all arrive, in order and once, whatever their size; buffers are owned until confirmed."""

import gc
import os
import random
import socket
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from rrfp_jax.cluster import ClusterConfig, PeerNetwork, RunKey
from tests.cluster.mesh import PATIENCE_S, eventually, ipv6, nodes, processes, running_loop, traffic, tree_connections


def on_loop(node: Any, call: Any) -> None:
    """Run on the loop and wait."""
    done = threading.Event()
    node.network._loop.call_soon_threadsafe(lambda: (call(), done.set()))
    assert done.wait(PATIENCE_S)


def test_frames_of_every_size_arrive_as_they_were() -> None:
    payloads = [np.arange(size, dtype=np.uint8) for size in (0, 1, 33, 65_535, 65_536, 1 << 20, 16 << 20)]
    with nodes(2) as (first, second):
        confirmed: list[int] = []
        for step, payload in enumerate(payloads):
            frames = [payload.data] if payload.size else []
            first.network.on_loop(
                first.network.send, 1, "note", {"step": step}, frames, lambda step=step: confirmed.append(step)
            )
        assert eventually(lambda: len(second.got) == len(payloads))
        assert eventually(lambda: len(confirmed) == len(payloads))
        for _, header, frames in second.got:
            found = np.frombuffer(b"".join(frames), np.uint8)
            np.testing.assert_array_equal(found, payloads[header["step"]])
        assert eventually(lambda: traffic(first.network).unconfirmed_bytes == 0)


def test_ranks_may_listen_on_ipv6_addresses() -> None:
    with nodes(2, interface=ipv6()) as (first, second):
        first.network.on_loop(first.network.send, 1, "note", {"step": 0}, [b"frame"])
        first.send_arrays(1, {"step": 1}, [np.zeros(1 << 18, np.uint8)])
        assert eventually(lambda: len(second.got) == 2)


def test_thousands_of_messages_among_processes_arrive_once_and_in_order() -> None:
    num_messages, num_ranks = 1500, 3
    with processes(num_ranks) as members:
        order = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b] * (num_messages // num_ranks)
        random.Random(0).shuffle(order)
        for number, (source, target) in enumerate(order):
            members[source].tell("send", target, {"number": number}, number % 256, random.Random(number).randint(0, 99))
        for rank, member in enumerate(members):
            expected = {s: [n for n, edge in enumerate(order) if edge == (s, rank)] for s in range(num_ranks)}
            received: dict[int, list[int]] = {s: [] for s in range(num_ranks)}
            for _ in range(sum(map(len, expected.values()))):
                _, source, header, sums = member.wait_for("note")
                received[source].append(header["number"])
                assert all(total == num_bytes * (header["number"] % 256) for num_bytes, total in sums)
            assert received == expected
            assert member.drain() == []


def test_a_message_may_be_sent_from_a_handler() -> None:
    with nodes(2) as (first, second):
        hops: list[int] = []

        def forward(node: Any) -> Any:
            def handle(rank: int, header: dict[str, Any], frames: list[memoryview]) -> None:
                hops.append(header["hop"])
                if header["hop"] < 100:
                    node.network.send(rank, "hop", {"hop": header["hop"] + 1}, frames)

            return handle

        first.network.subscribe("hop", forward(first))
        second.network.subscribe("hop", forward(second))
        first.network.on_loop(first.network.send, 1, "hop", {"hop": 1}, [b"payload"])
        assert eventually(lambda: hops == list(range(1, 101)))


def test_above_the_mark_messages_wait_and_none_is_dropped() -> None:
    size, num_messages = 1 << 20, 24
    with nodes(2, high_water_bytes=4 * size) as (first, second):
        held: list[tuple[int, int]] = []

        def burst() -> None:
            for number in range(num_messages):
                first.network.send(1, "note", {"number": number}, [np.full(size, number, np.uint8)])
                now = traffic(first.network)
                held.append((now.unconfirmed_bytes, now.waiting_bytes))

        on_loop(first, burst)
        assert max(unconfirmed for unconfirmed, _ in held) <= 4 * size
        assert held[-1][1] > 19 * size
        assert eventually(lambda: len(second.got) == num_messages)
        assert [header["number"] for _, header, _ in second.got] == list(range(num_messages))
        assert all(frames[0][0] == header["number"] for _, header, frames in second.got)
        assert eventually(lambda: traffic(first.network).unconfirmed_bytes == 0)


def test_what_may_be_lost_goes_only_where_it_need_not_wait() -> None:
    size, favours = 1 << 20, list[bytes]()
    with nodes(2, high_water_bytes=2 * size) as (first, second):
        second.network.subscribe_packed(b"favour", lambda _, header, __: favours.append(header))
        first.network.send_arrays(1, b"favour", b"before", may_drop=True)

        def burst() -> None:
            for number in range(4):  # two of them wait for room
                first.network.send(1, "note", {"number": number}, [np.full(size, number, np.uint8)])
            for _ in range(100):
                first.network.send_arrays(1, b"favour", b"between", may_drop=True)

        on_loop(first, burst)
        assert traffic(first.network).num_dropped == 100
        assert eventually(lambda: len(second.got) == 4 and not traffic(first.network).unconfirmed_bytes)
        first.network.send_arrays(1, b"favour", b"after", may_drop=True)
        assert eventually(lambda: favours == [b"before", b"after"])
        assert [header["number"] for _, header, _ in second.got] == list(range(4))


def test_a_message_larger_than_the_mark_goes_alone() -> None:
    with nodes(2, high_water_bytes=1000) as (first, second):
        for number in range(3):
            first.network.on_loop(first.network.send, 1, "note", {"number": number}, [bytes(5000)])
        assert eventually(lambda: len(second.got) == 3)


def test_a_buffer_is_owned_until_the_peer_has_it_and_then_released() -> None:
    with nodes(2) as (first, second):
        buffer = np.ones(1 << 20, np.uint8)
        reference, confirmed = weakref.ref(buffer), threading.Event()
        first.network.on_loop(first.network.send, 1, "note", {}, [buffer], confirmed.set)
        del buffer
        assert confirmed.wait(PATIENCE_S)
        assert eventually(lambda: gc.collect() >= 0 and reference() is None)
        assert bytes(second.got[0][2][0][:2]) == b"\1\1"


def test_a_failing_handler_is_reported_and_the_next_message_arrives() -> None:
    with nodes(2) as (first, second):
        problems: list[str] = []
        second.network._loop.set_exception_handler(lambda loop, context: problems.append(str(context["exception"])))
        second.network.subscribe("bad", lambda *message: 1 / 0)
        first.network.on_loop(first.network.send, 1, "bad", {})
        first.network.on_loop(first.network.send, 1, "note", {})
        assert eventually(lambda: len(second.got) == 1)
        assert problems == ["division by zero"]


def test_misuse_is_named() -> None:
    key = RunKey.generate()
    with pytest.raises(ValueError, match="rank 2 of 2: ranks count from 0 to 1"):
        PeerNetwork(rank=2, num_ranks=2, key=key)
    with pytest.raises(ValueError, match=r"interface is '\*': name one"):
        PeerNetwork(rank=0, num_ranks=2, key=key, config=ClusterConfig(interface="*"))
    with pytest.raises(ValueError, match=r"cannot listen on interface 'nowhere0'"):
        PeerNetwork(rank=0, num_ranks=2, key=key, config=ClusterConfig(interface="nowhere0"))
    with pytest.raises(ValueError, match="must be positive"):
        PeerNetwork(rank=0, num_ranks=2, key=key, high_water_bytes=0)
    with running_loop() as loop:
        network = PeerNetwork(rank=0, num_ranks=3, key=key)
        with pytest.raises(ValueError, match="call start first"):
            network.send(1, "note", {})
        with pytest.raises(ValueError, match="no address for rank 2"):
            network.start(loop, {1: network.address}, lost=lambda rank, why: None)
        network.close()
        network.close()
    with nodes(2) as (first, _):
        for call, message in [
            (lambda: first.network.send(0, "note", {}), "rank 0 of 2 cannot send to rank 0"),
            (lambda: first.network.send(2, "note", {}), "cannot send to rank 2"),
            (lambda: first.network.send(1, "", {}), "the topic '' has 0 bytes"),
            (lambda: first.network.send(1, "note", {"x": object()}), "plain data only"),
            (lambda: first.network.send(1, "note", {"x": "y" * (1 << 20)}), "at most 1048576 travel"),
            (lambda: first.network.subscribe("note", print), "the topic 'note' has a handler"),
        ]:
            with pytest.raises(ValueError, match=message):
                call()


def test_closing_frees_threads_files_and_ports() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with nodes(2) as members:  # the first use creates pyzmq's own collector
        members[0].network.on_loop(members[0].network.send, 1, "note", {}, [bytes(1 << 20)])
        assert eventually(lambda: len(members[1].got) == 1)
    files, threads = open_files(), set(threading.enumerate())
    ports: list[int] = []
    for _ in range(5):
        with nodes(3) as members:
            members[0].network.on_loop(members[0].network.send, 1, "note", {}, [bytes(1 << 20)])
            members[2].network.open_array_connections([0, 1])
            members[2].send_arrays(0, {}, [bytes(1 << 20)])
            assert eventually(lambda members=members: len(members[0].got) == 1)
            assert eventually(lambda members=members: len(members[1].got) == 1)
            for member in members:
                ports += [int(place.rpartition(":")[2]) for place in vars(member.network.address).values()]
    assert eventually(lambda: open_files() <= files)
    assert set(threading.enumerate()) == threads
    for port in set(ports):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))


def test_closing_sends_what_waits_first() -> None:
    with nodes(2, high_water_bytes=1 << 20) as (first, second):
        for number in range(20):
            array = np.full(1 << 20, number, np.uint8)
            array.flags.writeable = False
            first.network.on_loop(first.network.send, 1, "note", {"number": number}, [array])
        first.network.close()
        assert eventually(lambda: [header["number"] for _, header, _ in second.got] == list(range(20)))


def test_a_rank_that_leaves_too_early_fails_the_connecting() -> None:
    key = RunKey.generate()
    first, second, absent = (PeerNetwork(rank=rank, num_ranks=3, key=key) for rank in range(3))
    book = {n.rank: n.address for n in (first, second, absent)}
    with running_loop() as loop:
        for network in (first, second):
            network.start(loop, book, lost=lambda rank, why: None)
        absent.close()
        with pytest.raises(ConnectionError, match=r"rank 0 .* rank 2"):
            first.wait_connected(PATIENCE_S)
        first.close()
        second.close()


def test_closing_on_the_loop_or_after_it_has_ended_works() -> None:
    with nodes(2) as (first, second):
        on_loop(first, first.network.close)
        assert eventually(lambda: second.left == [0])
        second.network.on_loop(second.network.send, 0, "note", {})
        assert eventually(lambda: traffic(second.network).num_dropped == 1)
    network = PeerNetwork(rank=0, num_ranks=1, key=RunKey.generate())
    with running_loop() as loop:
        network.start(loop, {}, lost=lambda rank, why: None)
        network.wait_connected(PATIENCE_S)
    network.close()


def note_numbers(member: Any) -> list[int]:
    return [header["number"] for _, header, _ in member.got]


def test_who_subscribes_late_gets_everything_in_order_and_before_what_is_newer() -> None:
    with nodes(3) as (first, second, third):
        second.network.unsubscribe("note")
        for number in range(50):
            first.network.on_loop(first.network.send, 1, "note", {"number": number}, [bytes([number])])
            third.network.on_loop(third.network.send, 1, "other", {"number": number})
        assert eventually(lambda: traffic(second.network).num_received == 100)
        assert second.got == []
        others: list[int] = []
        second.network.subscribe("other", lambda rank, header, frames: others.append(header["number"]))
        on_loop(second, lambda: None)
        assert (others, second.got) == (list(range(50)), [])

        def subscribe_and_send() -> None:
            second.network.subscribe("note", lambda *message: second.got.append(message))
            for number in range(50, 60):  # on the loop too, so they may come before what is kept has been handed over
                first.network.send(1, "note", {"number": number}, [bytes([number])])

        on_loop(second, subscribe_and_send)
        assert eventually(lambda: note_numbers(second) == list(range(60)))
        assert [bytes(frames[0])[0] for _, _, frames in second.got] == list(range(60))
        assert traffic(second.network).num_dropped == second.network._topics.kept_bytes == 0


def test_a_topic_may_be_handed_over_while_messages_come() -> None:
    with nodes(2) as (first, second):
        later: list[int] = []

        def take_over(rank: int, header: dict[str, Any], frames: list[memoryview]) -> None:
            later.append(header["number"])
            if header["number"] % 10 == 9:  # handed back and taken again by a handler, with more still kept
                second.network.unsubscribe("note")
                second.network.subscribe("note", take_over)

        for number in range(300):
            first.network.on_loop(first.network.send, 1, "note", {"number": number})
        assert eventually(lambda: len(second.got) > 0)
        second.network.unsubscribe("note")
        second.network.subscribe("note", take_over)
        assert eventually(lambda: len(second.got) + len(later) == 300)
        assert note_numbers(second) + later == list(range(300))


def test_what_nobody_subscribes_to_is_bounded_in_bytes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), nodes(2, high_water_bytes=1 << 20) as (first, second):
        for number in range(20):
            first.network.on_loop(first.network.send, 1, "nobody's", {"number": number}, [bytes(100_000)])
        assert eventually(lambda: traffic(second.network).num_received == 20)
        assert second.network._topics.kept_bytes <= 1 << 20
        assert traffic(second.network).num_dropped == 10
        assert "nobody listens to the topic" in caplog.text
        numbers: list[int] = []
        second.network.subscribe("nobody's", lambda rank, header, frames: numbers.append(header["number"]))
        assert eventually(lambda: numbers == list(range(10)))


def test_messages_go_where_connections_were_named_and_later_where_both_sides_name_more() -> None:
    with nodes(9, connections=tree_connections) as members:
        assert members[8].network.connections == {1, 7}
        with pytest.raises(ValueError, match="rank 8 of 9 cannot send to rank 0: it has connections to ranks 1, 7"):
            members[8].network.send(0, "note", {})
        members[8].network.connect([0])
        members[8].network.on_loop(members[8].network.send, 0, "note", {"number": 1}, [bytes(1 << 17)])
        time.sleep(0.2)
        assert members[0].got == []  # it is kept until rank 0 has connected too

        def connect_and_send() -> None:
            members[0].network.connect([8])
            members[0].network.send(8, "note", {"number": 2})

        on_loop(members[0], connect_and_send)
        assert eventually(lambda: note_numbers(members[0]) == [1] and note_numbers(members[8]) == [2])
        members[8].network.close()
        assert eventually(lambda: all(member.left == [8] for member in members[:8]))
        assert all(member.lost == {} for member in members)


def test_a_rank_that_nobody_exchanges_messages_with_is_missed_by_all() -> None:
    with nodes(12, connections=lambda rank, num_ranks: []) as members:
        assert [member.network.connections for member in members] == [set()] * 12
        members[5].network.close()
        assert eventually(lambda: all(member.left == [5] for rank, member in enumerate(members) if rank != 5))
