"""Where connections between two hosts break, or one direction of them, nobody is named who is heard, nor the reporter.

Two hosts of two ranks each are played in this process; what goes from one to the other goes through proxies, which can
stop to pass on what goes one way, or end the connections.
"""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from rrfp_jax.cluster import ClusterConfig, PeerAddress, RunKey
from tests.cluster.mesh import PATIENCE_S, Node, eventually, running_loop

HOSTS = ["HOST0", "HOST0", "HOST1", "HOST1"]
LOST_SIGHT = "ranks 0-1 and ranks 2-3 lost sight of each other: the network between HOST0 and HOST1"
DEADLINE_S = 1.6


class Proxy:
    """Passes connections on to an address, as long as it is let; made by :func:`proxy`."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.passes_in, self.passes_out = threading.Event(), threading.Event()
        """To the target, and from it."""
        self.passes_in.set()
        self.passes_out.set()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._ends.append(near)
                far = socket.create_connection(self._target)
                self._ends.append(far)
                for pump in ((near, far, self.passes_in), (far, near, self.passes_out)):
                    self._start(self._pump, *pump)

    def _pump(self, source: socket.socket, target: socket.socket, passes: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passes.wait()
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def end_connections(self) -> None:
        """As a middlebox does that has forgotten them; new ones may be made."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.passes_in.set()
        self.passes_out.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self.end_connections()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()


@contextmanager
def two_hosts(deadline_s: float = DEADLINE_S) -> Iterator[tuple[list[Node], dict[tuple[int, int], list[Proxy]]]]:
    """Four ranks, and the proxies over which (one, other) connects to what the other says."""
    key = RunKey.generate()
    members = [Node(rank, 4, key, ClusterConfig(silence_deadline_s=deadline_s)) for rank in range(4)]
    between: dict[tuple[int, int], list[Proxy]] = {}
    with running_loop() as loop:
        try:
            for rank, member in enumerate(members):
                book = {}
                for other, peer in enumerate(members):
                    address = peer.network.address
                    if HOSTS[rank] != HOSTS[other]:
                        proxies = [Proxy(place) for place in (address.heartbeats, address.messages)]
                        between[rank, other] = proxies
                        address = PeerAddress(heartbeats=proxies[0].address, messages=proxies[1].address)
                    book[other] = address
                member.start(loop, book, hosts=HOSTS)
            for member in members:
                member.network.wait_connected(PATIENCE_S)
            yield members, between
        finally:
            for member in members:
                member.network.close()
            for proxies in between.values():
                for proxy in proxies:
                    proxy.close()


def test_one_way_broken() -> None:
    """What HOST1 says no longer reaches HOST0, which takes its ranks for lost; HOST1 knows better."""
    with two_hosts() as (members, between):
        for (rank, _other), proxies in between.items():
            for proxy in proxies:
                (proxy.passes_out if HOSTS[rank] == "HOST0" else proxy.passes_in).clear()
        assert eventually(lambda: all(set(member.lost) == {2, 3} for member in members[:2]))
        assert all(reason.startswith("silent for 1.") for member in members[:2] for reason in member.lost.values())
        assert eventually(lambda: all(member.broken for member in members[2:]))
        for member in members[:2]:
            member.network.close()  # whoever they take for lost
        assert eventually(lambda: all(sorted(member.left) == [0, 1] for member in members[2:]))
        assert [len(member.broken) for member in members] == [0, 0, 1, 1]
        for member in members[2:]:  # ranks 0 and 1 give up one after the other, and the sentence may come between
            assert re.fullmatch(LOST_SIGHT.replace("ranks 0-1", "(rank 0|rank 1|ranks 0-1)"), member.broken[0])
        assert [member.lost for member in members[2:]] == [{}, {}]


def test_both_ways_broken() -> None:
    with two_hosts() as (members, between):
        for proxies in between.values():
            for proxy in proxies:
                proxy.passes_out.clear()
                proxy.passes_in.clear()
        assert eventually(lambda: [set(member.lost) for member in members] == [{2, 3}, {2, 3}, {0, 1}, {0, 1}])
        assert [member.broken for member in members] == [[]] * 4


@pytest.mark.parametrize("which", ["all", "messages"])
def test_connections_that_are_ended_between_ranks_that_live(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence comes after half the time for answers, here so long that a busy machine has seen all of them end."""
    monkeypatch.setattr("rrfp_jax.cluster._liveness._ANSWER_S", 2.0)
    with two_hosts(5 * DEADLINE_S) as (members, between):
        for proxies in between.values():
            for proxy in proxies[which == "messages" :]:
                proxy.end_connections()
        assert eventually(lambda: all(member.broken for member in members))
        assert [member.broken for member in members] == [[LOST_SIGHT]] * 4
        assert [member.lost for member in members] == [{}] * 4


def test_a_heartbeats_connection_that_is_made_anew_is_forgiven() -> None:
    with two_hosts() as (members, between):
        between[0, 2][0].end_connections()
        members[2].network.on_loop(members[2].network.send, 0, "note", {"number": 1})
        assert not eventually(lambda: any(member.lost or member.broken for member in members), 2 * DEADLINE_S)
        members[3].network.close()
        assert eventually(lambda: all(member.left == [3] for member in members[:3]))
        assert [header for _, header, _ in members[0].got] == [{"number": 1}]


def test_one_pair_that_no_longer_hears_each_other_is_named_by_all() -> None:
    with two_hosts() as (members, between):
        for proxy in (*between[1, 2], *between[2, 1]):
            proxy.passes_out.clear()
            proxy.passes_in.clear()
        assert eventually(lambda: all(member.broken for member in members))
        text = "rank 1 and rank 2 lost sight of each other: the network between HOST0 and HOST1"
        assert [member.broken for member in members] == [[text]] * 4
        assert [member.lost for member in members] == [{}] * 4
