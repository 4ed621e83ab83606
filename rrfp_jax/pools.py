"""Processes of a pool that end with the one that asked for them, however that ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext

_SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def spawning() -> Iterator[SpawnContext]:
    """Yields the context of a pool's processes, which are started within the block.

    Python starts them by ``python -c``, which looks for modules in the current folder first. A user's file there, such
    as ``queue.py``, must not take the place of a module.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield multiprocessing.get_context("spawn")
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def end_with_parent() -> None:
    """Makes a new process of a pool ignore Ctrl-C, which its parent answers, and end when its parent ends.

    Each process calls it first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_parent, name="parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
