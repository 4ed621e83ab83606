"""The rendezvous over sockets: everyone gets the same answer, within the deadline."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from rrfp_jax.runtime.network import (
    ExitWatch,
    Hello,
    Member,
    NetworkSettings,
    PeerAddress,
    RendezvousFailed,
    RendezvousServer,
    RunKey,
    meet,
    report_exit,
)
from tests.runtime.network.mesh import Node, eventually, running_loop


def hello(rank: int, num_ranks: int = 3, *, pid: int = 1, address: dict[str, str] | None = None, **more: Any) -> Hello:
    member = Member(rank=rank, host="here", pid=pid, address=address or {}, offers={"coordinator": f"10.0.0.{rank}:1"})
    return Hello.of(member, num_ranks, {"seed": 0} | more)


@contextmanager
def rendezvous(num_ranks: int = 3, **options: Any) -> Iterator[tuple[RendezvousServer, Callable[..., Any]]]:
    """A server, and what comes to it: ``visit(hello)`` is a future of the members."""
    key = RunKey.generate()
    server = RendezvousServer(num_ranks, key, **{"deadline_s": 5.0} | options)
    with server, ThreadPoolExecutor(8) as pool:
        yield server, lambda said, k=key, **o: pool.submit(meet, server.address, said, k, **o)


def test_everyone_learns_everyones_address() -> None:
    with rendezvous() as (server, visit):
        visits = [visit(hello(rank, address={"messages": f"tcp://10.0.0.{rank}:9"})) for rank in (2, 0, 1)]
        members = server.wait(5.0)
        assert [member.address["messages"] for member in members] == [f"tcp://10.0.0.{r}:9" for r in range(3)]
        assert members[2].offers == {"coordinator": "10.0.0.2:1"}
        assert all(future.result(5.0) == members for future in visits)


def test_everyone_learns_who_is_missing() -> None:
    with rendezvous(deadline_s=0.6) as (server, visit):
        started_s = time.monotonic()
        visits = [visit(hello(rank)) for rank in (0, 2)]
        for future in visits:
            with pytest.raises(RendezvousFailed, match=r"not complete after 0.6 s\n  missing: rank 1"):
                future.result(5.0)
        with pytest.raises(RendezvousFailed, match="missing: rank 1"):
            server.wait(1.0)
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
    with rendezvous() as (server, visit):
        visits = [visit(hello(rank)) for rank in (0, 1)]
        time.sleep(0.3)
        with pytest.raises(RendezvousFailed, match=r"rank 1 was started twice: .* pid 1 on host here, this is pid 2"):
            visit(hello(1, pid=2)).result(5.0)
        with pytest.raises(RendezvousFailed, match=r"rank 3 .* is out of range: this run has 3 ranks"):
            visit(hello(3)).result(5.0)
        visits.append(visit(hello(2)))
        assert len(server.wait(5.0)) == 3
        assert all(len(future.result(5.0)) == 3 for future in visits)


def test_an_exit_ends_the_waiting_at_once() -> None:
    with rendezvous(deadline_s=30.0) as (server, visit):
        waiting = visit(hello(0))
        time.sleep(0.2)
        server.exited(2, 1)
        with pytest.raises(RendezvousFailed, match="rank 2 ended with code 1 before all ranks had come"):
            waiting.result(2.0)


def test_a_launcher_that_ends_releases_those_who_wait() -> None:
    with rendezvous(deadline_s=30.0) as (server, visit):
        waiting = visit(hello(0))
        time.sleep(0.2)
        server.close()
        with pytest.raises(RendezvousFailed, match="the launcher has ended the run"):
            waiting.result(2.0)
        with pytest.raises(RendezvousFailed, match="the launcher has ended"):
            server.wait(1.0)
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
    with pytest.raises(RendezvousFailed, match=r"did not take the exit of rank 0 in 0.3 s"):
        report_exit(address, 0, 1, RunKey.generate(), deadline_s=0.3)


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


def test_supervisors_learn_of_exits_early_and_late() -> None:
    key, told = RunKey.generate(), threading.Event()
    early: list[tuple[int, int]] = []
    late: list[tuple[int, int]] = []
    here: list[tuple[int, int]] = []
    with RendezvousServer(3, key, on_exit=lambda *exit_: here.append(exit_)) as server:
        watch = ExitWatch(server.address, key, lambda *exit_: (early.append(exit_), told.set()))
        server.exited(0, -9)
        assert told.wait(5.0)
        report_exit(server.address, 2, 17, key)
        report_exit(server.address, 2, 17, key)
        assert eventually(lambda: early == [(0, -9), (2, 17)])
        second = ExitWatch(server.address, key, lambda *exit_: late.append(exit_))
        assert eventually(lambda: sorted(late) == [(0, -9), (2, 17)])
        assert here == early
        assert server.exits() == {0: -9, 2: 17}
        with pytest.raises(ValueError, match="an exit of rank 3 of 3"):
            server.exited(3, 0)
        watch.close()
        second.close()


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
    members = [Node(rank, num_ranks, key, NetworkSettings()) for rank in range(num_ranks)]
    with RendezvousServer(num_ranks, key) as server, ThreadPoolExecutor(3) as pool, running_loop() as loop:

        def enter(node: Node) -> None:
            said = hello(node.network.rank, num_ranks, address=node.network.address.as_dict())
            book = meet(server.address, said, key)
            node.start(loop, {member.rank: PeerAddress(**member.address) for member in book})
            node.network.wait_connected(5.0)
            node.network.send_threadsafe((node.network.rank + 1) % num_ranks, "note", {"from": node.network.rank})

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
    with pytest.raises(TimeoutError), RendezvousServer(1, RunKey.generate()) as server:
        server.wait(0.05)
