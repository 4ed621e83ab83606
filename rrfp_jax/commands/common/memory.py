"""What becomes of memory that a command has freed: back to the system, or kept for the next array."""

import ctypes
import os
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES, _HUGE_BYTES = 1 << 20, 1 << 30
_NEVER = 2**31 - 1


def return_large_blocks() -> None:
    """Have the C library map blocks of a megabyte or more, and unmap them when they are freed.

    By itself glibc moves that bound up as large blocks are freed, and keeps what threads have freed in a heap of each
    thread: a model that goes through layer by layer then leaves hundreds of megabytes behind. Does nothing elsewhere.
    """
    _set({_M_MMAP_THRESHOLD: _LARGE_BYTES})


def keep_freed_blocks() -> None:
    """Have the C library keep what is freed, as a step on CPUs allocates what the one before did.

    By itself glibc unmaps large blocks as they are freed, or keeps them, as its moving bounds have it, which differ
    from run to run. Each page of a new mapping costs a fault: a task of a large head then takes up to half as long
    again. All threads share what is kept, as what one allocates another frees. Does nothing where the environment says
    how memory is allocated, and elsewhere.
    """
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        _set({_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _HUGE_BYTES, _M_TRIM_THRESHOLD: _NEVER})


def _set(options: dict[int, int]) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without mallopt
            for name, value in options.items():
                ctypes.CDLL(None).mallopt(name, value)
