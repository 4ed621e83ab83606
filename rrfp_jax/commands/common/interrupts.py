"""Ctrl-C ends a command whenever it comes.

Python raises KeyboardInterrupt in whatever the main thread runs just then. Within what cannot fail, such as a callback
of the garbage collector, it is told to ``sys.unraisablehook`` and lost: the command would go on. Within libraries of
C++ that are being loaded it may end the process with an abort.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rrfp_jax.exit_codes import INTERRUPTED
from rrfp_jax.runtime.last_words import say_last_words

_AGAIN_S = 0.02


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
    say_last_words("interrupted")
    os._exit(INTERRUPTED)
