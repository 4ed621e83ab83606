"""How commands end: by their work, by a signal, or by an error, which becomes one clear sentence or a report.

The codes are listed in :mod:`rrfp_jax.exit_codes`. A ValueError is about the input only while input is being
checked, which a command marks with :func:`checking_input`. Signals that ask a command to end are heard whenever they
come, and lead to one ending.

**Ctrl-C.** Python raises KeyboardInterrupt in the code that the main thread runs just then. Inside code that cannot
fail, such as a callback of the garbage collector, it is passed to ``sys.unraisablehook`` and lost: the command would go
on. While C++ libraries are being loaded it may end the process with an abort.

**The others** (``STOP_SIGNALS``) ask a run to save and end. The main thread may be inside a compiler for minutes, where
Python calls no handler. So a separate thread reads the number of each signal from a pipe, into which Python writes it
at once. The first signal counts; later ones change nothing, until the process is gone.
"""

import errno
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from rrfp_jax.exit_codes import (
    BAD_INPUT,
    INTERNAL_ERROR,
    INTERRUPTED,
    NO_PROGRESS,
    PEER_LOST,
    PREEMPTED,
    SIGNALLED,
    START_FAILED,
    STOP_SIGNALS,
    TASK_FAILED,
    print_fatal_message,
)
from rrfp_jax.readable import sentence
from rrfp_jax.storage import STORE_FAILED

_OF_PATHS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR}
_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_AGAIN_S = 0.02
_NOT_BEGUN = "the run had not begun"


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
        if STORE_FAILED in str(error):
            raise BadInput(
                f"{error.filename}: {error.strerror}: mend the network or your credentials, and try again"
            ) from error
        if error.filename is None or error.errno not in _OF_PATHS:
            raise
        raise BadInput(f"{_path(error)}: {error.strerror}: name another path, or mend its rights") from error


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command's ``main`` and end the process with its code, or with the one that belongs to its error."""
    code: int | str | None
    try:
        sys.unraisablehook = _raise_interrupt_again
        with ending_at_once():
            from rrfp_jax.commands.common.console import log_plainly
        log_plainly()
        try:
            code = main()
        except SystemExit as end:  # a parser's, after a help text or a refusal
            code = end.code
        if sys.stdout is not None:
            sys.stdout.flush()  # here, since a reader that is gone, or a full disk, is told like any other error
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


def end_with(error: Exception) -> NoReturn:
    """End the process at once, with the text and the code that belong to an error; from any thread."""
    if isinstance(error, OSError) and error.errno in _OF_DISKS:
        told = f"error: {_path(error)} cannot be written ({error.strerror}): make room, or write elsewhere"
        _end(INTERNAL_ERROR, "\n".join([told, *_notes(error)]))
    code = INTERNAL_ERROR
    if isinstance(error, (RuntimeError, ValueError)):
        from rrfp_jax.data import BrokenData
        from rrfp_jax.runtime.cluster import StartFailed
        from rrfp_jax.runtime.failure import NoProgress, PeerLost, RunFailed

        codes = {StartFailed: START_FAILED, NoProgress: NO_PROGRESS, PeerLost: PEER_LOST, RunFailed: TASK_FAILED}
        codes |= {BrokenData: BAD_INPUT}
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), INTERNAL_ERROR)
    if code == INTERNAL_ERROR:
        _end(code, "".join(traceback.format_exception(error)).rstrip())
    _end(code, "\n".join([f"error: {error}", *_notes(error)]))


def _path(error: OSError) -> str:
    return "the output" if error.filename is None else os.fsdecode(error.filename)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _end(code: int, text: str) -> NoReturn:
    """End at once: a program that hangs cannot be stopped from within, and would keep the interpreter from ending."""
    print_fatal_message(text)
    os._exit(code)


# -- signals ---------------------------------------------------------------------------------------------------------


def _raise_interrupt_again(unraisable: Any) -> None:
    """Send an interrupt that was raised where nobody could hear it again, a moment later."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    main = threading.main_thread().ident
    assert main is not None
    again = threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))
    again.daemon = True
    again.start()


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Within the block Ctrl-C ends the process at once; for loading libraries, while nothing is under way."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: _end(INTERRUPTED, "interrupted"))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def hear_no_more() -> None:
    """Ignore all signals from now on: the command has done its work, and ends with the code that it has.

    Python would remove its handlers while the interpreter ends, which may take seconds; an ignored signal stays
    ignored.
    """
    gc.freeze()  # else the end looks for cycles among all objects of JAX, which wastes half a second
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *STOP_SIGNALS):
            signal.signal(number, signal.SIG_IGN)


# -- requests to stop ------------------------------------------------------------------------------------------------


def end_when_told_to_stop() -> None:
    """Let a request to stop end the process at once, with a message, until other code takes the signals.

    This is for a launcher, whose main thread waits for nothing but its imports before it catches signals itself.
    """
    _handle(lambda number, _: end_stopped(number, _NOT_BEGUN))


def end_stopped(number: int, told: str) -> None:
    """End the process at once, because it was told to stop before it had anything to save."""
    _end(PREEMPTED, f"told to stop ({signal.Signals(number).name}): {told}")


class StopSignals:
    """Receives the requests to stop a training run. Make it on the main thread, once in a process.

    A separate thread calls ``action`` with the first signal's number. If ``action`` is None, the request changes
    nothing.
    """

    def __init__(self) -> None:
        self.action: Callable[[int], None] | None = lambda number: end_stopped(number, _NOT_BEGUN)
        source, self._target = os.pipe()
        os.set_blocking(self._target, False)  # many signals at once must not block the process
        threading.Thread(target=self._watch, args=(source,), name="stop requests", daemon=True).start()
        os.register_at_fork(after_in_child=self._forget)
        self.take_signals()

    def take_signals(self) -> None:
        """Catch the signals; call it again after a library has taken them for itself."""
        signal.set_wakeup_fd(self._target, warn_on_full_buffer=False)
        _handle(lambda *_: None)

    def _watch(self, source: int) -> None:
        number = 0
        while number not in STOP_SIGNALS:  # Python writes Ctrl-C into the pipe too
            number = os.read(source, 1)[0]
        if self.action is not None:
            with suppress(RuntimeError):  # the run is just ending by itself, and its event loop is closed
                self.action(number)

    def _forget(self) -> None:
        """Restore the default handlers in a forked process: it ends when it is told to, and the pipe is its
        parent's."""
        if signal.set_wakeup_fd(-1) != self._target:
            return
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


_REQUESTS: list[StopSignals] = []


def stop_requests() -> StopSignals:
    """Returns the requests to stop of this process."""
    if not _REQUESTS:
        _REQUESTS.append(StopSignals())
    return _REQUESTS[0]


def _handle(handler: Callable[[int, Any], None]) -> None:
    for number in STOP_SIGNALS:
        # A command started under nohup, or with a signal ignored, goes on ignoring that signal on purpose. TERM is the
        # exception: a batch script that ignores TERM means only itself.
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
