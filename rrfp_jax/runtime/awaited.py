"""The inputs of a task that was handed over before they were delivered (:mod:`rrfp_jax.core.promises`).

Within a process an output exists as a future from the launch of its task on. So the thread that launches fetches it
from the stage that makes it, perhaps some moments before that launch, and the device waits for the rest.
"""

import threading
from collections.abc import Callable, Sequence

from rrfp_jax.runtime.sleeping import sleep_exactly

_FIRST_POLL_S, _LAST_POLL_S, _LONGER = 20e-6, 1e-3, 1.1
"""Pauses between the checks for an input that has not come. They grow longer, each to about a tenth of the time waited
so far: the task that makes the input may take long, and its threads need the core and the lock."""
Fetch = Callable[[], bool]
"""Takes an input, if it can be had; tells whether it is here now."""


class GivenUp(RuntimeError):
    """The run ends before an input could be had."""


class AwaitedInputs:
    """What one task still lacks as it is handed over.

    Args:
        fetches: one for each input.
    """

    def __init__(self, fetches: Sequence[Fetch]) -> None:
        self._fetches = fetches
        self._came = threading.Event()
        self._is_given_up = False

    def fetch(self) -> None:
        """Take all of them; on the thread that launches. Raises GivenUp if the run ends meanwhile."""
        for fetch in self._fetches:
            pause_s = _FIRST_POLL_S
            while not fetch():
                if self._is_given_up:
                    raise GivenUp("what makes an input was not launched")
                sleep_exactly(pause_s)
                pause_s = min(pause_s * _LONGER, _LAST_POLL_S)

    def wait(self) -> None:
        """Return once all have been delivered, or the run ends; on the thread that waits for tasks."""
        self._came.wait()

    def came(self) -> None:
        """The last one was delivered, so the device can have begun the task."""
        self._came.set()

    def give_up(self) -> None:
        """The run ends."""
        self._is_given_up = True
        self._came.set()
