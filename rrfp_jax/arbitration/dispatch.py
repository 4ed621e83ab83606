"""When a stage is handed its next task: what users say, and what it means for a stage.

Certain choices go early with just-in-time dispatch, too. They are what would be chosen at the very end, so the order is
the same, and the device has them in time however short the task before is.
"""

from typing import NamedTuple

AUTO = "auto"
JUST_IN_TIME = "just-in-time"
CERTAIN = "certain"
DISPATCH_WORDS = f"{AUTO}, {JUST_IN_TIME}, {CERTAIN}, or 0 or more tasks"
"""What may be given, for messages that say so."""


class Dispatch(NamedTuple):
    """When a stage is handed its next task."""

    ahead: int = 0
    """How many tasks it may have behind the running one."""
    just_in_time: bool = False
    """Whether the next one is chosen when the running one may end within the host's latency (:class:`DecideNow`)."""

    certain: bool = False
    """Whether the next one is handed over as soon as nothing that may happen changes the choice
    (:mod:`rrfp_jax.arbitration.certainty`)."""

    @property
    def is_early(self) -> bool:
        """Whether tasks are handed over while others run."""
        return self.just_in_time or self.certain or self.ahead > 0


def is_dispatch(value: object) -> bool:
    """Whether this is what may be given: ``auto``, ``just-in-time``, ``certain`` or a number of tasks."""
    return value in (AUTO, JUST_IN_TIME, CERTAIN) or (
        isinstance(value, int) and not isinstance(value, bool) and value >= 0
    )


def dispatch_of(value: int | str, *, on_host: bool) -> Dispatch:
    """What a value means for a stage whose devices are the host's own cores, or other ones.

    There ``auto`` is ``certain``, which costs no thread more: another choice waits for the running task's end, since a
    core has no queue that could run empty, and threads that hand tasks to each other take it from the work. Elsewhere
    it is ``just-in-time``, which is ``certain`` first: what is not certain is chosen just in time.

    Raises ValueError for what cannot be given.
    """
    if not is_dispatch(value):
        raise ValueError(f"dispatch_ahead is {value!r}: give {DISPATCH_WORDS}")
    if isinstance(value, int):
        return Dispatch(ahead=value)
    if value == CERTAIN or (value == AUTO and on_host):
        return Dispatch(certain=True)
    return Dispatch(just_in_time=True, certain=True)


def parse_dispatch(text: str) -> int | str:
    """A value as the command line has it: a number, or the text itself."""
    return int(text) if text.removeprefix("-").isdecimal() else text
