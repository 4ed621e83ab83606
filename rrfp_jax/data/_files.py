"""Links that lead out of a data folder are refused, and locks end with the process that holds them."""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO


def check_inside(path: Path, folder: Path) -> None:
    """Raise ValueError if ``path``, found in ``folder``, leads out of it by a link.

    In the cache of the hub, files are links into ``blobs``, beside the snapshots of their repository: these count as
    inside.
    """
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if target.is_relative_to(root) or any(target.is_relative_to(blobs) for blobs in _blobs(root)):
        return
    raise ValueError(
        f"{path} is a link to {target}, which is not in {folder}: put the file itself there, or name the folder that "
        "it is in"
    )


def _blobs(root: Path) -> list[Path]:
    """Returns the folders in which the hub's cache keeps the files of the snapshot that a folder is, or is in."""
    repositories = [above.parent.parent for above in (root, *root.parents) if above.parent.name == "snapshots"]
    return [repository / "blobs" for repository in repositories]


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
