"""The ends of processes: the exit codes and signals of commands, of a run's ranks and of the launcher.

====  =========================================================================================
code  meaning
====  =========================================================================================
0     done
1     an error of this program: the traceback is on stderr; or the last state, or another output, could not be saved
2     bad input: the sentence on stderr says what to change; nothing was started
3     the run was given up because no task finished within the progress deadline
4     the run was given up because a task failed
5     the run was given up because another of its processes was lost
6     the processes could not be brought together: missing, of another configuration, or wrong key
7     told to stop: the state is saved, or training had not begun
8     data could not be read: the state before it is saved
9     too many steps in a row were left out: the state is saved
10    replicas computed different bits: nothing is saved, and another start would not help
130   interrupted (Ctrl-C)
====  =========================================================================================

A launcher ends with the code of the process that failed first for a reason of its own; one that a signal killed counts
as 128 plus the signal's number, as in a shell.

======================  ======================================  ==============================================
signal                  a training run                          the launcher
======================  ======================================  ==============================================
HUP, TERM, USR1, USR2,  saves at the next step boundary, 7;     passes it on, and restarts nothing any more
XCPU                    before the first step ends at once, 7;
                        later ones change nothing
INT (Ctrl-C)            ends at once, 130                       passes it on; after any of these: ends all ranks
PIPE                    goes on: output that nobody reads is    the same
                        lost, and nothing else
======================  ======================================  ==============================================

Other commands have nothing to save: a signal ends them as it ends any program.
"""

import signal
import sys
from contextlib import suppress

from rrfp_jax.readable import printable

DONE = 0
INTERNAL_ERROR = 1
BAD_INPUT = 2
NO_PROGRESS = 3
TASK_FAILED = 4
PEER_LOST = 5
START_FAILED = 6
PREEMPTED = 7
DATA_UNREADABLE = 8
NOT_FINITE = 9
COMPUTED_WRONGLY = 10
INTERRUPTED = 130
SIGNALLED = 128
"""Added to a signal's number, it gives the exit code of a process that the signal killed."""
STOP_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that ask a run to save and end: from terminals that hang up, from schedulers before the time is over (SLURM
and Kubernetes send TERM, others USR1 or USR2), and from the system when a limit on processor time is reached."""


def print_fatal_message(text: str) -> None:
    """Writes the last message of a process, if any, to stderr, after the rest of stdout. Either may be closed, or read
    by nobody."""
    with suppress(OSError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, AttributeError):
        sys.stderr.write(f"{printable(text)}\n" if text else "")  # in one piece, since other threads may write too
        sys.stderr.flush()
