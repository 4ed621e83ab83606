"""Run as a script: tie this process to the life of its parent, bind it, then become the given command.

``python -I -S trampoline.py PARENT_PID CORES COMMAND...``, CORES being numbers with commas between them, or ``-``.
Linux then kills the process when its parent dies, however that ends, and runs it on these cores only; tie and binding
survive ``exec``. A script of its own, since code between fork and exec is unsafe in a process that has threads, as the
launcher has.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

UNBOUND = "-"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the command."""
    parent, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cores != UNBOUND:
            bind({int(core) for core in cores.split(",")})
    if os.getppid() != parent:  # it died before the tie was made
        os._exit(128 + signal.SIGKILL)
    os.execv(command[0], command)


def bind(cores: set[int]) -> None:
    """Keep to these cores, as far as the system allows it: without, a process is slower, but not wrong.

    On few cores the threads of a process would preempt each other: one that wakes takes the core from the very thread
    that woke it and still holds the interpreter's lock. Under SCHED_BATCH a thread that wakes takes its turn instead.
    """
    with suppress(OSError):  # refused by a sandbox, or the cores were taken away meanwhile
        os.sched_setaffinity(0, cores)
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else the user chose another one
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    main()
