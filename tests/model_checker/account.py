"""The history of a place as far as its contract needs it: a few integers, so that equal ones are one state."""

from typing import NamedTuple

from rrfp_jax.core import RunInstruction
from tests.model_checker.contract import Needs


class Account(NamedTuple):
    """What has happened at a place. Tasks are bits of the present step, packets bits of all steps."""

    step: int = -1
    """The present step, or the last one if none is active; -1 before the first."""
    is_active: bool = False
    started: int = 0
    """Tasks of the present step."""
    finished: int = 0
    """Tasks of the present step."""
    delivered: int = 0
    """Packets of all steps that have reached the place."""
    sent: int = 0
    """Packets of all steps that the place has sent."""
    due: int = 0
    """The task that is about to end and counts as finished for others of the stage's own lane, if one is; of a pair
    both."""
    firsts: int = 0
    """Running tasks that the next one in the queue is the partner of."""
    is_told: bool = False
    """Whether the place has been told that the due task is about to end, and has handed over nothing behind it."""
    wake_s: float | None = None
    """While the place holds, the time of the tick that it has asked for last, until that has come."""
    queue: tuple[int, ...] = ()
    """Where stages decide early, the running tasks of the stage's own lane in the order in which they were handed over
    and will end."""
    launched: tuple[RunInstruction, ...] = ()
    """On a member of a group, every task that it has started so far, in order."""

    @property
    def done(self) -> int:
        """The tasks that count as done for others of the stage."""
        return self.finished | self.due

    def is_free(self, lane: int) -> bool:
        """Whether none of these tasks runs but what is about to end."""
        return not self.started & ~self.done & lane

    def missing(self, needs: Needs) -> int:
        """The tasks of the stage that something still waits for."""
        return (needs.tasks & ~self.done) | (needs.ended & ~self.finished)

    def has(self, needs: Needs) -> bool:
        """Whether all is there that something waits for."""
        return not (self.missing(needs) or needs.packets & ~self.delivered)


def places_of(bits: int) -> list[int]:
    """The numbers of the tasks that are bits."""
    return [place for place in range(bits.bit_length()) if bits >> place & 1]
