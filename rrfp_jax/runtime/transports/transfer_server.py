"""This process's transfer server, its connections to those of others, and whether they work; pipelines come and go.

Transfer servers prove nothing and encrypt nothing: whoever can reach their port can fetch what is offered.

This is the only module that uses ``jax.experimental.transfer``.
"""

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer

_PROBE_BYTES = 1 << 18
_CHUNK_BYTES, _NUM_COPIES, _NUM_STREAMS = 8 << 20, 8, 4
"""How arrays are cut on the way, how many chunks are under way at a time, and over how many connections to a peer. An
array goes faster in chunks that are smaller than it is: one is copied while another is in the network."""
LOCKED_BYTES = 3 * _NUM_COPIES * _CHUNK_BYTES
"""Host memory that a server allocates, and locks where devices copy to and from it by themselves: JAX takes the chunks
once for what is received and twice for what is copied from devices. With JAX's own chunks of 256 MiB it is 6 GiB."""


class TransferServer:
    """Listens from the start, on ``interface``, until :meth:`close`; to be made when JAX has started."""

    def __init__(self, interface: str) -> None:
        self._connecting = threading.Lock()
        self._addresses: dict[int, str] = {}
        self._connections: dict[int, Any] = {}
        self._numbers = itertools.count()
        client = jax.local_devices()[0].client
        self._server: Any = transfer.start_transfer_server(
            client,
            f"{interface}:0",
            [f"{interface}:0"] * _NUM_STREAMS,
            max_num_parallel_copies=_NUM_COPIES,
            transfer_size=_CHUNK_BYTES,
        )
        self.address: str = self._server.address()

    def close(self) -> None:
        """Stop listening and free the memory, once peers have fetched what they have begun to; from then on nothing
        can be offered or fetched. May be called again."""
        with self._connecting:
            self._connections.clear()
            self._server = None  # JAX's server ends with the last reference to it

    def know(self, rank: int, address: str) -> None:
        """Where another rank's server is; from any thread."""
        self._addresses[rank] = address

    def number(self) -> int:
        """A number that no offer of this process has had; from any thread."""
        return next(self._numbers)

    def offer(self, number: int, arrays: Sequence[Any]) -> None:
        """Let a peer fetch arrays under a number, once; they must live until it has."""
        self._server.await_pull(number, arrays)

    def pull(self, rank: int, number: int, specs: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """Fetch what a peer offers; the arrays are ready once all of it is here."""
        pieces: list[Any] = self._connection(rank).pull(number, specs)
        return pieces

    def _connection(self, rank: int) -> Any:
        with self._connecting:
            if rank not in self._connections:
                self._connections[rank] = self._server.connect(self._addresses[rank])
            return self._connections[rank]


class ServerProbe:
    """See :class:`~rrfp_jax.runtime.transports.probing.Probe`; on a device of this process."""

    def __init__(self, server: TransferServer, rank: int, device: jax.Device) -> None:
        self._server, self._device, self._rank = server, device, rank
        self._offered: list[Any] = []
        self.address = server.address

    def offer(self, rank: int) -> int:  # noqa: ARG002 - all are offered the same
        array, number = jax.device_put(_pattern(self._rank), self._device), self._server.number()
        self._offered.append(array)
        self._server.offer(number, [array])
        return number

    def fetch(self, rank: int, address: str, number: int) -> None:
        self._server.know(rank, address)
        wanted = _pattern(rank)
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        (came,) = self._server.pull(rank, number, [jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=sharding)])
        if not np.array_equal(np.asarray(came), wanted):
            raise ValueError("other bytes came than were offered")


def _pattern(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, _PROBE_BYTES, np.uint8)
