"""What a message between two processes of this machine costs, by transport and size.

Two processes throw an array back and forth as two stages do: a compute thread ships it, its event loop sends it, the
other loop delivers it to the other compute thread, each process on the cores that it would have as a rank. *One way*
is half a round trip; *CPU* is the processor time of both processes, user and system, per message. Small arrays are sent
by ``transfer`` here too; in a run they go through sockets anyway.
"""

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.table import Table

SIZES = (("32 B", 32, 2000), ("64 KiB", 1 << 16, 1000), ("4 MiB", 1 << 22, 200))
"""Name, bytes and number of round trips."""
WAYS = (("sockets", True), ("sockets", False), ("transfer", False))
_WARM_UP = 50
_PATIENCE_S = 30.0

Figures = tuple[str, float, float]
"""Size, one way in us, processor time in us."""


def bench_transport(console: Console) -> None:
    """Print a table of times per message."""
    table = Table(title="two processes, one message at a time: us per message", title_justify="left")
    for heading in ("transport", "size", "one way", "CPU"):
        table.add_column(heading, justify="left" if heading == "transport" else "right")
    for selection, encrypt_arrays in WAYS:
        label = f"{selection}, encrypted" if encrypt_arrays else f"{selection}, clear"
        for size, one_way_us, cpu_us in measure(selection, encrypt_arrays=encrypt_arrays):
            table.add_row(label, size, f"{one_way_us:.0f}", f"{cpu_us:.0f}")
    console.print(table)


def measure(selection: str, *, encrypt_arrays: bool) -> list[Figures]:
    """The figures of every size."""
    from rrfp_jax.network import RunKey

    key, context = RunKey.generate().text(), multiprocessing.get_context("spawn")
    pipes, members = [], []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = (rank, key, selection, encrypt_arrays, theirs)
            members.append(context.Process(target=_member, args=arguments, daemon=True))
            members[-1].start()
            theirs.close()
            pipes.append(ours)
        addresses = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
        here, there = (pipe.recv() for pipe in pipes)
        for member in members:
            member.join(_PATIENCE_S)
    finally:
        for member in members:
            member.kill()
    return [
        (name, seconds * 1e6 / 2, (one + other) * 1e6 / 2)
        for (name, seconds, one), (_, _, other) in zip(here, there, strict=True)
    ]


def _member(rank: int, key: str, selection: str, encrypt_arrays: bool, pipe: Connection) -> None:
    """The main function of either process: report the address, play, report the figures."""
    from experiments.process import use_cpu
    from rrfp_jax.launch.binding import rank_cores
    from rrfp_jax.launch.tether import bind
    from rrfp_jax.network.loop_thread import LoopThread

    if cores := rank_cores("cores", 2)[rank]:
        bind(set(cores))
    use_cpu(1)
    from rrfp_jax.network import NetworkSettings, PeerAddress, PeerNetwork, RunKey

    settings = NetworkSettings(encrypt_arrays=encrypt_arrays)
    network = PeerNetwork(rank=rank, num_ranks=2, key=RunKey.from_text(key), settings=settings)
    pipe.send(network.address.as_dict())
    thread = LoopThread()
    addresses = {r: PeerAddress(**address) for r, address in enumerate(pipe.recv())}
    network.start(thread.loop, addresses, lost=lambda *_: None)
    network.wait_connected(_PATIENCE_S)
    server = None
    if selection == "transfer":
        from rrfp_jax.runtime.transports.transfer_server import TransferServer

        server = TransferServer(network, _PATIENCE_S)
    stage = _Stage(rank, network, server, thread.loop)
    pipe.send([(name, *stage.play(edge, num_rounds)) for edge, (name, _, num_rounds) in enumerate(SIZES)])
    stage.transport.close()
    network.close()
    thread.close()


class _Stage:
    """One of two stages, with a chunk for each size; its compute thread is the caller of :meth:`play`."""

    def __init__(self, rank: int, network: Any, server: Any, loop: asyncio.AbstractEventLoop) -> None:
        import jax
        import numpy as np

        from rrfp_jax.arbitration import Message, MessageKind
        from rrfp_jax.planning.layout import Layout
        from rrfp_jax.runtime.transports import Edge, PipelineTransport
        from rrfp_jax.tasks import looped

        self._rank, self._loop = rank, loop
        self._came: SimpleQueue[Any] = SimpleQueue()
        device = jax.devices()[0]
        sharding = jax.sharding.SingleDeviceSharding(device)
        self._values = [jax.device_put(np.zeros(num_bytes // 4, np.float32), device) for _, num_bytes, _ in SIZES]
        edges = [Edge(spec=value, source=sharding, target=sharding) for value in self._values]
        self._messages = [
            Message(MessageKind.ACTIVATION, 2 * edge + rank, 2 * edge + 1 - rank, 0) for edge in range(len(edges))
        ]
        self.transport = PipelineTransport(
            layout=Layout(num_stages=2, num_ranks=2),
            placement=looped(2, len(edges)),
            rank=rank,
            network=network,
            edge=lambda message: edges[message.source // 2],
            deliver=lambda stage, step, message, payload: self._came.put(payload),
            failed=self._came.put,
            server=server,
            eager_bytes=0,
        )
        self.transport.prepare(
            [*self._messages, *(m._replace(source=m.target, target=m.source) for m in self._messages)]
        )

    def play(self, edge: int, num_rounds: int) -> tuple[float, float]:
        """Seconds per round trip, and this process's processor seconds in one."""
        self._rounds(edge, _WARM_UP)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        self._rounds(edge, num_rounds)
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        return elapsed_s / num_rounds, cpu_s / num_rounds

    def _rounds(self, edge: int, num_rounds: int) -> None:
        for step in range(num_rounds):
            if self._rank == 0:
                self._throw(edge, step)
                self._catch()
            else:
                self._catch()
                self._throw(edge, step)

    def _throw(self, edge: int, step: int) -> None:
        transport, message, unit = self.transport, self._messages[edge], 1 - self._rank
        shipped = transport.ship(self._values[edge], unit, message)
        self._loop.call_soon_threadsafe(transport.send, unit, step, message, shipped)

    def _catch(self) -> None:
        came = self._came.get(timeout=_PATIENCE_S)
        if isinstance(came, Exception):
            raise came
