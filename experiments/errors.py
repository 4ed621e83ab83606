"""How commands end when something is wrong: one clear sentence and a distinct exit code.

====  =========================================================================
code  meaning
====  =========================================================================
0     done
2     bad input: the sentence on stderr says what to change; nothing was started
3     the run was given up because no task finished within the progress deadline
4     the run was given up because a task failed
130   interrupted (Ctrl-C)
====  =========================================================================
"""

import sys
from collections.abc import Callable
from typing import NoReturn

BAD_INPUT = 2
NO_PROGRESS = 3
TASK_FAILED = 4
INTERRUPTED = 130


def refuse(error: Exception) -> int:
    """Print what is wrong with the input, and return the exit code."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return BAD_INPUT


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command's ``main`` and exit with its code; a ValueError is bad input, Ctrl-C ends quietly."""
    try:
        code = main()
    except ValueError as error:
        code = refuse(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
