"""How two ranks make connections of their own between them, such as those over which arrays travel.

The lower one listens, and invites the other over the network on which both are proven: it tells its port and, for each
connection, a name and a secret, both random. The other one connects and shows the name and that it has the secret, and
the lower one shows it too. So who may speak is known as surely as on the network itself, and every connection has keys
of its own, which nobody learns who learns the run key later.

The lower one listens at a local socket as well, under a random name that nobody can have on another host, nor see from
another network namespace. Who finds it there connects to it: within a host it carries more than twice what TCP does.

A stranger who reaches the port is read a few bytes of, and only for a moment.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple

from rrfp_jax.network.descriptors import unproven_allowed
from rrfp_jax.network.lane import Proven
from rrfp_jax.network.plain import MalformedMessage, field
from rrfp_jax.network.sealing import SECRET_BYTES, TAG_BYTES, Seal
from rrfp_jax.network.sockets import QuietLog

_LOG = logging.getLogger(__name__)
_NAME_BYTES = 16
_PROOF_BYTES = _NAME_BYTES + TAG_BYTES
"""The name, sealed."""
_MAX_CONNECTIONS = 64
_MAX_UNPROVEN = 64
"""Largest number of open connections that have not proven themselves; the oldest makes room for one more."""
_PROOF_S = 10.0
_CONNECT_S = 30.0
_RETRY_S = 0.05
_LOCAL_BUFFER_BYTES = 1 << 20
"""Of the system, for a connection within a host: what fits into its cores' caches, where the system would take some
megabytes, as it should between hosts."""
_WANTED, _PORT, _LOCAL, _NAMES, _SECRETS, _ENCRYPTS = "wanted", "port", "local", "names", "secrets", "encrypts"


@dataclass(frozen=True)
class _Expected:
    rank: int
    index: int
    secret: bytes


class _Place(NamedTuple):
    """Where a rank listens."""

    local: bytes
    """The name of its local socket; empty where it has none."""
    remote: tuple[str, int]


class LaneMeeting:
    """Makes connections; on the event loop.

    Args:
        purpose: what the connections are for, in messages.
        host: where to listen.
        num_connections: to each rank.
        encrypts: whether arrays are sealed, in which both ends must agree.
        tell: sends a dict to a rank, whose meeting receives it.
        made: called with a rank and all connections to it.
        failed: called with a rank that cannot be connected to, and why.
    """

    def __init__(
        self,
        purpose: str,
        rank: int,
        host: str,
        *,
        num_connections: int,
        encrypts: bool,
        tell: Callable[[int, dict[str, Any]], None],
        made: Callable[[int, list[Proven]], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self._rank, self._host, self._encrypts = rank, host.strip("[]"), encrypts
        self._purpose, self._num_connections = purpose, num_connections
        self._num_wanted: dict[int, int] = {}
        self._tell, self._made, self._failed = tell, made, failed
        self._listener: socket.socket | None = None
        self._local: socket.socket | None = None
        self._wanted: set[int] = set()
        self._expected: dict[bytes, _Expected] = {}
        self._proven: dict[int, dict[int, Proven]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._max_unproven = min(_MAX_UNPROVEN, unproven_allowed(num_connections))
        self._garbage = QuietLog(_LOG)

    def want(self, rank: int) -> None:
        """Have connections to a rank made, once."""
        if rank in self._wanted:
            return
        self._wanted.add(rank)
        if self._rank < rank:
            self._invite(rank)
        else:
            self._tell(rank, {_WANTED: True})

    def receive(self, rank: int, header: dict[str, Any], host: str) -> None:
        """What another rank's meeting tells; ``host`` is where that rank listens. Raises MalformedMessage."""
        if header.get(_WANTED) is True and self._rank < rank:
            self.want(rank)
            return
        port, names, keys = field(header, _PORT, int), field(header, _NAMES, list), field(header, _SECRETS, list)
        are_right = all(isinstance(each, bytes) and len(each) == _NAME_BYTES for each in names)
        are_right &= all(isinstance(each, bytes) and len(each) == SECRET_BYTES for each in keys)
        is_new = rank < self._rank and rank not in self._proven
        if not (is_new and are_right and 0 < len(names) == len(keys) <= _MAX_CONNECTIONS and 0 < port < 1 << 16):
            raise MalformedMessage(f"rank {rank} invites to connections that cannot be")
        local = field(header, _LOCAL, bytes)
        self._wanted.add(rank)
        self._proven[rank], self._num_wanted[rank] = {}, len(names)
        if field(header, _ENCRYPTS, bool) != self._encrypts:
            self._failed(rank, "it differs in encrypt_arrays: give all ranks the same settings")
            return
        place = _Place(local, (host.strip("[]"), port))
        self._spawn(self._accept_invitation(rank, place, [*zip(names, keys, strict=True)]))

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop to listen, and drop what is not made yet; ``loop`` may be closed."""
        for task in [] if loop.is_closed() else [*self._tasks]:
            task.cancel()
        for listener in filter(None, (self._listener, self._local)):
            listener.close()
        for rank, made in self._proven.items():
            if len(made) < self._num_wanted[rank]:
                for proven in made.values():
                    proven.connection.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- the lower rank ----------------------------------------------------------------------------------------------

    def _invite(self, rank: int) -> None:
        if self._listener is None:
            self._listener, self._local = _listen(self._host), _listen_locally()
            for listener in filter(None, (self._listener, self._local)):
                self._spawn(self._accept(listener))
        self._proven[rank], self._num_wanted[rank] = {}, self._num_connections
        names, keys = [], []
        for index in range(self._num_connections):
            names.append(secrets.token_bytes(_NAME_BYTES))
            keys.append(secrets.token_bytes(SECRET_BYTES))
            self._expected[names[-1]] = _Expected(rank, index, keys[-1])
        port, local = self._listener.getsockname()[1], self._local.getsockname() if self._local else b""
        self._tell(rank, {_PORT: port, _LOCAL: local, _NAMES: names, _SECRETS: keys, _ENCRYPTS: self._encrypts})

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # the stranger has gone again, or no more files may be open
                self._garbage.warn("a connection for %s could not be accepted: %s", self._purpose, error)
                await asyncio.sleep(_RETRY_S)
                continue
            task = self._spawn(self._admit(connection))
            self._unproven[task] = None
            task.add_done_callback(lambda task: self._unproven.pop(task, None))
            if len(self._unproven) > self._max_unproven:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            await asyncio.sleep(0)  # where many come at once, accepting never waits

    async def _admit(self, connection: socket.socket) -> None:
        """Let a connection in that proves itself; any other is closed without an answer."""
        try:
            connection.setblocking(False)
            async with asyncio.timeout(_PROOF_S):
                expected, proven = await self._prove(connection)
        except (OSError, TimeoutError, MalformedMessage) as error:
            self._garbage.warn("a connection for %s was refused: %s", self._purpose, str(error) or "it said nothing")
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            self._add(expected.rank, expected.index, proven)

    async def _prove(self, connection: socket.socket) -> tuple[_Expected, Proven]:
        said = await _read(connection, _NAME_BYTES + _PROOF_BYTES)
        name = said[:_NAME_BYTES]
        expected = self._expected.get(name)
        if expected is None:
            raise MalformedMessage("nobody was invited under its name")
        proven = self._ready(connection, expected.secret, expected.rank)
        if proven.incoming.opened(said[_NAME_BYTES:]) != name:
            raise MalformedMessage("its name is not what it has sealed")
        if self._expected.pop(name, None) is None:
            raise MalformedMessage("another connection has come under its name")
        await asyncio.get_running_loop().sock_sendall(connection, proven.outgoing.closed(name))
        return expected, proven

    # -- the higher rank ---------------------------------------------------------------------------------------------

    async def _accept_invitation(self, rank: int, place: _Place, invited: list[tuple[bytes, bytes]]) -> None:
        for index, (name, secret) in enumerate(invited):
            try:
                async with asyncio.timeout(_CONNECT_S):
                    proven = await self._connect(rank, place, name, secret)
            except (OSError, TimeoutError, MalformedMessage) as error:
                why = str(error) or f"nobody answered within {_CONNECT_S:g} s"
                host, port = place.remote
                self._failed(rank, f"no connection for {self._purpose} to {host}:{port}: {why}")
                return
            self._add(rank, index, proven)

    async def _connect(self, rank: int, place: _Place, name: bytes, secret: bytes) -> Proven:
        loop = asyncio.get_running_loop()
        connection = _connected_locally(place.local) or socket.socket(_family(place.remote[0]), socket.SOCK_STREAM)
        try:
            if connection.family != socket.AF_UNIX:
                connection.setblocking(False)
                await loop.sock_connect(connection, place.remote)
            proven = self._ready(connection, secret, rank)
            await loop.sock_sendall(connection, name + proven.outgoing.closed(name))
            if proven.incoming.opened(await _read(connection, _PROOF_BYTES)) != name:
                raise MalformedMessage("who listens there does not know the secret")
        except BaseException:
            connection.close()
            raise
        return proven

    # -- both --------------------------------------------------------------------------------------------------------

    def _ready(self, connection: socket.socket, secret: bytes, other: int) -> Proven:
        is_local = connection.family == socket.AF_UNIX
        if not is_local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_local or connection.getpeername()[0] == connection.getsockname()[0]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOCAL_BUFFER_BYTES)
        return Proven(connection, Seal(secret, self._rank), Seal(secret, other))

    def _add(self, rank: int, index: int, proven: Proven) -> None:
        made = self._proven[rank]
        made[index] = proven
        if len(made) == self._num_wanted[rank]:
            for each in made.values():
                each.connection.setblocking(True)
            self._made(rank, [made[index] for index in sorted(made)])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _listen(host: str) -> socket.socket:
    listener = socket.create_server((host, 0), family=_family(host), backlog=_MAX_UNPROVEN)
    listener.setblocking(False)
    return listener


def _listen_locally() -> socket.socket | None:
    """Under a name in no folder, which goes with the socket; None where the system has or allows no such thing."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        listener.bind(b"\0rrfp-" + secrets.token_hex(_NAME_BYTES).encode())
        listener.listen(_MAX_UNPROVEN)
    except OSError:
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def _connected_locally(name: bytes) -> socket.socket | None:
    """A connection to who listens there; None where nobody does, or too many ask at once."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    connection.setblocking(False)
    try:
        connection.connect(name)
    except OSError:
        connection.close()
        return None
    return connection


async def _read(connection: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            raise MalformedMessage("it ended before it had proven itself")
        data += more
    return data
