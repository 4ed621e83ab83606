"""Memory that a command has freed goes back to the system, where it reads and writes large arrays one by one."""

import ctypes
import sys
from contextlib import suppress

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Have the C library map blocks of a megabyte or more, and unmap them when they are freed.

    By itself glibc moves that bound up as large blocks are freed, and keeps what threads have freed in a heap of each
    thread: a model that goes through layer by layer then leaves hundreds of megabytes behind. Does nothing elsewhere.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without mallopt
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
