"""Launching what a stage waits for before its input is there: the device waits for it, and the host is not in the way.

A stage that is idle as an input comes has no running task behind which to hide the launch of the next one. Where the
output of a task can be handed to programs from its launch on, as a future, and devices wait for it by themselves, the
host need not wait: it hands over what the stage waits for, and the task starts as its input comes.

Rule
----
A driver says that an input is *promised* once the task that makes it has been announced and handed to its device
(:class:`rrfp_jax.core.InputPromised`); that is an announcement, too. A stage with foresight that has nothing to
run, or would hold, hands over the *next* entry of its table (:mod:`rrfp_jax.core.foresight`) if that lacks
nothing but inputs that are all promised. The entry counts as started then, and as begun when its last input has come:
only then is announced what it will send.

What it costs is the end of a hold: a stage that has handed over the next entry runs nothing else until that has ended,
however late its input comes.

Why it cannot deadlock
----------------------
What is handed over so waits on its device for tasks that were handed over before it, on this device and on others. So
the first of all tasks that were handed over and have not ended waits for nothing and ends: no task waits for ever. It
was admissible, and lacked nothing else, as it started; once its inputs are there the stage is in a state to which it
could have come without promises. A promise that is lost or late costs time only. A false one would be a defect of the
driver, as an arrival of what is not there would be.
"""

from collections.abc import Hashable, Iterable, Mapping

from rrfp_jax.core.events import Message


class Promises:
    """The inputs of one stage that are promised, and the tasks that were handed over before theirs were there."""

    __slots__ = ("_early", "awaiting", "made")

    def __init__(self) -> None:
        self.made: set[int] = set()
        """Their numbers in the present step; none of them has arrived."""
        self.awaiting: dict[int, int] = {}
        """For each node that was handed over before its inputs: how many are still to come."""
        self._early: dict[int, set[Message]] = {}

    def copy(self) -> "Promises":
        twin = Promises()
        twin.made, twin.awaiting = self.made.copy(), self.awaiting.copy()
        twin._early = {step: made.copy() for step, made in self._early.items()}
        return twin

    def begin(self, step: int | None, numbers: Mapping[Message, int]) -> None:
        """A step begins, which waits for these messages."""
        early = () if step is None else self._early.pop(step, ())
        self.made = {numbers[message] for message in early if message in numbers}
        self.awaiting = {}

    def hear_early(self, step: int, message: Message) -> None:
        """A promise of a later step, of what is not here yet."""
        self._early.setdefault(step, set()).add(message)

    def arrived_early(self, step: int, message: Message) -> None:
        """An input of a later step is here."""
        if step in self._early:
            self._early[step].discard(message)

    def cover(self, missing: Iterable[int]) -> bool:
        """Whether all of these are promised."""
        return bool(self.made) and self.made.issuperset(missing)

    def key(self) -> Hashable:
        early = frozenset((step, message) for step, made in self._early.items() for message in made)
        return (early, frozenset(self.made), frozenset(self.awaiting.items()))
