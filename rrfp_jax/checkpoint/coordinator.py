"""What a checkpoint needs of the run's other processes, and how they do something together without losing each other.

Whatever all ranks do together, a save for example, goes through phases, and at the end of each all of them gather. A
gathering is named by (what, number, phase). The number advances once per call, before anything can fail, and a rank
that could not do its share of a phase says so in that phase's gathering. So every rank comes to the same gatherings,
whoever is slow and whatever fails, and leaves them with the same outcome. There is no deadline: a rank that lives is
waited for, and one that is lost ends the gathering on all others.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rrfp_jax.checkpoint.record import Unusable


class Coordinator(Protocol):
    """Brings the ranks of a run together; all make the same calls."""

    rank: int

    def gather(self, name: str, data: Any = None) -> Mapping[int, Any]:
        """Bring plain data, and return everybody's by rank, once every rank has brought its own.

        ``name`` is new for every gathering, and the same on all ranks. Waits for as long as all ranks live; raises
        ConnectionError where one is lost.
        """


class Alone:
    """The coordinator of a run of one process."""

    rank = 0

    def gather(self, name: str, data: Any = None) -> Mapping[int, Any]:  # noqa: ARG002
        """This process's data."""
        return {0: data}


class NotDone(ValueError):
    """A rank could not do its share; the message is one sentence, and the same on all ranks."""


class Together:
    """One thing that all ranks do together, phase by phase."""

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self._coordinator, self._name = coordinator, name

    def each(self, phase: str, action: Callable[[], Any]) -> list[Any]:
        """Every rank's result, which is plain data, by rank; raises NotDone on all ranks where one's action failed."""
        result, failure, cause = None, None, None
        try:
            result = action()
        except Exception as error:  # whatever it is, the others must hear of it
            failure, cause = self._told(error), error
        brought = self._coordinator.gather(f"checkpoint {self._name} {phase}", [result, failure])
        failures = [why for _, (_, why) in sorted(brought.items()) if why is not None]
        if failures:
            raise NotDone(failures[0]) from cause
        return [brought[rank][0] for rank in sorted(brought)]

    def first(self, phase: str, action: Callable[[], Any]) -> Any:
        """Rank 0's result of an action that only rank 0 does."""
        return self.each(phase, action if self._coordinator.rank == 0 else lambda: None)[0]

    def _told(self, error: Exception) -> str:
        text = sentence(error)
        return text if isinstance(error, Unusable) else f"rank {self._coordinator.rank}: {text}"


class Calls:
    """Numbers what ranks do together, each kind for itself."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._numbers = coordinator, Counter[str]()

    def next(self, what: str) -> Together:
        """The next of its kind."""
        self._numbers[what] += 1
        return Together(self._coordinator, f"{what} {self._numbers[what]}")


def sentence(error: BaseException) -> str:
    """An error in one line of at most 400 characters."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not isinstance(error, OSError | ValueError | RuntimeError):
            text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-195:]}"
