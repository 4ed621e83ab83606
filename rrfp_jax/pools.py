"""Processes of a pool that end with the one that asked for them, however that ends."""

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """What a new process of a pool calls first: Ctrl-C is its parent's to answer, and it never outlives its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_parent, name="parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
