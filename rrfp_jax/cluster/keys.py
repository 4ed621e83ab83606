"""The key of a run: a secret that its launcher makes once, and the CURVE keys that every process derives from it.

Each role (``rank 3``, ``rendezvous``) has a key pair of its own, so a handshake proves not only that a peer belongs to
the run but also which rank it is. The secret reaches the ranks through their environment or a private file, never
through a service. Every process that holds it belongs to the run: ranks are not protected from each other.
"""

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import zmq
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

KEY_VARIABLE = "RRFP_RUN_KEY"
KEY_FILE_VARIABLE = "RRFP_RUN_KEY_FILE"
_NUM_BYTES = 32
_REMEDY = "rrfp launch --new-key FILE makes one"


class KeyPair(NamedTuple):
    """A CURVE key pair in ZeroMQ's printable form (Z85, 40 bytes each)."""

    public: bytes
    secret: bytes


class RunKey:
    """The secret of one run; printing it shows only a fingerprint."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != _NUM_BYTES:
            raise ValueError(f"a run key has {_NUM_BYTES} bytes, this one {len(secret)}: {_REMEDY}")
        self._secret = secret

    @classmethod
    def generate(cls) -> "RunKey":
        return cls(secrets.token_bytes(_NUM_BYTES))

    @classmethod
    def from_text(cls, text: str, where: str = "the run key") -> "RunKey":
        """Reads the output of :meth:`text`; ``where`` names the source in errors, which never show the text itself."""
        try:
            return cls(base64.b64decode(text.strip().encode("ascii"), altchars=b"-_", validate=True))
        except (UnicodeEncodeError, binascii.Error) as error:
            raise ValueError(f"{where} is not base64 of {_NUM_BYTES} bytes: {_REMEDY}") from error
        except ValueError as error:
            raise ValueError(f"{where} is malformed: {error}") from error

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "RunKey":
        """Returns the key from ``RRFP_RUN_KEY``, or from the file that ``RRFP_RUN_KEY_FILE`` names.

        Raises:
            ValueError: where neither or both are set, the key is malformed, or others may read the file.
        """
        environ = os.environ if environ is None else environ
        # Both at once is refused: which of them counts would be a guess, and a wrong key is only noticed by a refusal.
        text, path = environ.get(KEY_VARIABLE), environ.get(KEY_FILE_VARIABLE)
        if text and path:
            raise ValueError(f"both {KEY_VARIABLE} and {KEY_FILE_VARIABLE} are set: keep one of them")
        if text:
            return cls.from_text(text, KEY_VARIABLE)
        if path:
            return cls.from_file(Path(path))
        raise ValueError(f"no run key: set {KEY_VARIABLE} or {KEY_FILE_VARIABLE}, the same for all ranks ({_REMEDY})")

    @classmethod
    def from_file(cls, path: Path) -> "RunKey":
        """Reads a key file. Raises ValueError where it is no regular file, or others may read it."""
        try:
            # Without waiting: a named pipe, which is refused as no regular file, would wait for a writer for ever.
            opener = lambda name, flags: os.open(name, flags | os.O_NONBLOCK)  # noqa: E731
            with open(path, encoding="ascii", errors="replace", opener=opener) as file:
                # Checked on the open file: its path could lead to another one a moment later.
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise ValueError(
                        f"the key file {path} must be a regular file, it has mode {stat.filemode(mode)}: {_REMEDY}"
                    )
                if mode & 0o077:
                    raise ValueError(
                        f"the key file {path} must be a file that only its owner may read, "
                        f"it has mode {stat.filemode(mode)}: chmod 600 {path}"
                    )
                # A little more than a key has: a wrong file is malformed, and is not read whole.
                text = file.read(1024)
        except OSError as error:
            raise ValueError(
                f"the key file {path} ({KEY_FILE_VARIABLE}) cannot be read ({error.strerror}): {_REMEDY}"
            ) from error
        return cls.from_text(text, f"the key file {path}")

    def text(self) -> str:
        """Returns the secret as text, for the environment or a secret store."""
        return base64.b64encode(self._secret, altchars=b"-_").decode("ascii")

    def environment(self) -> dict[str, str]:
        """Returns the variables to set for the processes of the run; remove ``RRFP_RUN_KEY_FILE`` from theirs."""
        return {KEY_VARIABLE: self.text()}

    def write(self, path: Path) -> None:
        """Writes a new key file with mode 0600; an existing file is not overwritten.

        Raises:
            ValueError: where the file exists, or cannot be written.
        """
        # Created with its mode and only if new, so that nobody else can hold it open, or have placed a link there.
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise ValueError(f"{path} exists: remove it, or give another name for this run's key") from error
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}): name another path for the key") from error
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(self.text() + "\n")
        except OSError as error:
            path.unlink()  # half a key would be in the way of the next one
            raise ValueError(f"{path} cannot be written ({error.strerror}): make room, or name another path") from error

    def pair(self, role: str) -> KeyPair:
        """Returns the key pair of a role, the same in every process of the run."""
        return _derive(self._secret, role)

    def expand(self, purpose: str, num_bytes: int) -> bytes:
        """Returns secret bytes for a purpose (HKDF), which tell nothing of the key or of other purposes."""
        return HKDF(SHA256(), num_bytes, salt=None, info=f"rrfp {purpose}".encode()).derive(self._secret)

    def __repr__(self) -> str:
        return f"RunKey({hashlib.sha256(b'rrfp fingerprint ' + self._secret).hexdigest()[:8]})"


@cache
def _derive(secret: bytes, role: str) -> KeyPair:
    text = z85.encode(hmac.digest(secret, f"rrfp curve {role}".encode(), "sha256"))
    return KeyPair(public=zmq.curve_public(text), secret=text)
