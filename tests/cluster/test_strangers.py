"""Nothing that a stranger, or a member gone mad, says on our sockets ends or corrupts a run."""

import logging
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from rrfp_jax.cluster import (
    ClusterConfig,
    JoinRequest,
    Member,
    RendezvousServer,
    RunKey,
    RunStatus,
    meet,
)
from rrfp_jax.cluster import host as host_limits
from rrfp_jax.cluster._zmq_sockets import UnprovenConnections, rank_role
from rrfp_jax.cluster.rendezvous import LauncherReport, ProcessEnding
from rrfp_jax.cluster.wire import pack_plain, unpack_plain
from rrfp_jax.records import from_plain, to_plain
from tests.cluster.mesh import Node, eventually, nodes, running_loop, traffic

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
SCANS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x19\x05READY",
    GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + bytes(194),
    GREETING + b"PLAIN".ljust(20, b"\0") + bytes(32) + b"\x04\x10\x05HELLO\x01a\x01b",
    GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xff" * 5000,
    b"\0",
    b"",
]


def scan(address: str, seed: int = 0) -> None:
    """What port scanners do: say something unexpected, or nothing, and go."""
    host, port = address.removeprefix("tcp://").split(":")
    noise = random.Random(seed)
    for said in [*SCANS, *(noise.randbytes(noise.randint(1, 500)) for _ in range(20))]:
        with socket.create_connection((host, int(port)), timeout=2) as connection:
            try:
                connection.sendall(said)
            except OSError:
                continue


def place_of_arrays(members: list[Node]) -> str:
    """Where the first of two ranks has been connected to for arrays, and listens for more."""
    members[1].network.open_array_connections([0])
    members[1].send_arrays(0, {"note": "array"}, [bytes(1 << 18)])
    assert eventually(lambda: len(members[0].got) == 1)
    members[0].got.clear()
    arrays: Any = members[0].network._arrays
    host, port = arrays._listener.getsockname()
    return f"tcp://{host}:{port}"


def assert_still_works(members: list[Node], note: Any = "still here") -> None:
    """Every rank reaches every other, and nobody was lost."""
    for member in members:
        for other in members:
            if other is not member:
                member.network.on_loop(member.network.send, other.network.rank, "note", {"note": note}, [b"frame"])

    def heard(member: Node) -> set[int]:
        return {rank for rank, header, _ in member.got if header.get("note") == note}

    for member in members:
        others = {other.network.rank for other in members} - {member.network.rank}
        assert eventually(lambda member=member, others=others: heard(member) == others)
        assert member.lost == {}
        assert member.left == []


@contextmanager
def stranger(address: str, kind: int, *, pair: Any = None, server: bytes = b"", identity: bytes = b"") -> Iterator[Any]:
    context = zmq.Context()
    end = context.socket(kind)
    end.linger = 0
    if identity:
        end.routing_id = identity
    if pair is not None:
        end.curve_publickey, end.curve_secretkey = pair
        end.curve_serverkey = server
    end.connect(address)
    try:
        yield end
    finally:
        end.close()
        context.term()


def test_port_scans_are_dropped() -> None:
    with nodes(2) as members:
        idle = []
        for seed, place in enumerate([*vars(members[0].network.address).values(), place_of_arrays(members)]):
            scan(place, seed)
            host, port = place.removeprefix("tcp://").split(":")
            idle.append(socket.create_connection((host, int(port))))
        assert_still_works(members)
        for connection in idle:
            connection.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it; what it has said before is passed over."""
    with suppress(BlockingIOError):
        while True:
            if not connection.recv(100, socket.MSG_DONTWAIT):
                return True
    return False


@pytest.mark.parametrize("listener", ["heartbeats", "messages", "rendezvous"])
def test_the_oldest_of_many_silent_connections_makes_room(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "_UNPROVEN", 10)
    key = RunKey.generate()
    with nodes(2) as members, RendezvousServer(2, key) as server, ExitStack() as held:
        place = server.address if listener == "rendezvous" else getattr(members[0].network.address, listener)
        host, port = place.removeprefix("tcp://").split(":")
        silent = [held.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        assert eventually(lambda: sum(map(is_closed, silent)) >= 30)
        assert not any(map(is_closed, silent[-10:]))
        assert_still_works(members)
        with ThreadPoolExecutor() as ranks:
            hellos = [JoinRequest.of(Member(rank=rank, host="here", pid=rank, address={}), 2, {}) for rank in range(2)]
            meetings = [ranks.submit(meet, server.address, hello, key, deadline_s=20) for hello in hellos]
            assert [len(meeting.result()) for meeting in meetings] == [2, 2]


def test_an_end_that_is_heard_late_is_not_that_of_another_listeners_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors come again at once, and each listener's events in a row of their own."""
    monkeypatch.setattr(host_limits, "_UNPROVEN", 1)
    with ExitStack() as held, closing(UnprovenConnections(0)) as unproven:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        ends = [held.enter_context(socket.create_connection(listener.getsockname())) for _ in range(2)]
        first, second = [held.enter_context(listener.accept()[0]).fileno() for _ in range(2)]
        here, elsewhere = f"tcp://127.0.0.1:{listener.getsockname()[1]}".encode(), b"tcp://127.0.0.1:1"

        def heed(kind: int, descriptor: int, listener: bytes) -> str | None:
            return unproven.heed({"event": kind, "value": descriptor, "endpoint": listener})

        assert heed(zmq.EVENT_ACCEPTED, first, here) == "127.0.0.1"
        heed(zmq.EVENT_DISCONNECTED, first, elsewhere)
        assert heed(zmq.EVENT_ACCEPTED, second, here) == "127.0.0.1"
        assert eventually(lambda: is_closed(ends[0]))
        assert not is_closed(ends[1])
        assert heed(zmq.EVENT_ACCEPTED, second, elsewhere) is None


def test_other_keys_are_refused_and_nothing_is_said_to_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), nodes(2) as members:
        address, key = members[0].network.address, members[0].network._link.key
        server = key.pair(rank_role(0)).public
        foreign = RunKey.generate().pair(rank_role(1))
        own_role, own_rank = key.pair("member"), key.pair(rank_role(0))
        for place in (address.messages, address.heartbeats):
            speaking = partial(stranger, place, zmq.DEALER, identity=b"rank 1")
            with (
                speaking() as bare,
                speaking(pair=foreign, server=server) as of_another_run,
                speaking(pair=own_role, server=server) as of_another_role,
                speaking(pair=own_rank, server=server) as of_its_own_rank,
                speaking(pair=key.pair(rank_role(1)), server=foreign.public) as who_expects_another_server,
            ):
                speakers = (bare, of_another_run, of_another_role, of_its_own_rank, who_expects_another_server)
                for speaker in speakers:
                    with suppress(zmq.Again):  # it may have been refused already
                        speaker.send(b"hello", zmq.NOBLOCK)
                time.sleep(1.0)  # longer than between two heartbeats
                assert not any(speaker.poll(0) for speaker in speakers)
        assert_still_works(members)
        assert [header for _, header, _ in members[0].got] == [{"note": "still here"}]
        assert "a connection from 127.0.0.1 was refused: its key is not of this run" in caplog.text


def test_a_member_hears_only_what_is_for_its_own_rank() -> None:
    with nodes(3) as members:
        first = members[0].network
        key, link = first._link.key, first._link
        pair, server = key.pair(rank_role(2)), key.pair(rank_role(0)).public
        assert eventually(lambda: not link.early)
        before = link._receivers[2]
        with stranger(first.address.messages, zmq.DEALER, pair=pair, server=server, identity=b"rank 1") as listener:
            listener.send(b"hello")
            assert eventually(lambda: link.welcome() in ([], [2]) and link._receivers[2] != before)
            first.on_loop(first.send, 1, "note", {"for": 1})
            first.on_loop(first.send, 2, "note", {"for": 2})
            assert listener.poll(2000)
            assert listener.recv().endswith(pack_plain({"for": 2}))
            assert not listener.poll(200)
        assert eventually(lambda: [header for _, header, _ in members[1].got] == [{"for": 1}])


def test_who_listens_in_place_of_another_is_not_believed() -> None:
    key, settings = RunKey.generate(), ClusterConfig(silence_deadline_s=1.5)
    first, other = Node(0, 2, key, settings), Node(2, 3, key, settings)
    with running_loop() as loop:
        first.start(loop, {1: other.network.address})
        with pytest.raises(ConnectionError, match="rank 0 could not connect to rank 1: "):
            first.network.wait_connected(5.0)
        for node in (first, other):
            node.network.close()


def mad_heads() -> list[tuple[bytes, list[bytes]]]:
    head, noise = struct.Struct("<QB"), random.Random(1)
    return [
        (b"", []),
        (b"short", []),
        (b"x" * (3 << 20), []),
        (head.pack(0, 4) + b"note", []),
        (head.pack(0, 4) + b"note\xc1", []),
        (head.pack(0, 4) + b"note\x91\x01", []),
        (head.pack(0, 4) + b"\xff\xfe\xfd\xfc\x80", []),
        (head.pack(0, 7) + b"nothing\x80", [b"frame"] * 100),
        (head.pack(2**63, 0), []),
        (head.pack(5, 4) + b"note\x80", []),
        *((noise.randbytes(noise.randint(0, 60)), [noise.randbytes(9)] * noise.randint(0, 3)) for _ in range(200)),
    ]


@pytest.mark.parametrize("encrypt_arrays", [True, False], ids=["encrypted", "clear"])
def test_a_member_gone_mad_is_not_heard_and_harms_nobody(
    encrypt_arrays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), nodes(3, encrypt_arrays=encrypt_arrays) as members:
        mad, done = members[2].network, threading.Event()
        mad.open_array_connections([0])
        mad.open_direct_connections([0])
        members[2].send_arrays(0, {"note": "array"}, [bytes(1 << 18)])
        members[2].send_arrays(0, {"note": "small"}, [bytes(1 << 7)])
        assert eventually(lambda: len(members[0].got) == 2)
        members[0].got.clear()

        def rave() -> None:
            for link in (mad._link, mad._arrays.link, mad._direct.link):
                for head, frames in mad_heads():
                    link.send(0, head, frames)
            done.set()

        mad._loop.call_soon_threadsafe(rave)
        assert done.wait(5)
        accusation = pack_plain({"blocked_s": 0.0, "activity": "", "news": {"accusations": [[2, 7, "?", True]]}})
        for said in (b"", b"\xc1", b"\x81\xa4rank\xa1x", b"\x80", b"x" * (3 << 20), accusation):
            mad._liveness._command(lambda said=said: mad._liveness._link.send(0, said))
        assert eventually(lambda: traffic(members[0].network).num_dropped >= len(mad_heads()) // 2)
        first = members[0].network
        assert_still_works(members[:2])
        assert {rank for rank, _, _ in members[0].got} == {1}
        assert traffic(first).num_received > 0
        assert "a message from rank 2 was dropped" in caplog.text
        # heartbeats are read on another thread, which may come to it later
        assert eventually(lambda: "a heartbeat of rank 2 was dropped" in caplog.text)


def test_a_heartbeat_is_that_of_whoever_has_the_connection() -> None:
    """Whatever name it bears: one that says of itself that it hangs brings nobody else into disrepute."""
    with nodes(3, silence_deadline_s=2.0) as members:
        liar, said = members[2].network._liveness, pack_plain({"rank": 1, "blocked_s": 1e6, "activity": ""})

        def found_out() -> bool:
            liar._command(lambda: liar._link.send(0, said))
            return bool(members[0].lost)

        assert eventually(found_out)
        assert members[0].lost.keys() == {2}


def memory_bytes() -> int:
    """What this process holds of the machine's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def flood(address: str, said: bytes, num_bytes: int) -> int:
    """Say something and then send zeros: how many could be sent before the connection was closed."""
    host, port = address.removeprefix("tcp://").split(":")
    sent, piece = 0, bytes(1 << 16)
    with socket.create_connection((host, int(port)), timeout=2) as connection, suppress(OSError):
        connection.sendall(said)
        while sent < num_bytes:
            sent += connection.send(piece)
    return sent


def test_a_stranger_cannot_make_a_rank_allocate() -> None:
    """Frames and commands of 8 GiB are announced before, during and after what a handshake in the clear is."""
    huge = struct.pack(">Q", 8 << 30)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    ready = ready[:1] + bytes([len(ready) - 2]) + ready[2:]
    beginnings = [
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + huge,  # a command
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x02" + huge,  # a message
        GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x06" + huge,
        GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + ready + b"\x02" + huge,
        GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + ready + (b"\0\xff" + bytes(255)) * 100_000,
    ]
    key = RunKey.generate()
    with nodes(2) as members, closing(RendezvousServer(2, key, deadline_s=30.0)) as server:
        places = [*vars(members[0].network.address).values(), place_of_arrays(members), server.address]
        assert len(places) == 4
        before = memory_bytes()
        for place in places:
            for said in beginnings:
                sent = flood(place, said, 64 << 20)
                assert sent < 16 << 20, (place, said[:80])  # what the kernel's buffers take, before it is refused
        assert memory_bytes() - before < 24 << 20
        assert_still_works(members)


def test_strangers_at_the_rendezvous_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    key = RunKey.generate()
    with caplog.at_level(logging.WARNING), closing(RendezvousServer(2, key, deadline_s=5.0)) as server:
        scan(server.address)
        public, nothing = key.pair("rendezvous").public, LauncherReport(node=1, ranks=(1,), endings={}, version=-1)
        report = pack_plain({"kind": "launcher", "report": to_plain(nothing)})
        foreign = RunKey.generate().pair("member")
        with (
            stranger(server.address, zmq.DEALER) as bare,
            stranger(server.address, zmq.DEALER, pair=foreign, server=public) as other_run,
            stranger(server.address, zmq.DEALER, pair=key.pair("member"), server=public) as mad,
        ):
            for speaker in (bare, other_run):
                with suppress(zmq.Again):  # it may have been refused already
                    speaker.send(report, zmq.NOBLOCK)
            for said in (b"", b"\xc1", b"\x80", b"\x81\xa4kind\xa5hello", b"\x81\xa4kind\xa8launcher", b"x" * 100_000):
                mad.send(said)
            mad.send_multipart([b"a", b"b"])
            ended = {7: ProcessEnding(code=0, at_s=0.0)}
            mad.send(pack_plain({"kind": "launcher", "report": to_plain(replace(nothing, endings=ended))}))
            server.ended(1, 3)
            mad.send(report)
            bulletin = RunStatus()
            while 1 not in bulletin.endings:
                assert mad.poll(5000)
                bulletin = from_plain(RunStatus, unpack_plain(mad.recv())["bulletin"])
            # its handshake may be refused later than the other member is answered
            other_key = "a process on 127.0.0.1 tries to join with the key of another run or attempt"
            assert eventually(lambda: other_key in caplog.text)
            assert not bare.poll(0)
            assert not other_run.poll(0)
        assert "an end of rank 7 of 2" in caplog.text
