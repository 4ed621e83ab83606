"""How commands end when something is wrong: one clear sentence or a report, and a distinct exit code.

The codes are listed in :mod:`rrfp_jax.exit_codes`. A ValueError is about the input only while input is being
checked, which a command marks with :func:`checking_input`.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rrfp_jax.bounded_text import sentence
from rrfp_jax.commands.common.console import log_plainly
from rrfp_jax.commands.common.interrupts import raise_lost_interrupts_again
from rrfp_jax.exit_codes import (
    BAD_INPUT,
    INTERNAL_ERROR,
    INTERRUPTED,
    NO_PROGRESS,
    PEER_LOST,
    SIGNALLED,
    START_FAILED,
    TASK_FAILED,
    print_fatal_message,
)

_OF_PATHS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR}
_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


class BadInput(ValueError):
    """An error that the user can mend: the message is one sentence that names the remedy."""


@contextmanager
def checking_input() -> Iterator[None]:
    """Within the block a ValueError means that the input does not fit; it leaves as :class:`BadInput`.

    So does an OSError that is about a path, such as a missing right.
    """
    try:
        yield
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        if error.filename is None or error.errno not in _OF_PATHS:
            raise
        raise BadInput(f"{_path(error)}: {error.strerror}: name another path, or mend its rights") from error


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command's ``main`` and end the process with its code, or with the one that belongs to its error."""
    try:
        raise_lost_interrupts_again()
        log_plainly()
        code = _run(main)
    except BadInput as error:
        print(f"error: {sentence(str(error))}", file=sys.stderr)
        code = BAD_INPUT
    except BrokenPipeError:  # whoever read the output has seen enough
        _end(SIGNALLED + signal.SIGPIPE, "")
    except KeyboardInterrupt as interrupt:
        _end(INTERRUPTED, "\n".join(["interrupted", *_notes(interrupt)]))
    except Exception as error:
        end_with(error)
    sys.exit(code)


def _run(main: Callable[[], int]) -> int | str | None:
    """Returns the code of a command, once its output is flushed."""
    code: int | str | None
    try:
        code = main()
    except SystemExit as end:  # a parser's, after a help text or a refusal
        code = end.code
    if sys.stdout is not None:
        sys.stdout.flush()
    return code


def end_with(error: Exception) -> NoReturn:
    """End the process at once, with the text and the code that belong to an error; from any thread."""
    _end(*_failure(error))


def _failure(error: Exception) -> tuple[int, str]:
    """Returns the exit code and the text of an error after the input was accepted."""
    if isinstance(error, OSError) and error.errno in _OF_DISKS:
        told = f"error: {_path(error)} cannot be written ({error.strerror}): make room, or write elsewhere"
        return INTERNAL_ERROR, "\n".join([told, *_notes(error)])
    code = _code_of(error) if isinstance(error, (RuntimeError, ValueError)) else INTERNAL_ERROR
    if code == INTERNAL_ERROR:
        return code, "".join(traceback.format_exception(error)).rstrip()
    return code, "\n".join([f"error: {error}", *_notes(error)])


def _code_of(error: RuntimeError | ValueError) -> int:
    from rrfp_jax.data import BrokenData
    from rrfp_jax.runtime.cluster import StartFailed
    from rrfp_jax.runtime.failure import NoProgress, PeerLost, RunFailed

    codes = {StartFailed: START_FAILED, NoProgress: NO_PROGRESS, PeerLost: PEER_LOST, RunFailed: TASK_FAILED}
    codes |= {BrokenData: BAD_INPUT}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), INTERNAL_ERROR)


def _path(error: OSError) -> str:
    return "the output" if error.filename is None else os.fsdecode(error.filename)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _end(code: int, text: str) -> NoReturn:
    """End at once: a program that hangs cannot be stopped from within, and would keep the interpreter from ending."""
    print_fatal_message(text)
    os._exit(code)
