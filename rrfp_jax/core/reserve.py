"""A bound on what is held at once that keeps in reserve what others still need.

Rule
----
Each microbatch is held once, from its *start* to the last of its *ends*, and weighs something while it is held; all
that is held together weighs at most ``limit``. An *order* says, for each microbatch, its turn to start and its turn to
be let go. A microbatch is admitted if the limit suffices for it, and would suffice then for everything before its turn
that is still to come, start and letting go one after the other in the order. Without an order each microbatch is let
go before the next one starts, the smallest number first. With equal weights that is the rule of
:mod:`rrfp_jax.core.window`: a slot is free, and afterwards the oldest has one or another is free.

What follows
------------
*If everything before a microbatch's turn has happened, it is admitted*, provided that the order alone stays within the
limit. For all that is left, run in the order from here on, always stays within it: at first by that condition; after
something was admitted, since what is behind it in the order finds what it would have found, and what is before it was
counted with it; after something was let go, since that is sooner than the order has it. Microbatches that a step lacks
take start and letting go out of the order together, which leaves no beginning of it with more.

So nothing deadlocks where all tasks of a step have one order in which every dependency goes forward and starts and
ends here come as in this order: its first unfinished task finds everything before it done.
"""

from collections.abc import Sequence


def turns(microbatches: Sequence[int], order: Sequence[int] = ()) -> tuple[tuple[int, bool], ...]:
    """The order as (microbatch, whether this is its turn to start); raises ValueError unless each has both turns."""
    if not order:
        return tuple((m, is_start) for m in microbatches for is_start in (True, False))
    if sorted(order) != sorted([*microbatches] * 2):
        raise ValueError("an order of turns must name each microbatch twice: its start, and when it is let go")
    seen: set[int] = set()
    events = []
    for m in order:
        events.append((m, m not in seen))
        seen.add(m)
    return tuple(events)


def peak(events: Sequence[tuple[int, bool]], weight: dict[int, int] | None = None) -> int:
    """What the order alone holds at most; ``weight`` None: every microbatch weighs 1."""
    load = most = 0
    for m, is_start in events:
        each = 1 if weight is None else weight[m]
        load += each if is_start else -each
        most = max(most, load)
    return most


class Reserve:
    """What is held under the rule above during one step.

    Args:
        limit: what may be held, in the unit of the weights.
        ends: of each microbatch how many ends let go of it, 0 for what the step lacks; numbers begin at ``first``.
        order: every microbatch twice, see :func:`turns`.
        weights: of each microbatch; none: 1 each.

    Raises ValueError where the order alone holds more than the limit.
    """

    __slots__ = (
        "_events",
        "_lightest",
        "_next",
        "_peak",
        "_turn",
        "_weights",
        "first",
        "held",
        "left",
        "limit",
        "load",
    )

    def __init__(
        self, limit: int, ends: Sequence[int], first: int = 0, order: Sequence[int] = (), weights: Sequence[int] = ()
    ) -> None:
        microbatches = range(first, first + len(ends))
        self.limit, self.first = limit, first
        self.left = list(ends)
        self.held: set[int] = set()
        self.load = 0
        self._weights = tuple(weights) or (1,) * len(ends)
        self._events = turns(microbatches, order)
        self._turn = {m: place for place, (m, is_start) in enumerate(self._events) if is_start}
        self._lightest = min((w for w, left in zip(self._weights, ends, strict=True) if left), default=0)
        self._peak = peak(self._events, dict(zip(microbatches, self._weights, strict=True)))
        if self._peak > limit:
            raise ValueError(
                f"a limit of {limit} is less than the {self._peak} that its order needs: give at least that"
            )
        self._next = 0
        """No turn before this one is left."""

    def copy(self) -> "Reserve":
        twin = object.__new__(type(self))
        for name in Reserve.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.left, twin.held = self.left.copy(), self.held.copy()
        return twin

    @property
    def oldest(self) -> int:
        """The smallest number that has not been let go; one past the last if all have."""
        return next((self.first + place for place, left in enumerate(self.left) if left), self.first + len(self.left))

    @property
    def is_full(self) -> bool:
        """Whether nothing is admitted that is not held."""
        return self.load + self._lightest > self.limit

    def weight(self, microbatch: int) -> int:
        return self._weights[microbatch - self.first]

    def admits(self, microbatch: int) -> bool:
        """Whether this microbatch is held, or may be from now on."""
        if microbatch in self.held:
            return True
        weights, first, limit = self._weights, self.first, self.limit
        load = self.load + weights[microbatch - first]
        if load > limit:
            return False
        enough = limit - self._peak  # what is left of the order adds no more than its peak
        if load <= enough:
            return True
        events, last = self._events, self._turn[microbatch]
        place = self._next
        while place < last and self._is_past(*events[place]):
            place += 1
        self._next = place
        for other, is_start in events[place:last]:
            if self._is_past(other, is_start):
                continue
            if is_start:
                load += weights[other - first]
                if load > limit:
                    return False
            else:
                load -= weights[other - first]
                if load <= enough:
                    return True
        return True

    def _is_past(self, microbatch: int, is_start: bool) -> bool:
        return not self.left[microbatch - self.first] or (is_start and microbatch in self.held)

    def start_forward(self, microbatch: int) -> None:
        if microbatch not in self.held:
            self.held.add(microbatch)
            self.load += self._weights[microbatch - self.first]

    def finish(self, microbatch: int) -> None:
        """One of the ends that let go of this microbatch has come."""
        place = microbatch - self.first
        self.left[place] -= 1
        if not self.left[place]:
            self.held.discard(microbatch)
            self.load -= self._weights[place]
