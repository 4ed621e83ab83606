"""This process's transfer server and its connections to those of all others; pipelines come and go, it stays.

Transfer servers prove nothing and encrypt nothing: whoever can reach their port can fetch what is offered.

This is the only module that uses ``jax.experimental.transfer``.
"""

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import transfer

from rrfp_jax.network import PeerNetwork
from rrfp_jax.network.plain import field
from rrfp_jax.waiting import wait_for

_ADDRESS = "transfer-address"


class TransferServer:
    """Made in all processes together, when network and JAX have started, and not on the event loop.

    Raises ConnectionError where a rank's address does not come within ``timeout_s``.
    """

    def __init__(self, network: PeerNetwork, timeout_s: float) -> None:
        self._others = [rank for rank in range(network.num_ranks) if rank != network.rank]
        self._addresses: dict[int, str] = {}
        self._all_known = threading.Event()
        self._connecting = threading.Lock()
        self._connections: dict[int, Any] = {}
        self._numbers = itertools.count()
        interface = network.address.messages.removeprefix("tcp://").rpartition(":")[0]
        client = jax.local_devices()[0].client
        self._server: Any = transfer.start_transfer_server(client, f"{interface}:0", [f"{interface}:0"])
        network.subscribe(_ADDRESS, self._receive_address)
        for rank in self._others:
            network.send_threadsafe(rank, _ADDRESS, {_ADDRESS: self._server.address()})
        if self._others and not wait_for(self._all_known, timeout_s):
            missing = sorted(set(self._others) - self._addresses.keys())
            raise ConnectionError(f"no transfer server's address came from ranks {missing} within {timeout_s} s")
        for rank in self._others:
            self._connection(rank)

    def number(self) -> int:
        """A number that no offer of this process has had; from any thread."""
        return next(self._numbers)

    def offer(self, number: int, arrays: Sequence[Any]) -> None:
        """Let a peer fetch arrays under a number, once; they must live until it has."""
        self._server.await_pull(number, arrays)

    def pull(self, rank: int, number: int, specs: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """Fetch what a peer offers; waits until all of it is here."""
        pieces: list[Any] = self._connection(rank).pull(number, specs)
        for piece in pieces:
            piece.block_until_ready()
        return pieces

    def _connection(self, rank: int) -> Any:
        with self._connecting:
            if rank not in self._connections:
                self._connections[rank] = self._server.connect(self._addresses[rank])
            return self._connections[rank]

    def _receive_address(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:  # noqa: ARG002
        self._addresses[sender] = field(header, _ADDRESS, str)
        if len(self._addresses) == len(self._others):
            self._all_known.set()
