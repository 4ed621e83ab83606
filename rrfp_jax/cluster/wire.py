"""Messages between processes: plain data as msgpack, and bytes that are sealed for one connection.

Data that arrives is decoded with limits, without extension types, and without running any code.
"""

import hmac
import logging
import socket
import time
from typing import Any, NamedTuple

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_HEADER_BYTES = 1 << 20
"""Largest header that is read; arrays travel in frames of their own."""
SECRET_BYTES = 32
TAG_BYTES = 16
"""Number of bytes by which a sealed record is longer than its content."""
_NONCE_BYTES = 12
_ALTERED = "it was altered on its way, or sealed by somebody else"

PeerMessage = tuple[int, list[memoryview]]
"""Rank of the sender, and the head followed by the frames."""


class MalformedMessage(ValueError):
    """Data arrived that no peer of this run sends; the message is dropped, and the run goes on."""


def pack_plain(value: Any, max_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """Encodes None, booleans, integers, floats, strings, bytes, lists and dicts of these.

    Raises:
        ValueError: for another type, an integer beyond 64 bits, or more than ``max_bytes``.
    """
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"a header holds plain data only (numbers, strings, lists and dicts), this one does not: {error}"
        ) from error
    if len(packed) > max_bytes:
        raise ValueError(f"a header has {len(packed)} bytes, at most {max_bytes} travel: put data into frames")
    return packed


def unpack_plain(data: bytes | memoryview, max_bytes: int = MAX_HEADER_BYTES) -> Any:
    """Decodes the output of :func:`pack_plain`; tuples become lists. Raises MalformedMessage for any other data."""

    def refuse_extension(code: int, _: bytes) -> Any:
        raise MalformedMessage(f"extension type {code}, which no peer of this run sends")

    if len(data) > max_bytes:
        raise MalformedMessage(f"a header of {len(data)} bytes, at most {max_bytes} are read")
    try:
        # timestamp=1 turns msgpack's only built-in extension into a plain float.
        return msgpack.unpackb(data, raw=False, strict_map_key=False, timestamp=1, ext_hook=refuse_extension)
    except Exception as error:  # the parser raises errors of many types on garbage, RecursionError among them
        raise MalformedMessage(f"a header that is not msgpack: {type(error).__name__}: {error}") from error


def field(header: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """Returns ``header[name]``, checked to be of ``kind`` (a boolean is no integer).

    Raises:
        MalformedMessage: where ``header`` is no dict, or the field is missing or of another type.
    """
    value = header.get(name) if isinstance(header, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise MalformedMessage(f"field '{name}' is {value!r:.60}, expected {kind}")
    return value


class QuietLog:
    """Logs warnings that a stranger could cause at will: one in five seconds, and counts the others."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._next_s, self._num_silent = logger, 0.0, 0

    def warn(self, text: str, *values: Any) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._num_silent += 1
            return
        more = f" ({self._num_silent} more since the last line)" if self._num_silent else ""
        self._next_s, self._num_silent = now_s + 5.0, 0
        self._logger.warning(text + more, *values)


class Seal:
    """AES-GCM for one direction of one connection; used on one thread at a time. Both ends make it of the same values.

    Records carry running numbers that are never sent, so a record that was altered, replayed, left out or moved cannot
    be opened.

    Args:
        secret: fresh random bytes that only the two ends know, for this connection alone.
        sender: the rank that seals; the other one opens.
    """

    def __init__(self, secret: bytes, sender: int) -> None:
        self._cipher = AESGCM(hmac.digest(secret, f"rrfp from rank {sender}".encode(), "sha256"))
        self._number = 0

    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES, "big")

    def closed(self, data: Any) -> bytes:
        return self._cipher.encrypt(self._nonce(), data, None)

    def close_into(self, data: Any, sealed: Any) -> None:
        """Seals ``data`` into a buffer that is longer by ``TAG_BYTES``; other threads run meanwhile."""
        self._cipher.encrypt_into(self._nonce(), data, None, sealed)

    def opened(self, sealed: Any) -> bytes:
        """Reverses :meth:`closed`. Raises MalformedMessage for any other bytes."""
        try:
            return self._cipher.decrypt(self._nonce(), sealed, None)
        except InvalidTag as error:
            raise MalformedMessage(_ALTERED) from error

    def open_into(self, sealed: Any, data: Any) -> None:
        """Reverses :meth:`close_into`. Raises MalformedMessage for any other bytes."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, None, data)
        except InvalidTag as error:
            raise MalformedMessage(_ALTERED) from error


class ProvenConnection(NamedTuple):
    """A connection to a rank that has proven itself: a blocking socket, and the seals of both directions."""

    socket: socket.socket
    outgoing: Seal
    incoming: Seal
