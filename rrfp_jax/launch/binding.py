"""Which of a node's cores each of its ranks keeps to.

Where all ranks run on all cores, the threads of a rank are moved from core to core and wait behind those of others,
which every hand-over between threads pays for. ``tether`` does the binding, before a rank's program starts.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

BINDINGS = ("cores", "none")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology"


def rank_cores(bind: str, num_ranks: int) -> list[tuple[int, ...]]:
    """The cores of each rank of this node, of those that this process may use; nothing where they are not bound.

    So the limits of a resource manager (SLURM's, a container's) stand: only what it left the launcher is shared out.
    """
    cores = _usable_cores() if bind == "cores" and num_ranks else []
    return shares(cores, num_ranks) if cores else [()] * num_ranks


def shares(cores: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """Even shares of consecutive cores, one per rank; where there are fewer cores than ranks, one core each in turn.

    In turn, and not the first ranks on the first core: neighbours are the replicas of a stage, which work at the same
    time. Measured, that is the faster way.
    """
    if len(cores) < num_ranks:
        return [(cores[rank % len(cores)],) for rank in range(num_ranks)]
    bounds = [rank * len(cores) // num_ranks for rank in range(num_ranks + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(bounds)]


def _usable_cores() -> list[int]:
    """What this process may run on, neighbours beside each other; empty where the system binds no processes."""
    return sorted(os.sched_getaffinity(0), key=_place) if sys.platform == "linux" else []


def _place(core: int) -> tuple[int, int, int]:
    """Socket, physical core, hardware thread: by number alone, the second threads of all cores would follow the first
    ones, so that two ranks would share every physical core, and half of them far from their GPU."""
    folder = Path(_TOPOLOGY.format(core))
    with suppress(OSError, ValueError):  # a sandbox without /sys: their numbers must do
        siblings = (folder / "thread_siblings_list").read_text(encoding="ascii")
        first = int(siblings.replace("-", ",").partition(",")[0])
        return int((folder / "physical_package_id").read_text(encoding="ascii")), first, core
    return 0, core, core
