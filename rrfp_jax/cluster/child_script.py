"""The script by which each process of a launcher begins. It imports little, so that a start takes little time.

``python -I -S child_script.py PARENT_PID CORES COMMAND...``, CORES being numbers with commas between them, or ``-``:
ties this process to the life of its parent, binds it, then becomes the command. Linux kills the process when its parent
dies, however that ends, and runs it on these cores only; tie and binding survive ``exec``. It is a script of its own,
since code between fork and exec is unsafe in a process that has threads, as the launcher has.

``python -I -S child_script.py guardian``: kills the process groups of a launcher that died without doing so itself. The
launcher says on a pipe ``+PGID`` for each group that it starts and ``-PGID`` for each that it has ended; when the pipe
closes, the groups that are left belong to a dead launcher. Ranks die with it anyway, but not the processes that they
have started, such as workers that load data. The signals that ask a run to end are held back from it.

``python -P child_script.py module MODULE ARGUMENT...``: runs a module as ``python -m`` does, but looks into the current
folder last. ``python -m`` looks there first, and that folder is the user's: a file ``queue.py`` in it would take the
place of Python's own module, in ranks and in processes that the user does not even know of. A user's module in that
folder is still found.
"""

import os
import signal
import sys
from contextlib import suppress

GUARDIAN, UNBOUND = "guardian", "-"
_MODULE = "module"
_PR_SET_PDEATHSIG = 1


def python_module(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module in a process of its own."""
    return [sys.executable, "-P", __file__, _MODULE, module, *arguments]


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


def main(arguments: list[str]) -> None:
    if arguments[0] == _MODULE:
        import runpy

        root = os.path.abspath(os.path.join(__file__, "../../.."))
        if root not in sys.path:  # a checkout that is not installed uses its own code, whatever else is installed
            sys.path.insert(0, root)
            import rrfp_jax.version  # noqa: F401 - from now on all of rrfp_jax is this checkout's

            sys.path.append(sys.path.pop(0))
        with suppress(FileNotFoundError):  # the current folder may be gone
            sys.path.append(os.getcwd())
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif arguments[0] == GUARDIAN:
        groups: set[int] = set()
        for line in sys.stdin:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
    else:
        parent, cores, *command = arguments
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if cores != UNBOUND:
                bind_to_cores({int(core) for core in cores.split(",")})
        if os.getppid() != int(parent):  # it died before the tie was made
            os._exit(128 + signal.SIGKILL)
        os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
