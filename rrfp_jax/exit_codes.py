"""The exit codes of commands, of the processes of a run, and of the launcher that watches them.

====  =========================================================================================
code  meaning
====  =========================================================================================
0     done
1     an error of this program: the traceback is on stderr; or the last state, or another output, could not be saved
2     bad input: the sentence on stderr says what to change; nothing was started, or data cannot be read
3     the run was given up because no task finished within the progress deadline
4     the run was given up because a task failed
5     the run was given up because another of its processes was lost
6     the processes could not be brought together: missing, of another configuration, or wrong key
7     preempted: told to stop, and the state is saved
130   interrupted (Ctrl-C)
====  =========================================================================================

A launcher ends with the code of the process that failed first for a reason of its own; one that a signal killed counts
as 128 plus the signal's number, as in a shell.
"""

DONE = 0
INTERNAL_ERROR = 1
BAD_INPUT = 2
NO_PROGRESS = 3
TASK_FAILED = 4
PEER_LOST = 5
START_FAILED = 6
PREEMPTED = 7
INTERRUPTED = 130
SIGNALLED = 128
"""Added to a signal's number."""
