"""What is removed, and when: only after something newer is committed, and always the record of a commit first."""

import logging
from pathlib import Path

from rrfp_jax.checkpoint.files import remove_tree, sync_directory
from rrfp_jax.checkpoint.reader import steps_in
from rrfp_jax.checkpoint.record import COMMIT, Commit, Unusable, is_ours, step_directory

_LOG = logging.getLogger(__name__)


def remove_leftovers(root: Path) -> None:
    """Remove what saves left that did not come to an end; called while none is under way."""
    for step in steps_in(root):
        directory = step_directory(root, step)
        if directory.is_dir() and is_ours(directory):
            if not (directory / COMMIT).exists():
                remove_tree(directory)
            else:
                _remove_other_data(directory)


def keep_last(root: Path, step: int, keep: int) -> None:
    """After ``step`` was committed: keep it and the ``keep - 1`` committed steps before it, remove all others.

    Steps after it belong to a run that was given up for the one that saved this step. A directory that holds anything
    that is not ours is left alone.
    """
    kept = [older for older in steps_in(root) if older <= step and _is_committed(root, older)][:keep]
    for other in steps_in(root):
        directory = step_directory(root, other)
        if other in kept or not is_ours(directory):
            continue
        if other > step:
            _LOG.warning("%s is removed: the run went on from an earlier step and has saved step %d", directory, step)
        (directory / COMMIT).unlink(missing_ok=True)
        sync_directory(directory)
        remove_tree(directory)
    _remove_other_data(step_directory(root, step))


def _is_committed(root: Path, step: int) -> bool:
    try:
        Commit.read(step_directory(root, step))
    except Unusable:
        return False
    return True


def _remove_other_data(directory: Path) -> None:
    """Remove attempts that another attempt at the same step has replaced."""
    try:
        data = Commit.read(directory).data
    except Unusable:
        return  # damaged: whoever wants to look into it still can
    for entry in directory.iterdir():
        if entry.name not in (COMMIT, data):
            remove_tree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
