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
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple

from rrfp_jax.cluster._array_link import ArrayLink
from rrfp_jax.cluster._channel import Channel
from rrfp_jax.cluster._direct_link import DirectLink
from rrfp_jax.cluster._liveness import Liveness
from rrfp_jax.cluster.host import unproven_allowed
from rrfp_jax.cluster.wire import SECRET_BYTES, TAG_BYTES, MalformedMessage, ProvenConnection, QuietLog, Seal, field

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


class _Invited(NamedTuple):
    """A connection that this rank has invited another to make."""

    rank: int
    number: int
    secret: bytes


class PrivateConnections:
    """The private connections of one kind, to all ranks. Used on the event loop, except for :meth:`join`.

    Args:
        purpose: the use of the connections, in messages.
        rank: this rank.
        hosts: the address on which each rank listens.
        link: gets connections that are proven.
        channel: sends and receives over the link; closed here.
        num_connections: number of connections to each rank.
        encrypts: whether arrays are encrypted; all ranks must agree.
        tell: sends a dict to a rank, whose :meth:`receive` gets it.
        liveness: told of a rank that has ended a connection, and of one that cannot be reached.
    """

    def __init__(
        self,
        purpose: str,
        rank: int,
        hosts: Mapping[int, str],
        link: ArrayLink | DirectLink,
        channel: Channel,
        *,
        loop: asyncio.AbstractEventLoop,
        num_connections: int,
        encrypts: bool,
        tell: Callable[[int, dict[str, Any]], None],
        liveness: Liveness,
    ) -> None:
        self.purpose, self._rank, self._hosts, self._loop = purpose, rank, dict(hosts), loop
        self.link, self.channel = link, channel
        self.num_connections, self._encrypts = num_connections, encrypts
        self._tell, self._liveness = tell, liveness
        self.wanted: frozenset[int] = frozenset()
        """Ranks to which this rank has asked for connections, perhaps on another thread."""
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
        link.broken = self._broken

    def want(self, ranks: Iterable[int]) -> None:
        """Has connections to and from these ranks made, once."""
        for rank in sorted(ranks):
            if not self._is_closed and rank not in self.channel.peers and rank not in self.channel.gone:
                self.channel.add(rank)
                self._ask(rank)

    def take_up(self, rank: int, number: int, host: str) -> None:
        """Lets go of a process of a rank that is gone, for the one with this number, which listens there."""
        self.wanted -= {rank}
        self._asked.discard(rank)
        self._made.pop(rank, None)
        self._num_wanted.pop(rank, None)
        self._invited = {name: each for name, each in self._invited.items() if each.rank != rank}
        self._hosts[rank] = host
        self.channel.take_up(rank, number)

    def receive(self, rank: int, header: dict[str, Any], _: list[memoryview]) -> None:
        """Handles the dict that another rank tells. Raises MalformedMessage."""
        if self._is_closed:
            return
        # The other rank may send as soon as its side stands, so this side expects its messages from now on.
        self.channel.add(rank)
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
            self._liveness.rule_out(rank, "it differs in encrypt_arrays: give all ranks the same settings")
            return
        self._spawn(self._accept_invitation(rank, local, port, [*zip(names, keys, strict=True)]))

    def close(self, linger_s: float) -> None:
        """Makes no more connections, and sends nothing new. The event loop may be closed."""
        self._is_closed = True
        is_running = not self._loop.is_closed()
        for task in [*self._tasks] if is_running else ():
            task.cancel()
        for listener in filter(None, (self._listener, self._local)):
            if is_running:  # before its number is gone, which the loop may see again as another's
                self._loop.remove_reader(listener.fileno())
            listener.close()
        for rank, made in self._made.items():
            if len(made) < self._num_wanted[rank]:
                for proven in made.values():
                    proven.socket.close()
        self.channel.close(linger_s)

    def _ask(self, rank: int) -> None:
        if rank not in self._asked:
            self._asked.add(rank)
            # One side invites, so that two ranks that ask at the same time do not make connections twice.
            if self._rank < rank:
                self._invite(rank)
            else:
                self._tell(rank, {_WANTED: True})

    def _broken(self, rank: int, why: str) -> None:
        # Called on the thread of a connection.
        if not self._is_closed:
            _LOG.debug("rank %d: a connection for %s with rank %d ended: %s", self._rank, self.purpose, rank, why)
            self._liveness.connection_ended(rank)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
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
            self.link.open(rank, [made[index] for index in sorted(made)])

    # -- the lower rank listens and invites --------------------------------------------------------------------------

    def _invite(self, rank: int) -> None:
        if self._listener is None:
            host = self._hosts[self._rank].strip("[]")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_UNPROVEN)
            self._listener.setblocking(False)
            self._local = _local_socket(b"\0rrfp-" + secrets.token_hex(_NAME_BYTES).encode(), listens=True)
            for listener in filter(None, (self._listener, self._local)):
                self._spawn(self._accept(listener))
        self._made[rank], self._num_wanted[rank] = {}, self.num_connections
        names, keys = [], []
        for index in range(self.num_connections):
            names.append(secrets.token_bytes(_NAME_BYTES))
            keys.append(secrets.token_bytes(SECRET_BYTES))
            self._invited[names[-1]] = _Invited(rank, index, keys[-1])
        port, local = self._listener.getsockname()[1], self._local.getsockname() if self._local else b""
        self._tell(rank, {_PORT: port, _LOCAL: local, _NAMES: names, _SECRETS: keys, _ENCRYPTS: self._encrypts})

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            # Not by ``loop.sock_accept``: where that is cancelled it may already have accepted a connection, which then
            # nobody closes. Here a task that is cancelled has accepted none.
            came = asyncio.Event()
            self._loop.add_reader(listener.fileno(), came.set)
            try:
                await came.wait()
            finally:
                if listener.fileno() >= 0:  # else :meth:`close` has done it
                    self._loop.remove_reader(listener.fileno())
            try:
                connection, _ = listener.accept()
            except BlockingIOError:  # whoever came is gone
                continue
            except OSError as error:  # the stranger has gone again, or no more files may be open
                self._garbage.warn("a connection for %s could not be accepted: %s", self.purpose, error)
                await asyncio.sleep(_RETRY_S)
                continue
            task = self._spawn(self._admit(connection))
            # A task may be cancelled before its first line runs, so it cannot close the connection itself.
            task.add_done_callback(lambda task, end=connection: end.close() if task.cancelled() else None)  # type: ignore[misc]
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
                await self._loop.sock_sendall(connection, proven.outgoing.closed(name))
        except (OSError, TimeoutError, MalformedMessage) as error:
            self._garbage.warn("a connection for %s was refused: %s", self.purpose, str(error) or "it said nothing")
            connection.close()
        else:
            self._add_connection(invited.rank, invited.number, proven)

    # -- the higher rank connects ------------------------------------------------------------------------------------

    async def _accept_invitation(self, rank: int, local: bytes, port: int, invited: list[tuple[bytes, bytes]]) -> None:
        host = self._hosts[rank].strip("[]")
        for index, (name, secret) in enumerate(invited):
            connection = _local_socket(local, listens=False)
            try:
                async with asyncio.timeout(_CONNECT_S):
                    if connection is None:
                        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                        connection.setblocking(False)
                        await self._loop.sock_connect(connection, (host, port))
                    proven = self._ready(connection, secret, rank)
                    await self._loop.sock_sendall(connection, name + proven.outgoing.closed(name))
                    if proven.incoming.opened(await _read(connection, _PROOF_BYTES)) != name:
                        raise MalformedMessage("who listens there does not know the secret")
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if not isinstance(error, OSError | TimeoutError | MalformedMessage):
                    raise
                why = str(error) or f"nobody answered within {_CONNECT_S:g} s"
                self._liveness.rule_out(rank, f"no connection for {self.purpose} to {host}:{port}: {why}")
                return
            self._add_connection(rank, index, proven)


def _local_socket(name: bytes, *, listens: bool) -> socket.socket | None:
    """Returns a local socket that listens under an abstract name, which goes with it, or is connected to that.

    Returns None where the system allows no such name, or nobody listens there, or too many ask at once.
    """
    try:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    end.setblocking(False)
    try:
        if listens:
            end.bind(name)
            end.listen(_MAX_UNPROVEN)
        else:
            end.connect(name)
    except OSError:
        end.close()
        return None
    return end


async def _read(connection: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            raise MalformedMessage("it ended before it had proven itself")
        data += more
    return data
