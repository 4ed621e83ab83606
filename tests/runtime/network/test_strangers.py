"""Nothing that a stranger, or a member gone mad, says on our sockets ends or corrupts a run."""

import logging
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import zmq

from rrfp_jax.records import from_plain, to_plain
from rrfp_jax.runtime.network import Bulletin, RendezvousServer, RunKey
from rrfp_jax.runtime.network.plain import pack, unpack
from rrfp_jax.runtime.network.roll_call import Ending, LauncherReport
from rrfp_jax.runtime.network.sockets import rank_role
from tests.runtime.network.mesh import Node, eventually, nodes

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


def assert_still_works(members: list[Node], note: Any = "still here") -> None:
    """Every rank reaches every other, and nobody was lost."""
    for member in members:
        for other in members:
            if other is not member:
                member.network.send_threadsafe(other.network.rank, "note", {"note": note}, [b"frame"])

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


def test_port_scans_are_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), nodes(2, encrypt_arrays=False) as members:
        idle = []
        for seed, place in enumerate(members[0].network.address.as_dict().values()):
            scan(place, seed)
            host, port = place.removeprefix("tcp://").split(":")
            idle.append(socket.create_connection((host, int(port))))
        assert_still_works(members)
        assert "a connection to tcp://127.0.0.1:" in caplog.text
        for connection in idle:
            connection.close()


def test_other_keys_are_refused_and_what_they_say_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), nodes(2) as members:
        address, key = members[0].network.address, members[0].network._liveness._key
        server, head = key.pair(rank_role(0)).public, struct.pack("<QB", 0, 4) + b"note\x80"
        foreign = RunKey.generate().pair(rank_role(1))
        own_role, own_rank = key.pair("member"), key.pair(rank_role(0))
        speaking = partial(stranger, address.messages, zmq.DEALER, identity=b"rank 1")
        with (
            speaking() as bare,
            speaking(pair=foreign, server=server) as of_another_run,
            speaking(pair=own_role, server=server) as of_another_role,
            speaking(pair=own_rank, server=server) as of_its_own_rank,
            speaking(pair=key.pair(rank_role(1)), server=foreign.public) as who_expects_another_server,
            stranger(address.heartbeats, zmq.SUB, pair=foreign, server=server) as listener,
        ):
            listener.subscribe(b"")
            for speaker in (bare, of_another_run, of_another_role, of_its_own_rank, who_expects_another_server):
                with suppress(zmq.Again):  # it may have been refused already
                    speaker.send(head, zmq.NOBLOCK)
            assert not listener.poll(1000)
        assert_still_works(members)
        assert [header for _, header, _ in members[0].got] == [{"note": "still here"}]
        assert "was dropped" in caplog.text


def test_a_member_cannot_speak_for_another() -> None:
    with nodes(3) as members:
        address, key = members[0].network.address, members[0].network._liveness._key
        server, head = key.pair(rank_role(0)).public, struct.pack("<QB", 0, 4) + b"note\x80"
        with stranger(
            address.messages, zmq.DEALER, pair=key.pair(rank_role(2)), server=server, identity=b"rank 1"
        ) as speaker:
            speaker.send(head)
            assert eventually(lambda: len(members[0].got) == 1)
        assert members[0].got[0][0] == 2


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

        def rave() -> None:
            for link in mad._links:
                for head, frames in mad_heads():
                    link.send(0, head, frames)
            done.set()

        mad._loop.call_soon_threadsafe(rave)
        assert done.wait(5)
        for said in (b"", b"\xc1", b"\x81\xa4rank\xa1x", b"\x80"):
            mad._liveness._command(lambda said=said: mad._liveness._publisher.send(said))
        assert eventually(lambda: members[0].network.traffic().num_dropped >= len(mad_heads()) // 2)
        first = members[0].network
        assert_still_works(members[:2])
        assert {rank for rank, _, _ in members[0].got} == {1}
        assert first.traffic().num_received > 0
        assert "a message from rank 2 was dropped" in caplog.text
        assert "a heartbeat was dropped" in caplog.text


def test_arrays_in_the_clear_are_believed_only_with_a_fresh_seal_of_this_run() -> None:
    with nodes(2, encrypt_arrays=False) as members:
        first, second = members
        genuine: list[tuple[bytes, list[bytes]]] = []
        link = second.network._links[1]
        receive = link.receive

        def tapped() -> Any:
            received = receive()
            if received is not None:
                genuine.append((received[1][0], received[1][1:]))
            return received

        link.receive = tapped
        first.network.send_threadsafe(1, "note", {"number": 1}, [bytes(1 << 17)])
        assert eventually(lambda: len(second.got) == 1)
        head, frames = genuine[0]
        sealed = head.obj if isinstance(head.obj, bytes) else bytes(memoryview(head.obj))
        assert sealed.endswith(bytes(head))
        address = second.network.address.arrays or ""
        with stranger(address, zmq.DEALER, identity=b"rank 0") as speaker:
            speaker.send_multipart([sealed, *frames])  # replayed
            speaker.send_multipart([sealed[:20] + struct.pack("<Q", 9) + sealed[28:], *frames])  # renumbered
            speaker.send_multipart([bytes(16) + struct.pack("<IQ", 0, 9) + bytes(head), *frames])  # forged
            speaker.send_multipart([sealed, b"other frames"])
            speaker.send(b"short")
            assert eventually(lambda: second.network.traffic().num_dropped == 5)
        first.network.send_threadsafe(1, "note", {"number": 2}, [bytes(1 << 17)])
        assert eventually(lambda: len(second.got) == 2)
        assert [header["number"] for _, header, _ in second.got] == [1, 2]
        assert_still_works(members)


def test_a_frame_beyond_the_limit_ends_only_its_connection() -> None:
    with nodes(3, max_frame_bytes=4 << 20, silence_deadline_s=5.0) as members:
        mad = members[2].network
        mad._loop.call_soon_threadsafe(lambda: mad._links[0].send(0, b"x", [bytes(5 << 20)]))
        assert eventually(lambda: members[2].lost == {0: "closed its connection"})
        assert_still_works(members[:2])


def test_strangers_at_the_rendezvous_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    key = RunKey.generate()
    with caplog.at_level(logging.WARNING), closing(RendezvousServer(2, key, deadline_s=5.0)) as server:
        scan(server.address)
        public, nothing = key.pair("rendezvous").public, LauncherReport(ranks=(1,), endings={}, version=-1)
        report = pack({"kind": "launcher", "report": to_plain(nothing)})
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
            ended = {7: Ending(code=0, at_s=0.0)}
            mad.send(pack({"kind": "launcher", "report": to_plain(replace(nothing, endings=ended))}))
            server.ended(1, 3)
            mad.send(report)
            bulletin = Bulletin()
            while 1 not in bulletin.endings:
                assert mad.poll(5000)
                bulletin = from_plain(Bulletin, unpack(mad.recv())["bulletin"])
            assert not bare.poll(0)
            assert not other_run.poll(0)
        assert "a process on 127.0.0.1 tries to join with another run key" in caplog.text
        assert "an end of rank 7 of 2" in caplog.text
