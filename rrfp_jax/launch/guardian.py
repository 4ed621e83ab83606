"""Run as a script: kill the process groups of a launcher that died without doing so itself.

``python -I -S guardian.py``. The launcher says on a pipe ``+PGID`` for each group that it starts and ``-PGID`` for each
that it has ended; when the pipe closes, what is left belongs to a dead launcher. Ranks would die with it anyway
(``trampoline``), but not the processes that they have started, such as workers that load data.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Listen until the launcher is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
