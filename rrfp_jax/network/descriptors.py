"""How many files and connections this process may have open: as many as it can, and enough, or a sentence."""

import os
import resource

_MOST = 1 << 20
"""Asked for where the system knows no limit."""
_SPARE = 64
"""What the run's program opens beside: devices, data, logs, checkpoints."""
_UNPROVEN = 256
"""Largest number of open connections that have proven nothing, if descriptors are plenty."""
FILES_OF_NETWORK = 30
"""What sockets and threads need before anything is connected."""
FILES_FOR_MESSAGES = 4
"""For every rank with which messages are exchanged: two connections for heartbeats and two for messages."""


def raise_descriptor_limit() -> int:
    """Allow this process, and those that it will start, as many open files as the system lets them have.

    Returns the limit.
    """
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST
    most = _MOST if highest == resource.RLIM_INFINITY else highest
    if limit < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, highest))
    return max(limit, most)


def require_descriptors(num_more: int, what: str) -> None:
    """Raise this process's limit as far as the system allows, and make sure that ``num_more`` fit beside what is open.

    Raises:
        ValueError: where they do not; says what to set.
    """
    limit, needed = raise_descriptor_limit(), _num_open() + num_more + _SPARE
    if limit < needed:
        raise ValueError(
            f"this process may have {limit} files open and needs {needed} for {what}: set 'ulimit -n {needed}' or more "
            "on every host"
        )


def unproven_allowed(num_ranks: int) -> int:
    """Returns how many connections of one kind may be open whose other ends have proven nothing.

    The number is at most an eighth of the descriptors that are left: there are three kinds, ZeroMQ's and those for
    arrays and for messages, and a connection that comes while one is being closed must find room, too.
    """
    left = raise_descriptor_limit() - _num_open()
    return min(max(_UNPROVEN, 4 * num_ranks), max(1, left // 8))


def ranks_served(limit: int, array_connections: int) -> int:
    """How many ranks a run may have with so many open files in each, even if all exchange messages and arrays."""
    beside = _num_open() + FILES_OF_NETWORK + _SPARE
    return max(0, 1 + (limit - beside) // (FILES_FOR_MESSAGES + 1 + array_connections))


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # another system than Linux
        return 0
