"""Arrays over connections of their own: all arrive, in order and once, in aligned memory that is used again."""

import asyncio
import gc
import random
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.cluster import ClusterConfig, MalformedMessage, RunKey
from rrfp_jax.cluster._array_link import ALIGNMENT, BufferPool, MessageAssembly, cut_message
from rrfp_jax.cluster.failure_detector import Suspicion
from rrfp_jax.cluster.wire import SECRET_BYTES, TAG_BYTES, Seal
from tests.cluster.mesh import PATIENCE_S, Node, eventually, nodes, running_loop, traffic

both_ways = pytest.mark.parametrize("encrypt_arrays", [True, False], ids=["encrypted", "clear"])


@contextmanager
def array_nodes(num_ranks: int = 2, **options: Any) -> Iterator[list[Node]]:
    """Networks with connections for arrays between all."""
    with nodes(num_ranks, **options) as members:
        for member in members:
            member.network.open_array_connections(range(num_ranks))
        yield members


def pattern(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


# -- pieces ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=5),
    st.integers(ALIGNMENT, 200),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_messages_that_are_cut_and_shuffled_come_together_in_order(
    sizes: list[list[int]], part_bytes: int, chance: random.Random
) -> None:
    sent = [(b"head %d" % n, [pattern(size, n) for size in each]) for n, each in enumerate(sizes)]
    parts = [part for n, (head, frames) in enumerate(sent) for part in cut_message(n, head, frames, part_bytes)]
    chance.shuffle(parts)
    came: list[list[memoryview]] = []
    assembly = MessageAssembly(BufferPool(1 << 20), came.append)
    for number, total, offset, length, buffers, head in parts:
        data = b"".join(buffers)
        assert len(data) == length <= part_bytes
        assembly.place(number, total, offset, length)[:] = data
        assembly.filled(number, length, head or None)
    assert [bytes(frames[0]) for frames in came] == [head for head, _ in sent]
    for (_, frames), (_, *got) in zip(sent, came, strict=True):
        assert [bytes(frame) for frame in got] == [frame.tobytes() for frame in frames]
        assert all(np.frombuffer(frame, np.uint8).ctypes.data % ALIGNMENT == 0 for frame in got if frame.nbytes)


def test_parts_that_cannot_be_are_refused() -> None:
    assembly = MessageAssembly(BufferPool(0), lambda frames: None)
    assembly.place(0, 100, 0, 100)
    for number, total, offset, length in [(0, 99, 0, 10), (0, 100, 90, 11), (0, 100, 101, 0)]:
        with pytest.raises(MalformedMessage, match="of a message of 100"):
            assembly.place(number, total, offset, length)
    assembly.filled(0, 100, None)
    with pytest.raises(MalformedMessage, match="overlap"):
        assembly.filled(0, 1, None)
    for head in (b"", b"\1\0\0\0", b"\1\0\0\0" + bytes([7]) + bytes(7), b"\xff\xff\xff\xff"):
        other = MessageAssembly(BufferPool(0), lambda frames: None)
        other.place(0, 8, 0, 8)
        with pytest.raises(MalformedMessage, match=r"head of|are announced"):
            other.filled(0, 8, head)
    assembly = MessageAssembly(BufferPool(0), lambda frames: None)
    assembly.place(0, 0, 0, 0)
    assembly.filled(0, 0, b"\0\0\0\0")
    with pytest.raises(MalformedMessage, match="which is complete"):
        assembly.place(0, 0, 0, 0)


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    pool = BufferPool(3000)
    first = pool.take(1000)
    address = np.frombuffer(first, np.uint8).ctypes.data
    part = np.frombuffer(first[10:20], np.uint8).view(np.int8)
    del first
    assert np.frombuffer(pool.take(1000), np.uint8).ctypes.data != address  # a part of it is still in use
    del part
    assert np.frombuffer(pool.take(1000), np.uint8).ctypes.data == address
    held = [pool.take(1000) for _ in range(10)]
    del held
    gc.collect()
    pool.take(1)
    assert pool.free_bytes <= 3000


def test_what_is_sealed_opens_once_in_order_and_unchanged() -> None:
    secret = bytes(range(SECRET_BYTES))
    seal = Seal(secret, 0)
    first, second = seal.closed(b"first"), seal.closed(b"second")
    assert len(first) == 5 + TAG_BYTES
    receiver = Seal(secret, 0)
    assert (receiver.opened(first), receiver.opened(second)) == (b"first", b"second")
    for wrong in (
        lambda: receiver.opened(first),  # again
        lambda: Seal(secret, 0).opened(second),  # one left out
        lambda: Seal(secret, 1).opened(first),  # back to who said it
        lambda: Seal(bytes(SECRET_BYTES), 0).opened(first),
        lambda: Seal(secret, 0).opened(bytes([first[0] ^ 1]) + first[1:]),
    ):
        with pytest.raises(MalformedMessage, match="altered"):
            wrong()


# -- between ranks ---------------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("array_connections", [1, 3])
def test_arrays_of_every_size_arrive_both_ways_aligned_and_in_order(
    encrypt_arrays: bool, array_connections: int
) -> None:
    sizes = [(1 << 18,), (1 << 20,), (16 << 20,), (1, 0, 300_000, 33), (70_000,) * 9, (3 << 20, 5)]
    with array_nodes(encrypt_arrays=encrypt_arrays, array_connections=array_connections) as members:
        confirmed: list[tuple[int, int]] = []
        for step, each in enumerate(sizes):
            for rank, member in enumerate(members):
                frames = [pattern(size, 10 * step + i) for i, size in enumerate(each)]
                note = lambda rank=rank, step=step: confirmed.append((rank, step))  # noqa: E731
                member.send_arrays(1 - rank, {"step": step}, frames, note)
        assert eventually(lambda: len(confirmed) == 2 * len(sizes))
        for member in members:
            assert [header["step"] for _, header, _ in member.got] == list(range(len(sizes)))
            for (_, header, frames), each in zip(member.got, sizes, strict=True):
                for i, (frame, size) in enumerate(zip(frames, each, strict=True)):
                    array = np.frombuffer(frame, np.uint8)
                    np.testing.assert_array_equal(array, pattern(size, 10 * header["step"] + i))
                    assert not size or array.ctypes.data % ALIGNMENT == 0
            assert traffic(member.network).unconfirmed_bytes == 0


def test_one_side_is_enough_and_messages_do_not_wait_for_arrays() -> None:
    for asking in (0, 1):
        with nodes(2) as members:
            members[asking].network.open_array_connections([1 - asking])
            members[asking].send_arrays(1 - asking, {"number": 0}, [bytes(1 << 20)])
            assert eventually(lambda members=members, asking=asking: len(members[1 - asking].got) == 1)
            members[1 - asking].send_arrays(asking, {"number": 1}, [bytes(64 << 20)])
            members[1 - asking].network.on_loop(members[1 - asking].network.send, asking, "note", {"number": 2})
            assert eventually(lambda members=members, asking=asking: len(members[asking].got) == 2)
            assert [header["number"] for _, header, _ in members[asking].got] == [2, 1]


def test_small_arrays_and_those_to_ranks_without_array_connections_go_with_the_messages() -> None:
    with array_nodes() as (first, second):
        first.send_arrays(1, {"number": 0}, [bytes(100)])
        assert eventually(lambda: len(second.got) == 1)
        assert first.network._channels[1].num_sent == 0
    with nodes(2) as (first, second):
        first.send_arrays(1, {"number": 0}, [bytes(1 << 20)])
        assert eventually(lambda: len(second.got) == 1)
        assert first.network._channels[1].num_sent == 0


def test_above_the_mark_arrays_wait_and_a_buffer_is_owned_until_it_has_arrived() -> None:
    size = 1 << 20
    with array_nodes(high_water_bytes=4 * size) as (first, second):
        buffers = [np.full(size, number, np.uint8) for number in range(24)]
        references = [weakref.ref(buffer) for buffer in buffers]
        for number in range(24):
            first.send_arrays(1, {"number": number}, [buffers[number]])
        del buffers
        assert eventually(lambda: len(second.got) == 24)
        assert [frames[0][0] for _, _, frames in second.got] == list(range(24))
        assert eventually(lambda: gc.collect() >= 0 and not any(reference() is not None for reference in references))
        assert traffic(first.network).waiting_bytes == 0


def test_closing_sends_arrays_that_wait_first() -> None:
    with array_nodes(high_water_bytes=1 << 20) as (first, second):
        for number in range(20):
            first.send_arrays(1, {"number": number}, [np.full(1 << 20, number, np.uint8)])
        first.network.close(linger_s=PATIENCE_S)
        assert eventually(lambda: [header["number"] for _, header, _ in second.got] == list(range(20)))
        assert eventually(lambda: second.left == [0])
        assert second.lost == {}
        assert second.broken == []


def test_closing_ends_the_listening_without_an_error() -> None:
    with array_nodes() as (first, second):
        problems: list[str] = []
        for node in (first, second):
            node.network._loop.set_exception_handler(lambda loop, context: problems.append(str(context)))
        first.send_arrays(1, {"number": 0}, [bytes(1 << 18)])
        assert eventually(lambda: len(second.got) == 1)
        for node in (first, second):
            node.network.close()
        assert eventually(lambda: not asyncio.all_tasks(first.network._loop) | asyncio.all_tasks(second.network._loop))
        gc.collect()  # a task that failed is told of when it goes
        assert problems == []


def test_who_leaves_while_another_does_not_read_is_not_taken_for_cut_off() -> None:
    with array_nodes(3) as (first, second, third):
        for rank, other in ((1, second), (2, third)):
            first.send_arrays(rank, {"number": 0}, [bytes(1 << 18)])
            assert eventually(lambda other=other: len(other.got) == 1)
        assembly: Any = third.network._arrays.link.peers[0].assembly  # type: ignore[union-attr]
        with assembly._lock:
            first.send_arrays(2, {"number": 1}, [bytes(64 << 20)])
            first.network.close(linger_s=1.0)
        assert eventually(lambda: second.left == third.left == [0])
        assert [second.lost, second.broken, third.lost, third.broken] == [{}, [], {}, []]


def test_ranks_that_differ_in_encryption_are_told() -> None:
    key = RunKey.generate()
    members = [Node(rank, 2, key, ClusterConfig(silence_deadline_s=5.0, encrypt_arrays=rank == 0)) for rank in range(2)]
    with running_loop() as loop:
        for member in members:
            member.start(loop, {n.network.rank: n.network.address for n in members})
        for member in members:
            member.network.wait_connected(PATIENCE_S)
        members[1].network.open_array_connections([0])
        assert eventually(
            lambda: members[1].lost == {0: "it differs in encrypt_arrays: give all ranks the same settings"}
        )
        for member in members:
            member.network.close()


def test_a_connection_for_arrays_that_ends_between_ranks_that_live_is_named() -> None:
    with array_nodes() as (first, second):
        first.send_arrays(1, {"number": 0}, [bytes(1 << 20)])
        assert eventually(lambda: len(second.got) == 1)
        connection = first.network._arrays.link.peers[1].connections[0]
        connection.socket.shutdown(socket.SHUT_RDWR)
        text = "rank 0 and rank 1 lost sight of each other: a connection within 127.0.0.1"
        assert eventually(lambda: bool(first.broken and second.broken))
        assert {*first.broken, *second.broken} == {text}
        assert [first.lost, second.lost] == [{}, {}]


def test_within_a_host_arrays_and_small_messages_take_local_sockets() -> None:
    with nodes(2) as members:
        members[0].network.open_array_connections([1])
        members[0].network.open_direct_connections([1])
        members[0].send_arrays(1, {"number": 0}, [bytes(1 << 18)])
        assert eventually(lambda: len(members[1].got) == 1)
        for network in (member.network for member in members):
            (peer,) = network._arrays.link.peers.values()
            assert {each.socket.family for each in peer.connections} == {socket.AF_UNIX}
            assert eventually(lambda network=network: network._direct.link.connections[1 - network.rank].proven)
            (direct,) = network._direct.link.connections.values()
            assert direct.proven.socket.family == socket.AF_UNIX


# -- strangers -------------------------------------------------------------------------------------------------------


class Wire:
    """Between the connector and the listener of arrays: keeps what goes by, and may alter it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen: list[bytearray] = []
        self.alters = False
        """Whether a bit is turned of what the connector says next."""
        self._ends: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._ends += [near, far]
            self.seen.append(bytearray())
            for one, other, kept in ((near, far, self.seen[-1]), (far, near, bytearray())):
                threading.Thread(target=self._pump, args=(one, other, kept), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                if self.alters and kept is self.seen[0]:
                    data[0] ^= 1
                kept += data
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self._ends:
            end.close()


@contextmanager
def wired(**options: Any) -> Iterator[tuple[list[Node], Wire]]:
    """Two ranks whose arrays go through a wire that somebody else controls."""
    with nodes(2, array_connections=1, **options) as members:
        wires: list[Wire] = []
        tell = members[0].network.send

        def tell_other(rank: int, topic: str, header: dict[str, Any], *more: Any) -> None:
            if topic == "lanes":
                wires.append(Wire(header["port"]))
                header = header | {"port": wires[0].port, "local": b"\0of another host"}
            tell(rank, topic, header, *more)

        members[0].network.send = tell_other  # type: ignore[method-assign]
        members[1].network.open_array_connections([0])
        members[1].send_arrays(0, {"number": 0}, [bytes(1 << 18)])
        assert eventually(lambda: len(members[0].got) == 1)
        with closing(wires[0]):
            yield members, wires[0]


@both_ways
def test_who_controls_the_wire_can_neither_replay_nor_alter_a_head(encrypt_arrays: bool) -> None:
    secret = b"what nobody else may read".ljust(1 << 18)
    with wired(encrypt_arrays=encrypt_arrays) as (members, wire):
        members[1].send_arrays(0, {"number": 1}, [secret])
        assert eventually(lambda: len(members[0].got) == 2)
        assert (secret[:25] in bytes(wire.seen[0])) == (not encrypt_arrays)
        assert b"number" not in bytes(wire.seen[0])
        # the whole conversation again, to who listens
        with socket.create_connection(("127.0.0.1", wire._target)) as again:
            again.sendall(wire.seen[0])
            again.settimeout(PATIENCE_S)
            with suppress(ConnectionError):  # it may be reset instead
                assert again.recv(1) == b""
        assert len(members[0].got) == 2
        wire.alters = True
        members[1].send_arrays(0, {"number": 2}, [secret])
        assert eventually(lambda: bool(members[0].broken and members[1].broken))
        assert [header["number"] for _, header, _ in members[0].got] == [0, 1]


def test_strangers_at_the_port_for_arrays_are_dropped_and_read_little_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), nodes(3, array_connections=1) as members:
        members[0].network.open_array_connections([1])
        members[1].send_arrays(0, {"number": 0}, [bytes(1 << 18)])
        members[0].send_arrays(1, {"number": 0}, [bytes(1 << 18)])
        assert eventually(lambda: bool(members[0].got and members[1].got))
        place = members[0].network._arrays._listener.getsockname()
        idle = [socket.create_connection(place) for _ in range(100)]  # more than may wait
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(48), b"\xff" * 100_000):
            with socket.create_connection(place) as stranger, suppress(ConnectionError):  # it may be reset instead
                stranger.sendall(said)
                with suppress(OSError):  # a socket that was reset is no longer connected
                    stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(PATIENCE_S)
                assert stranger.recv(1) == b""
        assert len(members[0].network._arrays._unproven) <= 64
        members[2].network.open_array_connections([0])  # who is invited still gets in
        members[2].send_arrays(0, {"number": 2}, [bytes(1 << 18)])
        assert eventually(lambda: len(members[0].got) == 2)
        for connection in idle:
            connection.close()
        assert "a connection for arrays was refused: " in caplog.text
        assert all(member.lost == {} for member in members)


def test_invitations_that_cannot_be_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    good = {"port": 1, "local": b"", "names": [bytes(16)], "secrets": [bytes(32)], "encrypts": True}
    with caplog.at_level("WARNING"), nodes(2) as (first, second):
        for change in ({"port": 0}, {"names": []}, {"names": [b""]}, {"secrets": [bytes(31)]}, {"names": ["x"]}):
            first.network.on_loop(first.network.send, 1, "lanes", good | change)
        second.network.on_loop(second.network.send, 0, "lanes", good)  # only the lower rank invites
        assert eventually(lambda: traffic(second.network).num_dropped == 5)
        assert eventually(lambda: traffic(first.network).num_dropped == 1)
        time.sleep(0.1)
        assert first.lost == second.lost == {}
        assert "invites to connections that cannot be" in caplog.text


def test_a_rank_that_cannot_be_connected_to_is_lost_once() -> None:
    told: list[tuple[int, str]] = []
    with nodes(2) as members, socket.create_server(("127.0.0.1", 0)) as closed:
        network, port = members[1].network, closed.getsockname()[1]
        liveness = network._liveness
        liveness._on_lost = lambda *loss: told.append(loss)
        closed.close()
        names = {"names": [bytes(16)], "secrets": [bytes(SECRET_BYTES)]}
        invitation = {"port": port, "local": b"", "encrypts": network._arrays._encrypts, **names}  # type: ignore[union-attr]
        network.call_soon(partial(network._arrays.receive, 0, invitation, []))  # type: ignore[union-attr]
        assert eventually(lambda: bool(told))
        # The end of its process, which is noticed by other ways too, is no second loss.
        liveness._command(lambda: liveness._suspect(Suspicion(1, 0, "closed its connection", is_certain=True)))
        time.sleep(0.5)
        assert [rank for rank, _ in told] == [0]
        assert told[0][1].startswith(f"no connection for arrays to 127.0.0.1:{port}: ")
