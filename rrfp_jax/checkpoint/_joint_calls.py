"""How the ranks of a run do something together, a save for example, without losing each other.

A joint call goes through phases, and at the end of each all ranks gather. A gathering is named by (call, number,
phase). The number advances once per call, before anything can fail, and a rank that could not do its share of a phase
says so in that phase's gathering. So every rank comes to the same gatherings, whoever is slow and whatever fails, and
leaves them with the same outcome. There is no deadline: a rank that lives is waited for, and one that is lost ends the
gathering on all others.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rrfp_jax.checkpoint._records import Unusable

_LONGEST_TEXT = 400


class Coordinator(Protocol):
    """Brings the ranks of a run together; all make the same calls."""

    rank: int

    def gather(self, name: str, data: Any = None) -> Mapping[int, Any]:
        """Blocks until every rank has brought plain data, and returns the data of all by rank.

        ``name`` is new for every gathering, and the same on all ranks. Raises ConnectionError if a rank is lost.
        """


class SingleProcess:
    """The coordinator of a run of one process."""

    rank = 0

    def gather(self, name: str, data: Any = None) -> Mapping[int, Any]:  # noqa: ARG002
        """Returns this process's data."""
        return {0: data}


class NotDone(ValueError):
    """Raised if a rank could not do its share; the message is one sentence, and the same on all ranks."""


class JointCall:
    """One thing that all ranks do together, phase by phase."""

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self._coordinator, self._name = coordinator, name

    def on_all(self, phase: str, action: Callable[[], Any]) -> list[Any]:
        """Returns the results of all ranks, which are plain data, by rank.

        Raises NotDone on all ranks if the action of one of them failed.
        """
        result, failure, cause = None, None, None
        try:
            result = action()
        except Exception as error:  # whatever it is, the others must hear of it
            failure, cause = one_line(error), error
            if not isinstance(error, Unusable):  # which is the same on all ranks
                failure = f"rank {self._coordinator.rank}: {failure}"
        gathered = self._coordinator.gather(f"checkpoint {self._name} {phase}", [result, failure])
        failures = [why for _, (_, why) in sorted(gathered.items()) if why is not None]
        if failures:
            raise NotDone(failures[0]) from cause
        return [gathered[rank][0] for rank in sorted(gathered)]

    def on_first(self, phase: str, action: Callable[[], Any]) -> Any:
        """Returns rank 0's result of an action that only rank 0 does."""
        return self.on_all(phase, action if self._coordinator.rank == 0 else lambda: None)[0]


class JointCalls:
    """Numbers the joint calls of each kind."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._numbers = coordinator, Counter[str]()

    def next(self, kind: str) -> JointCall:
        """Returns the next call of its kind."""
        self._numbers[kind] += 1
        return JointCall(self._coordinator, f"{kind} {self._numbers[kind]}")


def one_line(error: BaseException) -> str:
    """Returns an error in one line of at most 400 characters."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not isinstance(error, OSError | ValueError | RuntimeError):
            text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:200]} ... {text[-195:]}"
