"""The rendezvous over sockets: everyone gets the same answer, within the deadline."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from rrfp_jax.cluster import (
    ClusterConfig,
    JoinRequest,
    LauncherLink,
    Member,
    PeerAddress,
    RendezvousFailed,
    RendezvousServer,
    RunKey,
    RunStatus,
    meet,
)
from rrfp_jax.cluster import _rendezvous_client as clients
from rrfp_jax.cluster import _rendezvous_server as rendezvous_server
from rrfp_jax.cluster.rendezvous import RollCall
from tests.cluster.mesh import Node, eventually, ipv6, running_loop


def hello(
    rank: int, num_ranks: int = 3, *, token: str = "a", address: dict[str, str] | None = None, **more: Any
) -> JoinRequest:
    member = Member(rank=rank, host="here", pid=1, address=address or {}, token=token)
    return JoinRequest.of(member, num_ranks, {"seed": 0} | more)


@contextmanager
def rendezvous(num_ranks: int = 3, **options: Any) -> Iterator[tuple[RendezvousServer, Callable[..., Any]]]:
    """A server, and what comes to it: ``visit(hello)`` is a future of the members."""
    key = RunKey.generate()
    server = RendezvousServer(num_ranks, key, **{"deadline_s": 5.0} | options)
    with server, ThreadPoolExecutor(8) as pool:
        yield server, lambda said, k=key, **o: pool.submit(meet, server.address, said, k, **o)


def test_everyone_learns_everyones_address() -> None:
    with rendezvous() as (_, visit):
        visits = [visit(hello(rank, address={"messages": f"tcp://10.0.0.{rank}:9"})) for rank in (2, 0, 1)]
        members = visits[0].result(5.0)
        assert [member.address["messages"] for member in members] == [f"tcp://10.0.0.{r}:9" for r in range(3)]
        assert all(future.result(5.0) == members for future in visits)


def test_the_rendezvous_may_have_an_ipv6_address() -> None:
    with rendezvous(1, interface=ipv6()) as (server, visit):
        assert server.address.startswith("tcp://[::1]:")
        assert visit(hello(0, 1)).result(5.0)


def test_everyone_learns_who_is_missing() -> None:
    with rendezvous(deadline_s=0.6) as (_, visit):
        started_s = time.monotonic()
        visits = [visit(hello(rank)) for rank in (0, 2)]
        for future in visits:
            with pytest.raises(RendezvousFailed, match=r"not complete after 0.6 s\n  missing: rank 1"):
                future.result(5.0)
        assert time.monotonic() - started_s < 2
        with pytest.raises(RendezvousFailed, match="rank 1 came late: the rendezvous had failed before"):
            visit(hello(1)).result(5.0)


def test_everyone_learns_what_differs() -> None:
    with rendezvous() as (_, visit):
        visits = [visit(hello(rank, seed=seed)) for rank, seed in enumerate([0, 4, 0])]
        for future in visits:
            with pytest.raises(RendezvousFailed, match="seed is 0 on ranks 0, 2, 4 on rank 1"):
                future.result(5.0)


def test_a_second_process_of_a_rank_is_refused_and_the_run_goes_on() -> None:
    with rendezvous() as (_, visit):
        visits = [visit(hello(rank)) for rank in (0, 1)]
        time.sleep(0.3)
        with pytest.raises(RendezvousFailed, match=r"rank 1 was started twice: .* this is another process, pid 1"):
            visit(hello(1, token="b")).result(5.0)
        with pytest.raises(RendezvousFailed, match=r"rank 3 .* is out of range: this run has 3 ranks"):
            visit(hello(3)).result(5.0)
        visits.append(visit(hello(2)))
        assert all(len(future.result(5.0)) == 3 for future in visits)


def test_an_exit_ends_the_waiting_at_once() -> None:
    with rendezvous(deadline_s=30.0) as (server, visit):
        waiting = visit(hello(0))
        time.sleep(0.2)
        server.ended(2, 1)
        with pytest.raises(RendezvousFailed, match="rank 2 ended with code 1 before all ranks had come"):
            waiting.result(2.0)


def test_a_launcher_that_ends_releases_those_who_wait() -> None:
    with rendezvous(deadline_s=30.0) as (server, visit):
        waiting = visit(hello(0))
        time.sleep(0.2)
        server.close()
        with pytest.raises(RendezvousFailed, match="the launcher has ended the run"):
            waiting.result(2.0)
        server.close()


def test_a_wrong_run_key_is_named_soon() -> None:
    with rendezvous(deadline_s=30.0) as (_, visit):
        started_s = time.monotonic()
        with pytest.raises(RendezvousFailed, match="does not accept this process's run key"):
            visit(hello(0), RunKey.generate(), deadline_s=10.0).result(8.0)
        assert time.monotonic() - started_s < 5


def test_an_absent_rendezvous_is_named_by_the_deadline() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RendezvousFailed, match=f"{address} did not answer: is the launcher running"):
            meet(address, hello(0), RunKey.generate(), deadline_s=0.5)
    with pytest.raises(ValueError, match="'nonsense' is no address"):
        meet("nonsense", hello(0), RunKey.generate())


def test_a_rank_may_come_before_the_rendezvous_opens() -> None:
    key = RunKey.generate()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meet, f"tcp://127.0.0.1:{port}", hello(0, 1), key, deadline_s=5.0)
        time.sleep(0.3)
        with RendezvousServer(1, key, port=port):
            assert [member.rank for member in early.result(5.0)] == [0]


@contextmanager
def linked(server: RendezvousServer, key: RunKey, *ranks: int) -> Iterator[tuple[LauncherLink, list[RunStatus]]]:
    """Another node's launcher, and the bulletins that it has got."""
    got: list[RunStatus] = []
    link = LauncherLink(server.address, key, ranks[0], on_status=got.append, notice=lambda text: None)
    link.takes(ranks)
    try:
        assert eventually(lambda: link.is_accepted)
        yield link, got
    finally:
        link.close()


def codes(got: list[RunStatus]) -> dict[int, int]:
    return {rank: ending.code for rank, ending in got[-1].endings.items()} if got else {}


def test_launchers_learn_of_endings_early_and_late() -> None:
    key = RunKey.generate()
    here: list[RunStatus] = []
    with RendezvousServer(3, key, on_status=here.append) as server, linked(server, key, 2) as (link, early):
        server.ended(0, 137)
        assert eventually(lambda: codes(early) == {0: 137})
        link.ended(2, 17, by_launcher="stood still")
        assert eventually(lambda: codes(early) == codes(here) == {0: 137, 2: 17})
        assert link.is_settled()
        assert here[-1].endings[2].by_launcher == "stood still"
        assert here[-1].endings[0].at_s < here[-1].endings[2].at_s < 10
        with linked(server, key, 1) as (_, late):
            assert eventually(lambda: codes(late) == {0: 137, 2: 17})
        assert eventually(server.is_settled)
        assert early[-1] == here[-1]
        with pytest.raises(ValueError, match="an end of rank 3 of 3"):
            server.ended(3, 0)
        server.close()
        assert eventually(lambda: link.is_gone)
        assert early[-1].is_last


def test_launchers_learn_of_a_failed_start_and_of_a_dead_service() -> None:
    key = RunKey.generate()
    with RendezvousServer(3, key) as server, linked(server, key, 1, 2) as (_, got):
        server.ended(0, 137)
        assert eventually(lambda: bool(got) and got[-1].doomed == (1, 2))
        assert "rank 0 ended with code 137" in (got[-1].failure or "")
        server.service_ended(137, time.monotonic())
        assert eventually(lambda: got[-1].service is not None)


class Lossy:
    """A socket that loses what it is given to send, but for every ``nth``."""

    def __init__(self, inner: Any, nth: int) -> None:
        self.__dict__.update(_inner=inner, _nth=nth, _count=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def _keeps(self) -> bool:
        self.__dict__["_count"] += 1
        return self._count % self._nth == 0

    def send(self, *arguments: Any) -> None:
        if self._keeps():
            self._inner.send(*arguments)

    def send_multipart(self, *arguments: Any) -> None:
        if self._keeps():
            self._inner.send_multipart(*arguments)


def test_no_ending_is_lost_where_messages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_REPEAT_S", 0.1)
    monkeypatch.setattr(clients.Client, "say", lambda client, data: Lossy.send(client.lossy, data))
    opened = clients.Client.__init__

    def open_lossy(client: Any, *arguments: Any) -> None:
        opened(client, *arguments)
        client.lossy = Lossy(client._socket, 3)

    monkeypatch.setattr(clients.Client, "__init__", open_lossy)
    key = RunKey.generate()
    with RendezvousServer(2, key) as server:
        replies = Lossy(server._socket, 2)
        monkeypatch.setattr(
            server, "_reply", lambda route, said: replies.send_multipart([route, clients.pack_plain(said)])
        )
        with linked(server, key, 1) as (link, got):
            link.ended(1, 0)
            server.ended(0, 0)
            assert eventually(lambda: codes(got) == {0: 0, 1: 0})
            assert eventually(link.is_settled)
            assert eventually(server.is_settled)
            assert not link.is_gone


def test_a_head_that_dies_without_a_word_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    key = RunKey.generate()
    server = RendezvousServer(2, key)
    with linked(server, key, 1) as (link, _):
        monkeypatch.setattr(server, "_reply", lambda route, said: None)
        link.ended(1, 4)
        time.sleep(0.2)
        assert not link.is_settled()
        server.close()
        assert eventually(lambda: link.is_gone)
        assert link.is_settled()
        assert link.is_settled([0])


def test_only_launchers_that_are_there_or_may_come_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "SILENT_S", 1.5)
    monkeypatch.setattr(clients, "_REPEAT_S", 0.3)
    key = RunKey.generate()
    with RendezvousServer(3, key, deadline_s=2.5) as server:
        assert not server.is_settled([2])
        with linked(server, key, 1) as (link, _):
            assert eventually(lambda: server.is_settled([2]), 5.0)  # it did not come in time
            assert not server.is_settled([1])
            monkeypatch.setattr(link, "_report", lambda **_: b"\x80")
            assert eventually(lambda: server.is_settled([1]), 5.0)  # it has fallen silent


def test_who_is_waited_for_is_said_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "WAITING_S", 0.4)
    said: list[str] = []
    with rendezvous(4, notice=said.append) as (_, visit):
        visits = [visit(hello(rank, 4)) for rank in (0, 1)]
        assert eventually(lambda: len(said) == 2, 4.0)
        visits += [visit(hello(rank, 4)) for rank in (2, 3)]
        assert all(len(future.result(5.0)) == 4 for future in visits)
    assert [text[: text.index("(")] for text in said] == 2 * ["waiting for ranks 2-3 "]


def test_another_key_is_named_on_both_sides_once_and_the_right_one_still_welcome() -> None:
    key, here, there = RunKey.generate(), list[str](), list[str]()
    with RendezvousServer(2, key, notice=here.append) as server:
        ignored: list[RunStatus] = []
        link = LauncherLink(server.address, RunKey.generate(), 1, on_status=ignored.append, notice=there.append)
        assert eventually(lambda: bool(there) and bool(here), 4.0)
        time.sleep(1.0)
        assert not link.is_accepted
        link.close()
        with linked(server, key, 1):
            pass
    assert here == [
        "a process on 127.0.0.1 tries to join with the key of another run or attempt: give the same to all nodes"
    ]
    assert len(there) == 1
    assert there[0].endswith("it answers, but not to this node's run key: give the same to all nodes")


def test_a_head_of_an_earlier_attempt_is_no_matter_of_keys() -> None:
    there: list[str] = []
    with RendezvousServer(2, RunKey.generate(), notice=lambda text: None) as server:
        arguments: dict[str, Any] = {"on_status": lambda _: None, "notice": there.append}
        link = LauncherLink(server.address, RunKey.generate(), 1, is_sure=False, **arguments)
        assert eventually(lambda: bool(there), 4.0)
        link.close()
    assert there[0].endswith("it serves another attempt, or was given another run key than this node")


def test_refusals_are_told_in_a_line_each() -> None:
    said: list[str] = []
    with rendezvous(3, notice=said.append) as (server, visit):
        server.ended(1, 137)
        for rank in (0, 2):
            with pytest.raises(RendezvousFailed):
                visit(hello(rank)).result(5.0)
    assert said == [
        f"rank {rank} (pid 1 on host here) is refused: "
        "the rendezvous failed: rank 1 ended with code 137 before all ranks had come"
        for rank in (0, 2)
    ]


def test_a_signal_that_does_not_interrupt_the_wait_is_noticed_soon() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    key, before = RunKey.generate(), signal.signal(signal.SIGUSR2, interrupt)
    # Another thread gets it, as where it comes just before the main thread begins to wait.
    sender = threading.Timer(0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR2))
    try:
        with RendezvousServer(2, key, deadline_s=30.0) as server:
            sender.start()
            started_s = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                meet(server.address, hello(0, 2), key)
            assert time.monotonic() - started_s < 2.0
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_port_is_free_again_and_nothing_is_left() -> None:
    key, threads = RunKey.generate(), set(threading.enumerate())
    port = None
    for _ in range(3):
        with RendezvousServer(1, key, port=port) as server:
            port = int(server.address.rpartition(":")[2])
            with pytest.raises(ValueError, match=f"cannot listen on .* port {port}: Address already"):
                RendezvousServer(1, key, port=port)
            assert len(meet(server.address, hello(0, 1), key)) == 1
    assert set(threading.enumerate()) == threads


def test_from_the_rendezvous_to_the_first_message() -> None:
    key, num_ranks = RunKey.generate(), 3
    members = [Node(rank, num_ranks, key, ClusterConfig()) for rank in range(num_ranks)]
    with RendezvousServer(num_ranks, key) as server, ThreadPoolExecutor(3) as pool, running_loop() as loop:

        def enter(node: Node) -> None:
            said = hello(node.network.rank, num_ranks, address=vars(node.network.address))
            book = meet(server.address, said, key)
            node.start(loop, {member.rank: PeerAddress(**member.address) for member in book})
            node.network.wait_connected(5.0)
            node.network.on_loop(
                node.network.send, (node.network.rank + 1) % num_ranks, "note", {"from": node.network.rank}
            )

        for done in [pool.submit(enter, node) for node in members]:
            done.result(8.0)
        for node in members:
            assert eventually(lambda node=node: len(node.got) == 1)
            assert node.got[0][1] == {"from": (node.network.rank - 1) % num_ranks}
        for node in members:
            node.network.close()


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match=r"num_ranks 0 and deadline_s 60.0 must be positive"):
        RendezvousServer(0, RunKey.generate())
    with pytest.raises(ValueError, match=r"interface is '0.0.0.0': name one"):
        RendezvousServer(1, RunKey.generate(), interface="0.0.0.0")


# -- how many nodes take part ------------------------------------------------------------------------------------------


def test_the_largest_number_of_nodes_that_is_there_takes_part_once_all_are_or_the_wait_is_over() -> None:
    assert RollCall((3,), 9.0).nodes == (0, 1, 2)
    roll = RollCall((4, 2), 9.0)
    assert not any(roll.call(others, now_s) for others, now_s in (((), 1.0), ((3,), 8.9), ((), 9.5), ((1, 2), 8.0)))
    assert roll.call((1, 2, 3), 8.5)
    assert roll.nodes == (0, 1, 2, 3)
    roll = RollCall((4, 2), 9.0)
    assert roll.call((3, 2), 9.0)
    assert roll.nodes == (0, 2)


def test_nodes_that_come_back_count_once_they_have_stayed_and_make_a_larger_number() -> None:
    roll = RollCall((4, 2), 0.0)
    assert roll.call((1,), 0.0)
    seen = []
    for now_s in range(100):
        others = (1, 2, 3) if 10 <= now_s < 20 or now_s >= 40 else (1, 2)
        assert not roll.call(others, float(now_s))
        seen.append(roll.may_grow)
    assert (seen.index(True), all(seen[55:])) == (55, True)


def test_launchers_are_told_which_nodes_take_part_and_ranks_count_over_these() -> None:
    key = RunKey.generate()
    with (
        RendezvousServer(6, key, node_counts=(3, 2), roll_s=1.0) as server,
        linked(server, key, 2) as (_, there),
        ThreadPoolExecutor(4) as pool,
    ):
        assert eventually(lambda: bool(there) and there[-1].nodes == (0, 2))
        joined = [pool.submit(meet, server.address, hello(rank, num_ranks=4), key) for rank in range(4)]
        assert all(len(each.result(5.0)) == 4 for each in joined)
        with pytest.raises(ValueError, match="an end of rank 4 of 4"):
            server.ended(4, 0)
