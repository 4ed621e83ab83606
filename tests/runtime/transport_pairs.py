"""Ranks of a run within the test's process: a transport and a network each, on one event loop and eight devices."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rrfp_jax.cluster import ClusterConfig, PeerNetwork, RunKey
from rrfp_jax.core import Message, MessageKind
from rrfp_jax.layout import Layout
from rrfp_jax.runtime.transports import ArrayEdge, PipelineTransport
from rrfp_jax.runtime.transports.transfer import TransferServer
from rrfp_jax.schedules import linear
from tests.cluster.mesh import running_loop

PATIENCE_S = 20.0
ACTIVATION = Message(MessageKind.ACTIVATION, 0, 1, 3)
Delivery = tuple[int, int, Message, Any]


def unit_sharding(devices: list[jax.Device], *axes: str | None) -> Sharding:
    """A sharding over a unit's devices along the named dimensions; over one device a single-device sharding."""
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(Mesh(np.array(devices), ("tensor",)), PartitionSpec(*axes))


def spec_of(payload: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), payload)


class Rank:
    """A transport and what was delivered to it."""

    def __init__(
        self,
        network: PeerNetwork | None,
        layout: Layout,
        rank: int,
        edges: Mapping[Any, ArrayEdge],
        server: TransferServer | None,
        eager_bytes: int,
    ) -> None:
        self.delivered: SimpleQueue[Delivery] = SimpleQueue()
        self.failures: SimpleQueue[Exception] = SimpleQueue()
        self.network = network
        self._make = partial(
            PipelineTransport,
            layout=layout,
            placement=linear(layout.num_units),
            rank=rank,
            network=network,
            edge=lambda message, bucket: edges.get(message[:3]),
            deliver=lambda *delivery: self.delivered.put(delivery),
            failed=self.failures.put,
            server=server,
            transfer_ranks=set(range(layout.num_ranks)) - {rank},
            eager_bytes=eager_bytes,
        )
        self.transport = self._make()

    def renew(self) -> None:
        """Go on as another pipeline would."""
        self.transport.close()
        self.transport = self._make()

    def next(self) -> Delivery:
        return self.delivered.get(timeout=PATIENCE_S)

    def none_came(self, seconds: float = 0.1) -> bool:
        try:
            self.delivered.get(timeout=seconds)
        except Empty:
            return True
        return False


class Ranks:
    """Ranks that reach each other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ranks: list[Rank]) -> None:
        self._loop, self.ranks = loop, ranks

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def on_loop(self, call: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def send(self, rank: int, stage: int, payload: Any, message: Message = ACTIVATION, step: int = 0) -> None:
        """Stage and send, as the runtime does."""
        transport = self.ranks[rank].transport
        staged = transport.send_array(payload, stage, message)
        self.on_loop(lambda: transport.send(stage, step, message, staged))


def introduce(servers: Sequence[TransferServer | None]) -> None:
    """Tell transfer servers of each other."""
    for server in servers:
        for rank, other in enumerate(servers):
            if server is not None and other is not None and other is not server:
                server.know(rank, other.address)


@contextmanager
def connected(
    layout: Layout, edges: Mapping[Any, ArrayEdge], selection: str = "auto", *, eager_bytes: int = 0, **settings: Any
) -> Iterator[Ranks]:
    """The ranks of a layout; ``edges`` by (kind, source, target). By default nothing small takes another way."""
    key = RunKey.generate()
    made = ClusterConfig(**{"silence_deadline_s": 20.0} | settings)
    count = layout.num_ranks
    networks = [PeerNetwork(rank=r, num_ranks=count, key=key, config=made) for r in range(count)] if count > 1 else []
    ranks: list[Rank] = []
    with running_loop() as loop:
        try:
            for network in networks:
                network.start(loop, {n.rank: n.address for n in networks}, lost=lambda rank, why: None)
            for network in networks:
                network.wait_connected(PATIENCE_S)
            servers: list[TransferServer | None] = [None] * count
            if selection == "transfer":
                servers = [TransferServer("127.0.0.1") for _ in networks]
                introduce(servers)
            for r, server in enumerate(servers):
                ranks.append(Rank(networks[r] if networks else None, layout, r, edges, server, eager_bytes))
            yield Ranks(loop, ranks)
        finally:
            for rank in ranks:
                rank.transport.close()
            for network in networks:
                network.close()
