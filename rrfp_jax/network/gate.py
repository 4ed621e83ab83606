"""Who may connect: ZeroMQ's authentication protocol (RFC 27) over the run's public keys.

ZeroMQ asks the gate about every connection to a CURVE server of its context, after the client has proved that it
holds the secret half of the key it shows. Without a gate any key would do, hence the gate is opened first.
"""

from collections.abc import Mapping

import zmq
from zmq.utils import z85

from rrfp_jax.network.sockets import QuietLog

_ENDPOINT = "inproc://zeromq.zap.01"
_NUM_FRAMES = 7
_VERSION = b"1.0"


class Gate:
    """Admits the holders of known keys.

    Args:
        context: whose connections are judged.
        roles: the role of each admitted public key, which ZeroMQ then attaches to every message as its ``User-Id``:
            the proven sender. (A routing identity proves nothing: clients choose it, and the gate is not told.)
        log: told of who is refused.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], roles: Mapping[bytes, str], log: QuietLog | None = None
    ) -> None:
        self._log = log
        self._roles = {key: role.encode() for key, role in roles.items()}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def answer(self) -> None:
        """Judge the connections that wait; called where ``socket`` is readable."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            separator = frames.index(b"")
            route, request = frames[: separator + 1], frames[separator + 1 :]
            role = self._role(request)
            if role is None and self._log is not None:
                where = request[3].decode(errors="replace") if len(request) > 3 else "somewhere"
                self._log.warn("a connection from %s was refused: its key is not of this run", where)
            status = [b"400", b"not of this run", b""] if role is None else [b"200", b"OK", role]
            self.socket.send_multipart([*route, _VERSION, request[1], *status, b""], zmq.NOBLOCK)

    def _role(self, request: list[bytes]) -> bytes | None:
        if len(request) != _NUM_FRAMES or request[0] != _VERSION or request[5] != b"CURVE":
            return None
        return self._roles.get(z85.encode(request[6]))

    def close(self) -> None:
        self.socket.close()
