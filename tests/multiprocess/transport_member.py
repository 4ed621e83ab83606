"""A rank of a group of processes that send each other arrays: the main function of each, and how a test starts them."""

import asyncio
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

PATIENCE_S = 60.0
SHAPE = (8, 12)
SHARDINGS: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
    "replicated": ((4,), ()),
    "rows": ((4,), ("a",)),
    "columns": ((4,), (None, "a")),
    "rows by 2": ((2, 2), ("a",)),
    "columns by 2": ((2, 2), (None, "b")),
}
"""Grid and axes; over a unit of four devices."""


class Member:
    """One rank: a network, a transport, and what came."""

    def __init__(
        self, rank: int, num_ranks: int, key: str, selection: str, layout: dict[str, int], pipe: Connection
    ) -> None:
        from rrfp_jax.cluster import ClusterConfig, PeerAddress, PeerNetwork, RunKey
        from rrfp_jax.layout import Layout
        from rrfp_jax.runtime.transports.transfer import TransferServer

        self.rank, self.pipe, self.layout = rank, pipe, Layout(**layout, num_ranks=num_ranks)
        self.edges: dict[Any, Any] = {}
        self.came: SimpleQueue[Any] = SimpleQueue()
        self.network = PeerNetwork(
            rank=rank,
            num_ranks=num_ranks,
            key=RunKey.from_text(key),
            config=ClusterConfig(silence_deadline_s=PATIENCE_S),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        pipe.send(vars(self.network.address))
        addresses = {r: PeerAddress(**address) for r, address in enumerate(pipe.recv())}
        self.network.start(self._loop, addresses, lost=lambda *_: None)
        self.network.wait_connected(PATIENCE_S)
        self._server = TransferServer("127.0.0.1") if selection == "transfer" else None
        if self._server is not None:
            pipe.send(self._server.address)
            for other, address in enumerate(pipe.recv()):
                self._server.know(other, address)
        self.transport = self._make_transport()

    def _make_transport(self) -> Any:
        from rrfp_jax.runtime.transports import PipelineTransport
        from rrfp_jax.schedules import linear

        return PipelineTransport(
            layout=self.layout,
            placement=linear(self.layout.num_units),
            rank=self.rank,
            network=self.network,
            edge=lambda message, bucket: self.edges.get(message[:3]),
            deliver=lambda *delivery: self.came.put(delivery),
            failed=self.came.put,
            server=self._server,
            transfer_ranks=set(range(self.layout.num_ranks)) - {self.rank},
            eager_bytes=0,
        )

    def begin(self, message: Any, edge: Any) -> None:
        """Go on as another pipeline would, in which such messages have this edge."""
        self.transport.close()
        self.edges[message[:3]] = edge
        self.transport = self._make_transport()
        self.transport.prepare([message])

    def send(self, stage: int, payload: Any, message: Any, step: int = 0) -> None:
        staged = self.transport.send_array(payload, stage, message)
        self._loop.call_soon_threadsafe(self.transport.send, stage, step, message, staged)

    def next(self) -> Any:
        came = self.came.get(timeout=PATIENCE_S)
        if isinstance(came, Exception):
            raise came
        return came

    def close(self) -> None:
        self.transport.close()
        self.network.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


# -- units that span processes ---------------------------------------------------------------------------------------


def exchange(
    rank: int, num_ranks: int, key: str, coordinator: str, selections: tuple[str, ...], pipe: Connection
) -> None:
    """Two units of four devices, each on two of four ranks: send an array in every sharding to every other."""
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_ranks, rank)
    for selection in selections:
        member = Member(rank, num_ranks, key, selection, {"num_stages": 2, "tensor": 4}, pipe)
        pairs = [(source, target) for source in SHARDINGS for target in SHARDINGS]
        for step, (source, target) in enumerate(pairs):
            _exchange_one(member, source, target, step)
            pipe.send(f"{selection}: {source} to {target}")
        _exchange_plain_data(member)
        pipe.send("done")
        pipe.recv()
        member.close()


def _exchange_one(member: Member, source: str, target: str, step: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rrfp_jax.core import Message, MessageKind
    from rrfp_jax.runtime.transports import ArrayEdge

    array = np.arange(96, dtype=np.float32).reshape(SHAPE)
    payload = {"x": array, "flag": np.bool_(True), "none": None}
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), payload)
    ends = [
        {"x": _sharding(name, unit), "flag": _sharding("replicated", unit), "none": None}
        for unit, name in enumerate((source, target))
    ]
    message = Message(MessageKind.ACTIVATION, 0, 1, 3)
    member.begin(message, ArrayEdge(spec=spec, source=ends[0], target=ends[1]))
    member.pipe.send("ready")
    member.pipe.recv()
    unit = member.rank // 2
    wanted = ends[unit]["x"]
    if unit == 0:
        make = jax.jit(
            lambda: {"x": jnp.arange(96, dtype=jnp.float32).reshape(SHAPE), "flag": jnp.bool_(True), "none": None},
            out_shardings=ends[0],
        )
        member.send(1, make(), message, step)
        return
    stage, came_step, came_message, got = member.next()
    assert (stage, came_step, came_message) == (1, step, message)
    assert jax.tree.structure(got) == jax.tree.structure(payload)
    program = jax.jit(lambda tree: tree["x"] + tree["flag"], in_shardings=(ends[1],), out_shardings=wanted)
    result = program.lower(spec).compile()(got)
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index] + 1)


def _exchange_plain_data(member: Member) -> None:
    from rrfp_jax.core import Message, MessageKind

    report = Message(MessageKind.REPORT, 1, 0)
    if member.rank >= 2:
        member.send(0, [member.rank, None], report)
    else:
        assert member.next()[2:] == (report, [member.rank + 2, None])


def _sharding(name: str, unit: int) -> Any:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    grid, axes = SHARDINGS[name]
    devices = np.array(jax.devices()[4 * unit : 4 * unit + 4]).reshape(grid)
    return NamedSharding(Mesh(devices, ("a", "b")[: len(grid)]), PartitionSpec(*axes))


# -- a peer that dies ------------------------------------------------------------------------------------------------


def offer_and_never_serve(rank: int, num_ranks: int, key: str, _: str, __: Any, pipe: Connection) -> None:
    """Rank 0 announces an array that it does not hand out; rank 1 waits for it, and says what becomes of that."""
    import jax
    import numpy as np

    from rrfp_jax.core import Message, MessageKind
    from rrfp_jax.runtime.transports import ArrayEdge

    member = Member(rank, num_ranks, key, "transfer", {"num_stages": 2}, pipe)
    message = Message(MessageKind.ACTIVATION, 0, 1, 0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    value = jax.device_put(np.zeros(1 << 10, np.float32), jax.devices()[0])
    member.begin(message, ArrayEdge(spec=value, source=sharding, target=sharding))
    pipe.send("ready")
    pipe.recv()
    if rank == 0:
        served = member._server._server
        member._server._server = _Deaf()
        member.send(1, value, message)
        pipe.send("announced")
        pipe.recv()
        del served  # it had to live until here: connections end with their server
    try:
        member.next()
        pipe.send("arrived")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    member.close()


class _Deaf:
    """A transfer server that offers nothing."""

    def await_pull(self, number: int, arrays: Any) -> None: ...


# -- from outside ----------------------------------------------------------------------------------------------------


class Started:
    """Processes and the pipes to them."""

    def __init__(self, members: list[BaseProcess], pipes: list[Connection]) -> None:
        self.members, self.pipes = members, pipes

    def hear(self, rank: int, timeout_s: float = PATIENCE_S) -> Any:
        """What a rank says next; fails where it has died instead."""
        if not self.pipes[rank].poll(timeout_s):
            raise AssertionError(f"rank {rank} said nothing for {timeout_s} s")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.members[rank].join(PATIENCE_S)
            raise AssertionError(f"rank {rank} died, exit code {self.members[rank].exitcode}") from None

    def hear_all(self) -> list[Any]:
        return [self.hear(rank) for rank in range(len(self.pipes))]

    def tell_all(self, what: Any) -> None:
        for pipe in self.pipes:
            pipe.send(what)

    def introduce(self) -> None:
        """Tell everybody everybody's address."""
        self.tell_all(self.hear_all())


@contextmanager
def started(num_ranks: int, main: Any, selections: tuple[str, ...] = ()) -> Iterator[Started]:
    """Ranks in processes of their own; killed at the end."""
    from rrfp_jax.cluster import RunKey

    key, context = RunKey.generate().text(), multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    members: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, num_ranks, key, coordinator, selections, theirs)
            members.append(context.Process(target=main, args=arguments, daemon=True))
            members[-1].start()
            theirs.close()
            pipes.append(ours)
        yield Started(members, pipes)
    finally:
        for member in members:
            member.kill()
            member.join(PATIENCE_S)
        for pipe in pipes:
            pipe.close()
