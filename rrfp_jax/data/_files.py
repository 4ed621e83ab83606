"""Files of a data folder in one order on all machines, links out of it refused, and locks that end with a process."""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO, Never

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors of file systems without locks: Lustre that is mounted without ``flock``, and some of FUSE."""


def check_inside(path: Path, folder: Path) -> None:
    """Raise ValueError if ``path``, found in ``folder``, leads out of it by a link.

    In the cache of the hub, files are links into ``blobs``, beside the snapshots of their repository: these count as
    inside.
    """
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    snapshots = [above.parent for above in (root, *root.parents) if above.parent.name == "snapshots"]
    if not any(target.is_relative_to(each) for each in (root, *(each.parent / "blobs" for each in snapshots))):
        raise ValueError(
            f"{path} is a link to {target}, which is not in {folder}: put the file itself there, or name the folder "
            "that it is in"
        )


def paths_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Returns the files below a folder, and its links to folders, which are not followed, by their relative paths.

    Folders that are hidden or named in ``skipped`` are left out. Raises ValueError for a folder that cannot be read.
    """
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse_unreadable):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        found += (Path(folder, name) for name in names)
        found += (path for name in subfolders if (path := Path(folder, name)).is_symlink())
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def refuse_unreadable(error: OSError) -> Never:
    """Raises the ValueError for a file or a folder that cannot be read."""
    raise ValueError(
        f"cannot read {error.filename} ({error.strerror}): make it readable, or move it out of the data folder"
    ) from error


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
