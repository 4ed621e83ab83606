"""Locks that end with the process that holds them."""

import errno
import fcntl
from typing import IO

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors of file systems without locks: Lustre that is mounted without ``flock``, and some of FUSE."""


def try_lock(file: IO[str], remedy: str) -> bool:
    """Lock an open file unless another process holds the lock; returns whether this process has locked it.

    Raises ValueError, ending with the remedy, if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise ValueError(
            f"the file system of {file.name} has no file locks ({error.strerror}), which keep two processes from "
            f"writing there at once: {remedy}"
        ) from None
    return True
