"""What is removed, and when: only after something newer is committed, and always the record of a commit first.

Nothing is ever changed through a symbolic link, and a directory that holds anything that is not ours is left alone.
"""

import logging
from collections.abc import Collection
from pathlib import Path

from rrfp_jax.checkpoint.durable_files import remove_tree, sync_directory
from rrfp_jax.checkpoint.record import COMMIT, Commit, Unusable, is_committed, is_ours, step_directory, steps_in

_LOG = logging.getLogger(__name__)


def remove_leftovers(root: Path) -> None:
    """Remove what saves left that did not come to an end; called while none is under way."""
    for directory in (step_directory(root, step) for step in steps_in(root)):
        if is_ours(directory):
            if not (directory / COMMIT).exists():
                remove_tree(directory)
            else:
                _remove_other_data(directory)


def keep_last(root: Path, step: int, keep: int, *, keep_also: Collection[int] = ()) -> None:
    """After ``step`` was committed: keep it and the ``keep - 1`` committed steps before it, remove all others but those
    of ``keep_also`` before it.

    Steps after it belong to a run that was given up for the one that saved this step. What is not ours is left alone,
    and is not counted.
    """
    ours = [other for other in steps_in(root) if is_ours(step_directory(root, other))]
    committed = [older for older in ours if older <= step and is_committed(root, older)]
    kept = {*committed[:keep], *(older for older in committed if older in keep_also)}
    for other in ours:
        directory = step_directory(root, other)
        if other in kept:
            continue
        if other > step:
            _LOG.warning("%s is removed: the run went on from an earlier step and has saved step %d", directory, step)
        (directory / COMMIT).unlink(missing_ok=True)
        sync_directory(directory)
        remove_tree(directory)
    _remove_other_data(step_directory(root, step))


def _remove_other_data(directory: Path) -> None:
    """Remove attempts that another attempt at the same step has replaced."""
    try:
        data = Commit.read(directory).data
    except Unusable:
        return  # damaged: whoever wants to look into it still can
    for entry in directory.iterdir():
        if is_ours(entry) and entry.name not in (COMMIT, data):
            remove_tree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
