"""Two processes that throw arrays to each other as two stages do, for measurements.

A compute thread ships an array, which leaves at once or by its event loop, as in a run; the other loop delivers it to
the other compute thread. Each process has the cores that it would have as a rank.
"""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

PATIENCE_S = 60.0

Way = tuple[str, bool]
"""Transport, and whether arrays are encrypted."""
Play = tuple[Sequence[int], "Callable[[Stage, Connection], None]"]
"""Sizes of the arrays, and a function that uses them."""
WAYS: tuple[Way, ...] = (("sockets", True), ("sockets", False), ("transfer", False))


def name_of(way: Way) -> str:
    """Returns the name of a way in a table."""
    return f"{way[0]}, {'encrypted' if way[1] else 'clear'}"


@contextmanager
def pair(way: Way, sizes: Sequence[int], main: Callable[["Stage", Connection], None]) -> Iterator[list[Connection]]:
    """Starts two processes that run ``main`` with a stage each; yields the pipes to them. They are killed at the end.

    Args:
        sizes: in bytes, of the arrays that can be thrown.
    """
    from rrfp_jax.cluster import RunKey

    key, context = RunKey.generate().text(), multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    members: list[Any] = []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            members.append(
                context.Process(target=_member, args=(rank, key, way, (tuple(sizes), main), theirs), daemon=True)
            )
            members[-1].start()
            theirs.close()
            pipes.append(ours)
        for _ in range(2 if way[0] == "transfer" else 1):  # of the ranks, and of their transfer servers
            addresses = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(addresses)
        yield pipes
    finally:
        for member in members:
            member.kill()


def _member(rank: int, key: str, way: Way, play: Play, pipe: Connection) -> None:
    from rrfp_jax.cluster.child_processes import rank_cores
    from rrfp_jax.cluster.child_script import bind_to_cores
    from rrfp_jax.cluster.loop_thread import LoopThread
    from rrfp_jax.commands.common.process import use_cpu

    if cores := rank_cores("cores", 2)[rank]:
        bind_to_cores(set(cores))
    use_cpu(1)
    from rrfp_jax.cluster import ClusterConfig, PeerAddress, PeerNetwork, RunKey

    selection, encrypt_arrays = way
    config = ClusterConfig(encrypt_arrays=encrypt_arrays)
    network = PeerNetwork(rank=rank, num_ranks=2, key=RunKey.from_text(key), config=config)
    pipe.send(vars(network.address))
    thread = LoopThread()
    addresses = {r: PeerAddress(**address) for r, address in enumerate(pipe.recv())}
    network.start(thread.loop, addresses, lost=lambda *_: None)
    network.wait_connected(PATIENCE_S)
    network.open_direct_connections([1 - rank])
    server = None
    if selection == "transfer":
        from rrfp_jax.runtime.transports.transfer import TransferServer

        server = TransferServer("127.0.0.1")
        pipe.send(server.address)
        for other, address in enumerate(pipe.recv()):
            server.know(other, address)
    stage = Stage(rank, network, server, thread.loop, play[0])
    play[1](stage, pipe)
    stage.transport.close()
    network.close()
    thread.close()


class Stage:
    """One of two stages, with a chunk for each size; its compute thread is the caller of its methods."""

    def __init__(
        self, rank: int, network: Any, server: Any, loop: asyncio.AbstractEventLoop, sizes: Sequence[int]
    ) -> None:
        import jax
        import numpy as np

        from rrfp_jax.core import Message, MessageKind
        from rrfp_jax.layout import Layout
        from rrfp_jax.runtime.transports import ArrayEdge, PipelineTransport
        from rrfp_jax.schedules import looped

        self.rank, self.network, self.loop = rank, network, loop
        self._came: SimpleQueue[Any] = SimpleQueue()
        device = jax.devices()[0]
        sharding = jax.sharding.SingleDeviceSharding(device)
        self.values = [jax.device_put(np.zeros(num_bytes // 4, np.float32), device) for num_bytes in sizes]
        edges = [ArrayEdge(spec=value, source=sharding, target=sharding) for value in self.values]
        self._messages = [
            Message(MessageKind.ACTIVATION, 2 * edge + rank, 2 * edge + 1 - rank, 0) for edge in range(len(edges))
        ]
        self.transport = PipelineTransport(
            layout=Layout(num_stages=2, num_ranks=2),
            placement=looped(2, len(edges)),
            rank=rank,
            network=network,
            edge=lambda message, bucket: edges[message.source // 2],
            deliver=lambda stage, step, message, payload: self._came.put(payload),
            failed=self._came.put,
            server=server,
            transfer_ranks={1 - rank},
            eager_bytes=0,
        )
        self.transport.prepare(
            [*self._messages, *(m._replace(source=m.target, target=m.source) for m in self._messages)]
        )

    def throw(self, edge: int, step: int) -> None:
        """Sends the array of a size to the other stage."""
        transport, message, unit = self.transport, self._messages[edge], 1 - self.rank
        staged = transport.send_array(self.values[edge], unit, message, step=step)
        transport.send(unit, step, message, staged)

    def catch(self) -> Any:
        """Returns the array that the other stage has thrown next."""
        came = self._came.get(timeout=PATIENCE_S)
        if isinstance(came, Exception):
            raise came
        return came
