"""How commands end when something is wrong: one clear sentence or a report, and a distinct exit code.

====  =========================================================================
code  meaning
====  =========================================================================
0     done
1     an error of this program: the traceback is on stderr
2     bad input: the sentence on stderr says what to change; nothing was started
3     the run was given up because no task finished within the progress deadline
4     the run was given up because a task failed
130   interrupted (Ctrl-C)
====  =========================================================================

A ValueError is about the input only while input is being checked, which a command marks with :func:`checking_input`.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

INTERNAL_ERROR = 1
BAD_INPUT = 2
NO_PROGRESS = 3
TASK_FAILED = 4
INTERRUPTED = 130


class BadInput(ValueError):
    """The user can mend it: the message is one sentence that says how."""


@contextmanager
def checking_input() -> Iterator[None]:
    """Within the block a ValueError means that the input does not fit; it leaves as :class:`BadInput`."""
    try:
        yield
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(str(error)) from error


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command's ``main`` and end the process with its code, or with the one that belongs to its error."""
    try:
        code = main()
    except BadInput as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = BAD_INPUT
    except KeyboardInterrupt as interrupt:
        _end(INTERRUPTED, "\n".join(["interrupted", *_notes(interrupt)]))
    except Exception as error:
        _end(*_failure(error))
    sys.exit(code)


def _failure(error: Exception) -> tuple[int, str]:
    """Exit code and text of what went wrong after the input was accepted."""
    if isinstance(error, RuntimeError):
        from rrfp_jax.runtime import NoProgress, RunFailed  # loads JAX, as a run that failed has done long before

        if isinstance(error, RunFailed):
            text = "\n".join([f"error: {error}", *_notes(error)])
            return NO_PROGRESS if isinstance(error, NoProgress) else TASK_FAILED, text
    return INTERNAL_ERROR, "".join(traceback.format_exception(error)).rstrip()


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _end(code: int, text: str) -> NoReturn:
    """End at once: a program that hangs cannot be stopped from within, and would keep the interpreter from ending."""
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    os._exit(code)
