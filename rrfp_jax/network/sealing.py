"""What only the two ends of a connection can write and read: AES-GCM under keys that serve one connection, one way.

Records are sealed with running numbers that are never sent, so what is altered, replayed, left out or put into another
order cannot be opened.
"""

import hmac
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rrfp_jax.network.plain import MalformedMessage

TAG_BYTES = 16
"""How much longer a sealed record is."""
SECRET_BYTES = 32
_NONCE_BYTES = 12
_ALTERED = "it was altered on its way, or sealed by somebody else"


class Seal:
    """One way of a connection; used on one thread at a time. Both ends make it of the same values.

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

    def close_into(self, data: Any, sealed: Any) -> None:
        """Seal ``data`` into a buffer that is longer by ``TAG_BYTES``; other threads run meanwhile."""
        self._cipher.encrypt_into(self._nonce(), data, None, sealed)

    def closed(self, data: Any) -> bytes:
        """``data`` sealed."""
        return self._cipher.encrypt(self._nonce(), data, None)

    def open_into(self, sealed: Any, data: Any) -> None:
        """The way back from :meth:`close_into`. Raises MalformedMessage for anything that was not sealed so."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, None, data)
        except InvalidTag as error:
            raise MalformedMessage(_ALTERED) from error

    def opened(self, sealed: Any) -> bytes:
        """The way back from :meth:`closed`. Raises MalformedMessage for anything that was not sealed so."""
        try:
            return self._cipher.decrypt(self._nonce(), sealed, None)
        except InvalidTag as error:
            raise MalformedMessage(_ALTERED) from error
