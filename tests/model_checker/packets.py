"""Everything that can be under way to a place, numbered as bits, so that what was sent and delivered are integers.

A *packet* is a message to a place in a step, the start of a step there, or a note from another member of its group.
Messages, their promises and starts follow from the setting; notes are numbered as they come up. Where a group's tasks
are collectives, that a member has joined in one is a packet to each of the others too. It is no event: it reaches them
as their own end of the task, which waits for all of these.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rrfp_jax.core import Event, GroupHeard, InputPromised, StepStarted
from rrfp_jax.schedules import Task


class Joined(NamedTuple):
    """A member of a group has started a task that is a collective of the group."""

    step: int
    member: int
    task: Task


Choice = Task | None
"""What a place that looks ahead runs next; None: it holds."""


class Stimulus(NamedTuple):
    """An event and the place that it happens to."""

    place: int
    event: Event
    choices: tuple[Choice, ...] = ()
    """Where foresight is replaced by free choice, what is chosen; afterwards the first of what there is to choose."""


class Packets:
    """The packets that have come up so far; bit ``1 << n`` stands for ``sent[n]``."""

    def __init__(self, num_places: int) -> None:
        self.sent: list[tuple[int, Event | Joined]] = []
        """The place that each packet goes to, negative if it is none, and what it is there."""
        self.inboxes = [0] * num_places
        """The packets to each place."""
        self.earlier: list[int] = []
        """For each packet the packets that reach the place before: the starts of steps come in order."""
        self.joins = 0
        """The packets that are no events."""
        self.starts = 0
        """The starts of steps."""
        self.inputs = 0
        """The messages and starts, which no place may leave undelivered; notes and promises may be."""
        self._bits: dict[tuple[int, type, Event | Joined], int] = {}  # tuples of different types may be equal

    def bit(self, place: int, what: Event | Joined, *, after: int = 0) -> int:
        """A packet as a bit; ``after`` names the packets that reach the place before it."""
        known = self._bits.get((place, type(what), what))
        if known is not None:
            return known
        bit = self._bits[place, type(what), what] = 1 << len(self.sent)
        self.sent.append((place, what))
        self.earlier.append(after)
        if place >= 0:
            self.inboxes[place] |= bit
            if isinstance(what, Joined):
                self.joins |= bit
            elif not isinstance(what, GroupHeard | InputPromised):
                self.inputs |= bit
            if isinstance(what, StepStarted):
                self.starts |= bit
        return bit

    def known(self, place: int, what: Event) -> int:
        """The bit of a packet that has come up."""
        return self._bits[place, type(what), what]

    def event(self, bit: int) -> Event:
        """The event that a packet is at its place."""
        _, what = self.sent[bit.bit_length() - 1]
        assert not isinstance(what, Joined)
        return what

    @staticmethod
    def split(bits: int) -> Iterator[int]:
        """Some packets, each as a bit."""
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            yield lowest

    def stimuli(self, bits: int) -> list[Stimulus]:
        """Those of some packets that are events, in the order in which they came up."""
        found = []
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            place, what = self.sent[lowest.bit_length() - 1]
            if place >= 0 and not isinstance(what, Joined):
                found.append(Stimulus(place, what))
        return found
