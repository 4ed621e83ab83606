"""When a stage is handed its next task: the words of users, and their meaning for a stage.

Certain choices go early with just-in-time dispatch, too. They equal the choice at the very end, so the order is the
same, and the device has them in time however short the task before is.
"""

from typing import NamedTuple

AUTO = "auto"
JUST_IN_TIME = "just-in-time"
CERTAIN = "certain"
DISPATCH_WORDS = f"{AUTO}, {JUST_IN_TIME} (in place of a number of tasks), {CERTAIN}, or 0"
"""Everything that users may give, for messages."""


class Dispatch(NamedTuple):
    """When a stage is handed its next task; by default at the end of the running one."""

    just_in_time: bool = False
    """Whether the next one is chosen when the running one may end within the host's latency (:class:`DecideNow`)."""

    certain: bool = False
    """Whether the next one is handed over as soon as nothing that may happen changes the choice
    (:mod:`rrfp_jax.core.certainty`)."""

    @property
    def is_early(self) -> bool:
        """Whether tasks are handed over while others run."""
        return self.just_in_time or self.certain


def is_dispatch(value: object) -> bool:
    """Returns whether users may give this value."""
    return value in (AUTO, JUST_IN_TIME, CERTAIN) or (isinstance(value, int) and value is not False and value == 0)


def dispatch_of(value: int | str, *, on_host: bool) -> Dispatch:
    """Returns the meaning of a value for a stage whose devices are the host's own cores, or other ones.

    On the host ``auto`` is ``certain``, which costs no further thread: another choice waits for the running task's end,
    since a core has no queue that could run empty, and threads that hand tasks to each other take it from the work.
    Elsewhere it is ``just-in-time``, which is ``certain`` first: any other task is chosen just in time. 0 chooses every
    task at the end of the one before.

    Raises ValueError for any other value.
    """
    if not is_dispatch(value):
        raise ValueError(f"dispatch_ahead is {value!r}: give {DISPATCH_WORDS}")
    if value == 0:
        return Dispatch()
    if value == CERTAIN or (value == AUTO and on_host):
        return Dispatch(certain=True)
    return Dispatch(just_in_time=True, certain=True)


def parse_dispatch(text: str) -> int | str:
    """Returns a value as the command line has it: a number, or the text itself."""
    return int(text) if text.removeprefix("-").isdecimal() else text
