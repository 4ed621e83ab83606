"""Helper process of the launcher: starts a rank that dies with it, or kills the processes that a dead launcher left.

``python -I -S child_reaper.py PARENT_PID CORES COMMAND...``, CORES being numbers with commas between them, or ``-``:
ties this process to the life of its parent, binds it, then becomes the command. Linux kills the process when its parent
dies, however that ends, and runs it on these cores only; tie and binding survive ``exec``. It is a script of its own,
since code between fork and exec is unsafe in a process that has threads, as the launcher has.

``python -I -S child_reaper.py guardian``: kills the process groups of a launcher that died without doing so itself. The
launcher says on a pipe ``+PGID`` for each group that it starts and ``-PGID`` for each that it has ended; when the pipe
closes, the groups that are left belong to a dead launcher. Ranks die with it anyway, but not the processes that they
have started, such as workers that load data. The signals that ask a run to end are held back from it.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

GUARDIAN, UNBOUND = "guardian", "-"
_PR_SET_PDEATHSIG = 1


def become(parent: int, cores: str, command: list[str]) -> None:
    """Replaces this process by the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cores != UNBOUND:
            bind_to_cores({int(core) for core in cores.split(",")})
    if os.getppid() != parent:  # it died before the tie was made
        os._exit(128 + signal.SIGKILL)
    os.execv(command[0], command)


def bind_to_cores(cores: set[int]) -> None:
    """Keeps this process to these cores, as far as the system allows: unbound, it is slower, but not wrong.

    On few cores the threads of a process would preempt each other: one that wakes takes the core from the very thread
    that woke it and still holds the interpreter's lock. Under SCHED_BATCH a thread that wakes takes its turn instead.
    """
    with suppress(OSError):  # refused by a sandbox, or the cores were taken away meanwhile
        os.sched_setaffinity(0, cores)
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else the user chose another one
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def guard() -> None:
    """Listens until the launcher is gone, then kills the groups that are left."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    guard() if sys.argv[1] == GUARDIAN else become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
