"""A rank's own connections beside ZeroMQ's: how they come about, are proven, and what follows when one ends.

There are two kinds: several connections for large arrays, served by threads, and one for small messages, served by the
event loop. Both are made in the same handshake:

1. The lower of two ranks listens, and invites the other over the network on which both are proven. The invitation has
   the port and, for each connection, a random name and a random secret.
2. The higher rank connects, and shows the name and that it has the secret. The lower rank shows it too.

So the speaker is known as surely as on the network itself, and every connection has keys of its own, which stay unknown
to anybody who learns the run key later.

The lower rank listens at a local socket as well, under a random name that no process has on another host, nor sees from
another network namespace. A rank that finds it there connects to it: within a host it carries more than twice as much
as TCP. From a stranger who reaches the port, a few bytes are read, and only for a moment.
"""

import asyncio
import logging
import secrets
import socket
from abc import abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from rrfp_jax.cluster._channel import Channel, DeliverMessage, MessageLink
from rrfp_jax.cluster._zmq_sockets import QuietLog
from rrfp_jax.cluster.config import NetworkSettings
from rrfp_jax.cluster.host import unproven_allowed
from rrfp_jax.cluster.wire import SECRET_BYTES, TAG_BYTES, MalformedMessage, Seal, field

_LOG = logging.getLogger(__name__)
NUM_LISTENERS = 2
"""Descriptors that one purpose needs beside its connections: a TCP and a local socket that listen."""
_NAME_BYTES = 16
_PROOF_BYTES = _NAME_BYTES + TAG_BYTES
"""Size of the sealed name."""
_MAX_CONNECTIONS = 64
_MAX_UNPROVEN = 64
"""Largest number of open connections that have not proven themselves; the oldest makes way for one more."""
_PROOF_S = 10.0
_CONNECT_S = 30.0
_RETRY_S = 0.05
_LOCAL_BUFFER_BYTES = 1 << 20
"""Size of the system's buffers for a connection within a host: they fit into the cores' caches. The system itself would
take some megabytes, which is right between hosts only."""
_WANTED, _PORT, _LOCAL, _NAMES, _SECRETS, _ENCRYPTS = "wanted", "port", "local", "names", "secrets", "encrypts"


class ProvenConnection(NamedTuple):
    """A connection to a rank that has proven itself: a blocking socket, and the seals of both directions."""

    socket: socket.socket
    outgoing: Seal
    incoming: Seal


class _Invited(NamedTuple):
    """A connection that this rank has invited another to make."""

    rank: int
    number: int
    secret: bytes


class PrivateLink(MessageLink):
    """A link over private connections. It needs no addresses: :meth:`open` brings connections that are proven."""

    @abstractmethod
    def open(self, rank: int, connections: Sequence[ProvenConnection]) -> None:
        """Begins to exchange messages with a rank over these connections."""

    @abstractmethod
    def join(self) -> None:
        """Ends all connections; called after ``close``, on any thread."""


class PrivateConnections:
    """The private connections of one kind, to all ranks. Used on the event loop, except for :meth:`join`.

    Args:
        purpose: the use of the connections, in messages.
        host: the address to listen on.
        num_connections: number of connections to each rank.
        make_link: makes the link. Its argument may be called on any thread when a connection to a rank has ended.
        tell: sends a dict to a rank, whose :meth:`receive` gets it.
        suspect: called with a rank that has ended a connection.
        failed: called with a rank that cannot be reached, and the reason.
    """

    def __init__(
        self,
        purpose: str,
        rank: int,
        host: str,
        settings: NetworkSettings,
        *,
        num_connections: int,
        make_link: Callable[[Callable[[int, str], None]], PrivateLink],
        loop: AbstractEventLoop,
        deliver: DeliverMessage,
        tell: Callable[[int, dict[str, Any]], None],
        suspect: Callable[[int], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self._purpose, self._rank, self._host, self._loop = purpose, rank, host.strip("[]"), loop
        self._num_connections, self._encrypts = num_connections, settings.encrypt_arrays
        self._tell, self._suspect, self._failed = tell, suspect, failed
        self._link = make_link(self._broke)
        self.channel = Channel(self._link, loop, deliver, settings.high_water_bytes)
        self._ranks: set[int] = set()
        """Ranks that messages may be sent to, over connections that stand or are being made."""
        self._asked: set[int] = set()
        self._listener: socket.socket | None = None
        self._local: socket.socket | None = None
        self._invited: dict[bytes, _Invited] = {}
        self._num_wanted: dict[int, int] = {}
        self._made: dict[int, dict[int, ProvenConnection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._max_unproven = min(_MAX_UNPROVEN, unproven_allowed(num_connections))
        self._garbage = QuietLog(_LOG)
        self._is_closed = False

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def want(self, rank: int) -> None:
        """Has connections to and from a rank made, once."""
        if rank not in self._ranks and not self._is_closed:
            self._add_rank(rank)
            self._ask(rank)

    def receive(self, rank: int, header: dict[str, Any], host: str) -> None:
        """Handles the dict that another rank tells; ``host`` is where that rank listens. Raises MalformedMessage."""
        if self._is_closed:
            return
        # The other rank may send as soon as its side stands, so this side expects its messages from now on.
        self._add_rank(rank)
        if header.get(_WANTED) is True and self._rank < rank:
            self._ask(rank)
            return
        port, names, keys = field(header, _PORT, int), field(header, _NAMES, list), field(header, _SECRETS, list)
        are_right = all(isinstance(each, bytes) and len(each) == _NAME_BYTES for each in names)
        are_right &= all(isinstance(each, bytes) and len(each) == SECRET_BYTES for each in keys)
        # Only the lower rank invites, and once: another invitation would replace connections that stand.
        is_new = rank < self._rank and rank not in self._made
        if not (is_new and are_right and 0 < len(names) == len(keys) <= _MAX_CONNECTIONS and 0 < port < 1 << 16):
            raise MalformedMessage(f"rank {rank} invites to connections that cannot be")
        local = field(header, _LOCAL, bytes)
        self._asked.add(rank)
        self._made[rank], self._num_wanted[rank] = {}, len(names)
        if field(header, _ENCRYPTS, bool) != self._encrypts:
            self._failed(rank, "it differs in encrypt_arrays: give all ranks the same settings")
            return
        self._spawn(self._accept_invitation(rank, local, (host.strip("[]"), port), [*zip(names, keys, strict=True)]))

    def drop(self, rank: int, *, has_left: bool) -> None:
        """Ends the connections to a rank that is gone."""
        self.channel.drop(rank, has_left=has_left)

    def close(self, linger_s: float) -> None:
        """Makes no more connections, and sends nothing new. The event loop may be closed."""
        self._is_closed = True
        for task in [] if self._loop.is_closed() else [*self._tasks]:
            task.cancel()
        for listener in filter(None, (self._listener, self._local)):
            listener.close()
        for rank, made in self._made.items():
            if len(made) < self._num_wanted[rank]:
                for proven in made.values():
                    proven.socket.close()
        self.channel.close(linger_s)

    def join(self) -> None:
        """Ends the connections; called after :meth:`close`, on any thread, when their other ends have been told."""
        self._link.join()

    def _add_rank(self, rank: int) -> None:
        self.channel.add(rank, "")
        self._ranks.add(rank)  # last: from now on other threads may send there

    def _ask(self, rank: int) -> None:
        if rank not in self._asked:
            self._asked.add(rank)
            # One side invites, so that two ranks that ask at the same time do not make connections twice.
            if self._rank < rank:
                self._invite(rank)
            else:
                self._tell(rank, {_WANTED: True})

    def _broke(self, rank: int, why: str) -> None:
        # Called on the thread of a connection.
        with suppress(RuntimeError):  # the loop was closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._broken, rank, why)

    def _broken(self, rank: int, why: str) -> None:
        if not self._is_closed:
            _LOG.debug("rank %d: a connection for %s with rank %d ended: %s", self._rank, self._purpose, rank, why)
            self._suspect(rank)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _ready(self, connection: socket.socket, secret: bytes, other: int) -> ProvenConnection:
        is_local = connection.family == socket.AF_UNIX
        if not is_local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_local or connection.getpeername()[0] == connection.getsockname()[0]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOCAL_BUFFER_BYTES)
        return ProvenConnection(connection, Seal(secret, self._rank), Seal(secret, other))

    def _add_connection(self, rank: int, index: int, proven: ProvenConnection) -> None:
        made = self._made[rank]
        made[index] = proven
        # Opened together: the link numbers them, and both ends must have the same number of threads.
        if len(made) == self._num_wanted[rank]:
            for each in made.values():
                each.socket.setblocking(True)
            self._link.open(rank, [made[index] for index in sorted(made)])

    # -- the lower rank listens and invites --------------------------------------------------------------------------

    def _invite(self, rank: int) -> None:
        if self._listener is None:
            self._listener = socket.create_server((self._host, 0), family=_family(self._host), backlog=_MAX_UNPROVEN)
            self._listener.setblocking(False)
            self._local = _listen_locally()
            for listener in filter(None, (self._listener, self._local)):
                self._spawn(self._accept(listener))
        self._made[rank], self._num_wanted[rank] = {}, self._num_connections
        names, keys = [], []
        for index in range(self._num_connections):
            names.append(secrets.token_bytes(_NAME_BYTES))
            keys.append(secrets.token_bytes(SECRET_BYTES))
            self._invited[names[-1]] = _Invited(rank, index, keys[-1])
        port, local = self._listener.getsockname()[1], self._local.getsockname() if self._local else b""
        self._tell(rank, {_PORT: port, _LOCAL: local, _NAMES: names, _SECRETS: keys, _ENCRYPTS: self._encrypts})

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await _readable(listener.fileno())
            try:
                connection, _ = listener.accept()
            except BlockingIOError:  # whoever came is gone
                continue
            except OSError as error:  # the stranger has gone again, or no more files may be open
                self._garbage.warn("a connection for %s could not be accepted: %s", self._purpose, error)
                await asyncio.sleep(_RETRY_S)
                continue
            task = self._spawn(self._admit(connection))
            task.add_done_callback(partial(_close_if_cancelled, connection))
            self._unproven[task] = None
            task.add_done_callback(lambda task: self._unproven.pop(task, None))
            # Strangers must not use up the descriptors of this process: the oldest unproven connection is closed.
            if len(self._unproven) > self._max_unproven:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            await asyncio.sleep(0)  # where many come at once, accepting never waits

    async def _admit(self, connection: socket.socket) -> None:
        """Admits a connection that proves itself; any other is closed without an answer."""
        try:
            connection.setblocking(False)
            async with asyncio.timeout(_PROOF_S):
                invited, proven = await self._prove(connection)
        except (OSError, TimeoutError, MalformedMessage) as error:
            self._garbage.warn("a connection for %s was refused: %s", self._purpose, str(error) or "it said nothing")
            connection.close()
        except BaseException:  # cancelled, by :meth:`close` or to make way for another
            connection.close()
            raise
        else:
            self._add_connection(invited.rank, invited.number, proven)

    async def _prove(self, connection: socket.socket) -> tuple[_Invited, ProvenConnection]:
        said = await _read(connection, _NAME_BYTES + _PROOF_BYTES)
        name = said[:_NAME_BYTES]
        invited = self._invited.get(name)
        if invited is None:
            raise MalformedMessage("nobody was invited under its name")
        proven = self._ready(connection, invited.secret, invited.rank)
        if proven.incoming.opened(said[_NAME_BYTES:]) != name:
            raise MalformedMessage("its name is not what it has sealed")
        # An invitation is good for one connection: a recorded conversation that is replayed finds it used up.
        if self._invited.pop(name, None) is None:
            raise MalformedMessage("another connection has come under its name")
        await asyncio.get_running_loop().sock_sendall(connection, proven.outgoing.closed(name))
        return invited, proven

    # -- the higher rank connects ------------------------------------------------------------------------------------

    async def _accept_invitation(
        self, rank: int, local: bytes, remote: tuple[str, int], invited: list[tuple[bytes, bytes]]
    ) -> None:
        for index, (name, secret) in enumerate(invited):
            try:
                async with asyncio.timeout(_CONNECT_S):
                    proven = await self._connect(rank, local, remote, name, secret)
            except (OSError, TimeoutError, MalformedMessage) as error:
                why = str(error) or f"nobody answered within {_CONNECT_S:g} s"
                host, port = remote
                self._failed(rank, f"no connection for {self._purpose} to {host}:{port}: {why}")
                return
            self._add_connection(rank, index, proven)

    async def _connect(
        self, rank: int, local: bytes, remote: tuple[str, int], name: bytes, secret: bytes
    ) -> ProvenConnection:
        loop = asyncio.get_running_loop()
        connection = _connected_locally(local) or socket.socket(_family(remote[0]), socket.SOCK_STREAM)
        try:
            if connection.family != socket.AF_UNIX:
                connection.setblocking(False)
                await loop.sock_connect(connection, remote)
            proven = self._ready(connection, secret, rank)
            await loop.sock_sendall(connection, name + proven.outgoing.closed(name))
            if proven.incoming.opened(await _read(connection, _PROOF_BYTES)) != name:
                raise MalformedMessage("who listens there does not know the secret")
        except BaseException:
            connection.close()
            raise
        return proven


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def _readable(listener: int) -> None:
    """Returns once a connection waits at a listening socket, given by its file descriptor.

    A cancelled ``loop.sock_accept`` may already have accepted a connection, which then nobody closes. Here whoever is
    cancelled has accepted none.
    """
    loop = asyncio.get_running_loop()
    waits = loop.create_future()

    def wake() -> None:
        if not waits.done():
            waits.set_result(None)

    loop.add_reader(listener, wake)
    try:
        await waits
    finally:
        loop.remove_reader(listener)


def _close_if_cancelled(connection: socket.socket, task: "asyncio.Task[None]") -> None:
    """Closes the connection of a task that was cancelled, perhaps before its first line ran."""
    if task.cancelled():
        connection.close()


def _listen_locally() -> socket.socket | None:
    """Listens under an abstract name, which goes with the socket. Returns None where the system allows no such name."""
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
    """Returns a connection to the local socket; None where nobody listens there, or too many ask at once."""
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
