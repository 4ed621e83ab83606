"""Signals that ask a command to end are heard whenever they come, and lead to one ending.

**Ctrl-C.** Python raises KeyboardInterrupt in the code that the main thread runs just then. Inside code that cannot
fail, such as a callback of the garbage collector, it is passed to ``sys.unraisablehook`` and lost: the command would go
on. While C++ libraries are being loaded it may end the process with an abort.

**The others** (``STOP_SIGNALS``) ask a run to save and end. The main thread may be inside a compiler for minutes, where
Python calls no handler. So a separate thread reads the number of each signal from a pipe, into which Python writes it
at once. The first signal counts; later ones change nothing, until the process is gone.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rrfp_jax.exit_codes import INTERRUPTED, PREEMPTED, STOP_SIGNALS, print_fatal_message

_AGAIN_S = 0.02
_NOT_BEGUN = "the run had not begun"


def raise_lost_interrupts_again() -> None:
    """From now on an interrupt that was raised where nobody could hear it comes again, a moment later."""
    sys.unraisablehook = _unraisable


def _unraisable(unraisable: Any) -> None:
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
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_: object) -> None:
    print_fatal_message("interrupted")
    os._exit(INTERRUPTED)


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


def let_held_signals_in() -> None:
    """Unblock the signals that a launcher holds back until its ranks have their handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *STOP_SIGNALS})


def end_when_told_to_stop() -> None:
    """Let a request to stop end the process at once, with a message, until other code takes the signals.

    This is for a launcher, whose main thread waits for nothing but its imports before it catches signals itself.
    """
    _handle(lambda number, _: end_stopped(number, _NOT_BEGUN))


def end_stopped(number: int, told: str) -> None:
    """End the process at once, because it was told to stop before it had anything to save."""
    print_fatal_message(f"told to stop ({signal.Signals(number).name}): {told}")
    os._exit(PREEMPTED)


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
