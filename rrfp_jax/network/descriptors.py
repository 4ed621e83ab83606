"""How many files and connections this process may have open: as many as it can, and enough, or a sentence."""

import os
import resource

_SPARE = 64
"""What the run's program opens beside: devices, data, logs, checkpoints."""


def require_descriptors(num_more: int, what: str) -> None:
    """Raise this process's limit as far as the system allows, and make sure that ``num_more`` fit beside what is open.

    Raises:
        ValueError: where they do not; says what to set.
    """
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
        limit = highest
    needed = _num_open() + num_more + _SPARE
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ValueError(
            f"this process may have {limit} files open and needs {needed} for {what}: set 'ulimit -n {needed}' or more "
            "on every host"
        )


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # another system than Linux
        return 0
