"""Run as a script: tie this process to the life of its parent, then become the given command.

``python -I -S trampoline.py PARENT_PID COMMAND...``. Linux then kills the process when its parent dies, however that
ends; the tie survives ``exec``. A script of its own, since code between fork and exec is unsafe in a process that has
threads, as the launcher has.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the tie was made
        os._exit(128 + signal.SIGKILL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
