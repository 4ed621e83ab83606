"""Check that a file of a folder lies inside that folder: a link may lead to any file that its reader may read.

A folder that somebody has packed is data; a link in it must not choose which of the reader's own files become part of a
model, of a token set, or of a published folder.
"""

import os
from pathlib import Path


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
