"""Meshes for tests: networks within this process, and members in processes of their own that can be killed."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import pytest

from rrfp_jax.cluster import ClusterConfig, LoopThread, PeerAddress, PeerNetwork, RunKey
from rrfp_jax.cluster.wire import pack_plain
from rrfp_jax.layout import children, parent

PATIENCE_S = 30.0
START_S = 60.0


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether the condition holds within the time."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True


def ipv6() -> str:
    """Loopback by IPv6; skips the test where this host has none."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this host has no IPv6")
    return "::1"


class Traffic(NamedTuple):
    """Messages that a network has exchanged or dropped, and bytes that it holds: sent and unconfirmed, and waiting."""

    num_received: int
    num_dropped: int
    unconfirmed_bytes: int
    waiting_bytes: int


def traffic(network: PeerNetwork) -> Traffic:
    channels, held = network._channels, [channel.held_bytes() for channel in network._channels]
    return Traffic(
        num_received=sum(channel.num_received for channel in channels),
        num_dropped=network._topics.num_dropped + sum(channel.num_dropped for channel in channels),
        unconfirmed_bytes=sum(unconfirmed for unconfirmed, _ in held),
        waiting_bytes=sum(waiting for _, waiting in held),
    )


class Node:
    """A network in this process and what it heard."""

    def __init__(self, rank: int, num_ranks: int, key: RunKey, config: ClusterConfig, **more: Any) -> None:
        self.network = PeerNetwork(rank=rank, num_ranks=num_ranks, key=key, config=config, **more)
        self.got: list[tuple[int, dict[str, Any], list[memoryview]]] = []
        self.lost: dict[int, str] = {}
        self.left: list[int] = []
        self.broken: list[str] = []
        self.network.subscribe("note", lambda *message: self.got.append(message))

    def start(self, loop: asyncio.AbstractEventLoop, addresses: Mapping[int, PeerAddress], **options: Any) -> None:
        callbacks = {"lost": self.lost.__setitem__, "left": self.left.append, "broken": self.broken.append}
        self.network.start(loop, addresses, **callbacks, **options)

    def send_arrays(
        self, rank: int, header: dict[str, Any], frames: Sequence[Any], on_confirmed: Callable[[], None] | None = None
    ) -> None:
        network, packed = self.network, pack_plain(header)
        network.call_soon(lambda: network.send_arrays(rank, b"note", packed, frames, on_confirmed))


def tree_connections(rank: int, num_ranks: int) -> set[int]:
    """A rank's neighbours in the control tree, and the next and previous one, as stages of a chain have them."""
    above = parent(rank)
    neighbours = {rank - 1, rank + 1, *children(rank, num_ranks), *([] if above is None else [above])}
    return neighbours & set(range(num_ranks))


Connections = Callable[[int, int], Iterable[int]]


@contextmanager
def nodes(num_ranks: int, *, connections: Connections | None = None, **settings: Any) -> Iterator[list[Node]]:
    """Connected networks in this process, on one loop; ``connections`` of a rank among so many, by default all."""
    more = {name: settings.pop(name) for name in ("high_water_bytes", "array_connections") if name in settings}
    key, made = RunKey.generate(), ClusterConfig(**{"silence_deadline_s": 5.0} | settings)
    members = [Node(rank, num_ranks, key, made, **more) for rank in range(num_ranks)]
    with running_loop() as loop:
        try:
            for rank, member in enumerate(members):
                peers = None if connections is None else connections(rank, num_ranks)
                member.start(loop, {n.network.rank: n.network.address for n in members}, connections=peers)
            for member in members:
                member.network.wait_connected(PATIENCE_S)
            yield members
        finally:
            for member in members:
                member.network.close()


@contextmanager
def networks(num_ranks: int) -> Iterator[list[PeerNetwork]]:
    """Connected networks in this process, on one loop as the runtime's, to which anything may subscribe."""
    key, config, loop = RunKey.generate(), ClusterConfig(silence_deadline_s=5.0), LoopThread()
    made = [PeerNetwork(rank=rank, num_ranks=num_ranks, key=key, config=config) for rank in range(num_ranks)]
    try:
        for network in made:
            network.start(loop.loop, {each.rank: each.address for each in made}, lost=lambda *_: None)
        for network in made:
            network.wait_connected(PATIENCE_S)
        yield made
    finally:
        for network in made:
            network.close()
        loop.close()


# -- members in processes of their own -------------------------------------------------------------------------------


def live(rank: int, num_ranks: int, key: str, settings: dict[str, Any], pipe: Connection) -> None:
    """The main function of a member: does what the pipe tells, and reports what happens to it."""
    number, taken_up = settings.pop("number", 0), settings.pop("taken_up", None)
    is_sparse, inherited = settings.pop("is_sparse", False), len(os.listdir("/proc/self/fd"))
    events: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()  # so that a full pipe never blocks the event loop
    writer = threading.Thread(target=lambda: [pipe.send(event) for event in iter(events.get, None)])
    writer.start()

    def report(*event: Any) -> None:
        events.put(event)

    network = PeerNetwork(
        rank=rank, num_ranks=num_ranks, key=RunKey.from_text(key), config=ClusterConfig(**settings), number=number
    )
    sums = lambda frames: [(frame.nbytes, int(np.frombuffer(frame, np.uint8).sum())) for frame in frames]  # noqa: E731
    network.subscribe("note", lambda source, header, frames: report("note", source, header, sums(frames)))
    report("address", vars(network.address))
    addresses = {r: PeerAddress(**address) for r, address in pipe.recv().items()}
    with running_loop() as loop:
        network.start(
            loop,
            addresses,
            connections=tree_connections(rank, num_ranks) if is_sparse else None,
            lost=lambda r, why: report("lost", r, why),
            left=lambda r: report("left", r),
            broken=lambda text: report("broken", text),
            **(taken_up or {}),
        )
        network.wait_connected(START_S)
        report("ready")
        while (command := pipe.recv())[0] != "close":
            match command:
                case ("send", target, header, value, num_bytes):
                    frames = [np.full(num_bytes, value, np.uint8)] if num_bytes else []
                    network.on_loop(network.send, target, "note", header, frames)
                case ("send arrays", target, header, value, num_bytes):
                    network.send_arrays(target, b"note", pack_plain(header), [np.full(num_bytes, value, np.uint8)])
                case ("open", target):
                    network.open_array_connections([target])
                    network.open_direct_connections([target])
                case ("take up", target, *place):
                    network.take_up(target, place[0], PeerAddress(**place[1]), partial(report, "taken up", target))
                case ("files",):
                    report("files", len(os.listdir("/proc/self/fd")) - inherited + 3, sorted(sys.modules))
                case ("wait", text, ranks):
                    network.tell_activity(text, (text, ranks))
                case ("hold", seconds):  # PyDLL keeps the interpreter's lock: no other Python runs
                    ctypes.PyDLL(None).sleep(seconds)
                case ("block", seconds):
                    loop.call_soon_threadsafe(time.sleep, seconds)
        network.close(linger_s=5.0)
    report("closed")
    events.put(None)
    writer.join()


class Process:
    """A member from outside."""

    def __init__(self, rank: int, num_ranks: int, key: RunKey, settings: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(rank, num_ranks, key.text(), settings, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.events: list[tuple[Any, ...]] = []
        self.rank, self.num_ranks, self.key = rank, num_ranks, key
        self.address: dict[str, str] = {}

    def tell(self, *command: Any) -> None:
        self.pipe.send(command)

    def signal(self, number: signal.Signals) -> float:
        os.kill(self.process.pid or 0, number)
        return time.monotonic()

    def wait_for(self, kind: str, timeout_s: float = PATIENCE_S) -> tuple[Any, ...]:
        """The next event of a kind; other events stay in ``events``."""
        until_s, seen = time.monotonic() + timeout_s, 0
        while True:
            for i in range(seen, len(self.events)):
                if self.events[i][0] == kind:
                    return self.events.pop(i)
            seen = len(self.events)
            if not self.pipe.poll(max(0.0, until_s - time.monotonic())):
                raise AssertionError(f"no event '{kind}' within {timeout_s} s, but {self.events}")
            self.events.append(self.pipe.recv())

    def drain(self) -> list[tuple[Any, ...]]:
        """All events so far."""
        while self.pipe.poll(0):
            self.events.append(self.pipe.recv())
        return self.events

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(PATIENCE_S)
        self.process.close()
        self.pipe.close()


@contextmanager
def processes(
    num_ranks: int, *, deadlines_s: Mapping[int, float] | None = None, **settings: Any
) -> Iterator[list[Process]]:
    """Connected members in processes of their own; killed at the end. ``deadlines_s``: of silence, by rank.

    With ``is_sparse``, members have :func:`tree_connections`; by default each has one to all others.
    """
    key, members = RunKey.generate(), []
    common = {"silence_deadline_s": 5.0} | settings
    own = {rank: {"silence_deadline_s": deadline_s} for rank, deadline_s in (deadlines_s or {}).items()}
    try:
        members = [Process(r, num_ranks, key, common | own.get(r, {})) for r in range(num_ranks)]
        for member in members:
            member.address = member.wait_for("address", START_S)[1]
        addresses = {r: member.address for r, member in enumerate(members)}
        for member in members:
            member.pipe.send(addresses)
        for member in members:
            member.wait_for("ready", START_S)
        yield members
    finally:
        for member in members:
            member.end()
