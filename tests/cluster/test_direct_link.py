"""Small messages over a connection that the event loop serves itself: all arrive, in order, and nothing ever blocks."""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from rrfp_jax.cluster._direct_link import CLEAR_BYTES, MAX_FRAME_BYTES, MAX_FRAMES, DirectLink, open_record, seal_record
from rrfp_jax.cluster.wire import SECRET_BYTES, MalformedMessage, ProvenConnection, Seal, pack_plain
from tests.cluster.mesh import Node, eventually, nodes

both_ways = pytest.mark.parametrize("encrypts", [True, False], ids=["encrypted", "clear"])
TOPIC = b"note"
SECRET = bytes(range(SECRET_BYTES))


class Pair:
    """Two links with a connection between them, one for each rank, and what befell them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, encrypts: bool) -> None:
        self.ends = socket.socketpair()
        self.broken: list[tuple[int, str]] = []
        self.links = [DirectLink(loop, encrypts=encrypts) for _ in range(2)]
        self.loop = loop
        self._got: list[list[list[bytes]]] = [[], []]
        for rank, link in enumerate(self.links):
            link.on_arrival = partial(self._drain, rank)
            link.broken = lambda rank, why: self.broken.append((rank, why))
            link.connect(1 - rank, "")

    def open(self, rank: int) -> None:
        self.links[rank].open(1 - rank, [ProvenConnection(self.ends[rank], Seal(SECRET, rank), Seal(SECRET, 1 - rank))])

    def _drain(self, rank: int) -> None:
        while message := self.links[rank].receive():
            self._got[rank].append([bytes(frame) for frame in message[1]])

    def received(self, rank: int, count: int = 0) -> list[list[bytes]]:
        """What has come to a rank; waits for ``count`` messages."""
        until_s = self.loop.time() + 30
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))
        while len(self._got[rank]) < count and self.loop.time() < until_s:
            self.loop.run_until_complete(asyncio.sleep(0))
        got, self._got[rank] = self._got[rank], []
        return got

    def close(self) -> None:
        for link in self.links:
            link.close(0)
            link.join()
        for end in self.ends:
            end.close()


@contextmanager
def pair(*, is_open: bool = True, encrypts: bool = True) -> Iterator[Pair]:
    loop = asyncio.new_event_loop()
    made = Pair(loop, encrypts=encrypts)
    try:
        for rank in range(2 if is_open else 0):
            made.open(rank)
        yield made
    finally:
        made.close()
        loop.close()


def messages(count: int, num_bytes: int) -> list[list[bytes]]:
    return [[b"head %d" % number, bytes([number % 256]) * num_bytes] for number in range(count)]


@both_ways
def test_messages_of_every_shape_come_both_ways_in_order(encrypts: bool) -> None:
    sent = [
        [b"head"],
        [b"", b"", b"frame"],
        [b"x" * (1 << 20), bytes(MAX_FRAME_BYTES)],
        [b"many", *[b"%d" % number for number in range(MAX_FRAMES)]],
        [b"large", b"", bytes(range(256)) * 64, b"", b"end", b""],
        [b"as many", *[bytes([number % 256]) * 100 for number in range(MAX_FRAMES)]],
        [b"", bytes(CLEAR_BYTES)],
        [b"last", bytes(CLEAR_BYTES - 1)],
    ]
    with pair(encrypts=encrypts) as made:
        for rank, link in enumerate(made.links):
            for head, *frames in sent:
                link.send(1 - rank, head, frames)
        for rank in range(2):
            assert made.received(rank, len(sent)) == sent
        assert made.broken == []


@both_ways
def test_what_the_system_does_not_take_waits_and_keeps_its_order(encrypts: bool) -> None:
    sent = messages(300, 40_000)
    with pair(encrypts=encrypts) as made:
        for head, *frames in sent:
            made.links[0].send(1, head, frames)
        assert made.links[0].connections[1].unsent, "the system took everything: send more"
        assert made.received(1, len(sent)) == sent
        assert not made.links[0].connections[1].unsent


def test_what_is_sent_before_both_are_connected_waits() -> None:
    with pair(is_open=False) as made:
        sent = messages(3, 10)
        made.links[0].send(1, *(sent[0][0], sent[0][1:]))
        made.open(0)
        for head, *frames in sent[1:]:
            made.links[0].send(1, head, frames)
        made.open(1)
        assert made.received(1, 3) == sent


def test_a_record_in_pieces_is_one_message() -> None:
    record = sealed(b"\x01\0" + struct.pack("<I", 3) + b"headxyz")
    with pair(is_open=False) as made:
        made.open(1)
        for byte in record:
            assert made.received(1) == []
            made.ends[0].send(bytes([byte]))
        assert made.received(1) == [[b"head", b"xyz"]]


def sealed(body: bytes, clear: bytes = b"") -> bytes:
    """The first record that rank 0 may send."""
    sealed = Seal(SECRET, 0).closed(body)
    return struct.pack("<II", len(sealed), len(clear)) + sealed + clear


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (sealed(b"\0\0head")[:-1] + b"?", "altered"),
        (struct.pack("<II", 15, 0), "a record of 15 bytes"),
        (struct.pack("<II", 1 << 31, 0), "a record of 2147483648 bytes"),
        (struct.pack("<II", 16, MAX_FRAME_BYTES + 1), f"and {MAX_FRAME_BYTES + 1} in the clear"),
        (sealed(b""), "a record of 0 bytes"),
        (sealed(b"\0"), "a record of 1 bytes"),
        (sealed(b"\xff\x7f"), "which names 32767 frames"),
        (sealed(b"\x01\0" + struct.pack("<I", 5) + b"head"), "whose frames take 5"),
        (sealed(b"\0\x80head"), "whose frames take 0"),
        (sealed(b"\0\0head", b"xyz"), "whose frames take 0"),
        (sealed(b"\x01\x80" + struct.pack("<I", 3) + b"head"), "whose frames take 3"),
        (sealed(b"\x01\0" + struct.pack("<I", 3) + b"headxyz", b"xyz"), "whose frames take 3"),
        (sealed(b"\x01\x80" + struct.pack("<I", 2) + b"head", b"xyz"), "whose frames take 2"),
        (sealed(b"\x01\x80" + struct.pack("<I", 4) + b"head", b"xyz"), "whose frames take 4"),
        (b"", "closed its connection"),
    ],
    ids=[
        "altered",
        "short",
        "long",
        "long clear",
        "empty",
        "no count",
        "no sizes",
        "too little",
        "clear without frames",
        "clear that no frame names",
        "clear that is not there",
        "sealed and clear",
        "clear beyond the frames",
        "too little clear",
        "ended",
    ],
)
def test_what_no_peer_sends_ends_the_connection(said: bytes, why: str) -> None:
    with pair(is_open=False) as made:
        made.open(1)
        made.ends[0].sendall(said)
        if not said:
            made.ends[0].shutdown(socket.SHUT_WR)
        assert made.received(1) == []
        ((rank, reason),) = made.broken
        assert rank == 0
        assert why in reason
        made.links[1].send(0, b"nobody reads this")


def test_larger_frames_go_in_the_clear_only_where_arrays_need_not_be_encrypted() -> None:
    head, frames = b"the head's own words", [b"what the frame says " * 1000, b"and the next"]
    for encrypts in (True, False):
        seal, way_back = Seal(SECRET, 0), Seal(SECRET, 0)
        buffers, num_bytes = seal_record(seal, head, frames, encrypts=encrypts)
        wire = b"".join(buffers)
        assert len(wire) == num_bytes
        assert head not in wire
        assert [frame in wire for frame in frames] == [not encrypts] * 2
        record = open_record(way_back, memoryview(b"before" + wire + b"behind"), 6)
        assert record is not None
        assert [[bytes(frame) for frame in record[0]], record[1]] == [[head, *frames], 6 + len(wire)]
        assert b"next" not in b"".join(seal_record(seal, head, frames[1:], encrypts=encrypts)[0])


def test_who_controls_the_wire_cannot_move_where_frames_begin() -> None:
    frames = [bytes(CLEAR_BYTES), b"x"]
    wire = b"".join(seal_record(Seal(SECRET, 0), b"head", frames, encrypts=False)[0])
    num_sealed, num_clear = struct.unpack_from("<II", wire)
    for wrong in (num_clear - 1, num_clear + 1, 0):
        altered = struct.pack("<II", num_sealed, wrong) + wire[8:] + b"more"
        with pytest.raises(MalformedMessage, match="whose frames take"):
            open_record(Seal(SECRET, 0), memoryview(altered), 0)


def test_who_no_longer_reads_is_noticed_by_who_sends() -> None:
    with pair() as made:
        made.links[1].disconnect(0)
        for head, *frames in messages(2, 10):
            made.links[0].send(1, head, frames)
        made.received(0)
        assert [rank for rank, _ in made.broken] == [1]


def test_threads_may_send_what_the_system_does_not_take_at_once() -> None:
    """Each one's messages keep their order, and those of all are sealed one after another."""
    num_threads, num_messages = 4, 100
    with pair() as made:

        def send(thread: int) -> None:
            for number in range(num_messages):
                made.links[0].send(1, b"%d" % thread, [b"%d" % number, bytes(20_000)])

        threads = [threading.Thread(target=send, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        got = made.received(1, num_threads * num_messages)
        for thread in threads:
            thread.join()
        for number in range(num_threads):
            own = [int(message[1]) for message in got if int(message[0]) == number]
            assert own == [*range(num_messages)]
        assert made.broken == []


@pytest.mark.parametrize("asking", [0, 1])
def test_between_ranks_small_data_take_it_and_large_data_and_messages_do_not(asking: int) -> None:
    with nodes(2) as members:
        first, second = members[asking], members[1 - asking]
        first.network.open_direct_connections([second.network.rank])
        confirmed: list[int] = []
        for number, size in enumerate((100, 0, 60_000)):
            frame = np.full(size, number, np.uint8)
            first.send_arrays(1 - asking, {"number": number}, [frame], lambda: confirmed.append(1))
        first.send_arrays(1 - asking, {"number": 3}, [], lambda: confirmed.append(1))
        assert eventually(lambda: len(confirmed) == 4)
        assert [(header["number"], sum(map(len, frames))) for _, header, frames in second.got] == [
            (0, 100),
            (1, 0),
            (2, 60_000),
            (3, 0),
        ]
        assert sent_directly(first) == 4
        second.send_arrays(asking, {"number": 4}, [b"back"])
        assert eventually(lambda: len(first.got) == 1)
        assert sent_directly(second) == 1
        first.send_arrays(1 - asking, {"number": 5}, [bytes(1 << 18)])
        first.send_arrays(1 - asking, {"number": 6}, [b"x"] * (MAX_FRAMES + 1))
        first.network.on_loop(first.network.send, 1 - asking, "note", {"number": 7})
        assert eventually(lambda: len(second.got) == 7)
        assert sent_directly(first) == 4
        first.network.send_arrays(1 - asking, TOPIC, pack_plain({"number": 9}), [b"now"], lambda: confirmed.append(9))
        assert eventually(lambda: 9 in confirmed)
        assert second.got[-1][1]["number"] == 9
        assert sent_directly(first) == 5


def test_nothing_is_sent_directly_where_no_direct_connection_is_wanted() -> None:
    with nodes(2) as (first, second):
        first.network.send_arrays(1, TOPIC, pack_plain({}), [b"now"])
        assert sent_directly(first) == 0
        first.send_arrays(1, {"number": 0}, [])
        assert eventually(lambda: len(second.got) == 2)


def sent_directly(member: Node) -> int:
    own: Any = member.network._direct
    return int(own.channel.num_sent)


def test_closing_sends_what_waits_first() -> None:
    with nodes(2, high_water_bytes=1 << 17) as (first, second):
        first.network.open_direct_connections([1])
        for number in range(100):
            first.send_arrays(1, {"number": number}, [bytes(30_000)])
        first.network.close(linger_s=30.0)
        assert eventually(lambda: [header["number"] for _, header, _ in second.got] == list(range(100)))
        assert eventually(lambda: second.left == [0])
        assert (second.lost, second.broken) == ({}, [])


def test_one_that_ends_between_ranks_that_live_is_named() -> None:
    with nodes(2) as (first, second):
        first.network.open_direct_connections([1])
        first.send_arrays(1, {"number": 0}, [b"x"])
        assert eventually(lambda: len(second.got) == 1)
        own: Any = first.network._direct
        own.link.connections[1].proven.socket.shutdown(socket.SHUT_RDWR)
        text = "rank 0 and rank 1 lost sight of each other: a connection within 127.0.0.1"
        assert eventually(lambda: bool(first.broken and second.broken))
        assert {*first.broken, *second.broken} == {text}
        assert [first.lost, second.lost] == [{}, {}]
