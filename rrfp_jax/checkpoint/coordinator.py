"""What a checkpoint needs to know of the run's other processes."""

from collections.abc import Mapping
from typing import Any, Protocol


class Coordinator(Protocol):
    """Brings the ranks of a run together; all make the same calls in the same order, from one thread at a time."""

    rank: int

    def gather(self, name: str, data: Any = None, *, deadline_s: float) -> Mapping[int, Any]:
        """Bring plain data, and return everybody's by rank, once every rank has brought its own.

        ``name`` is new for every gathering, and the same on all ranks. Raises ConnectionError where a rank is lost or
        does not come within the deadline.
        """


class Alone:
    """The coordinator of a run of one process."""

    rank = 0

    def gather(self, name: str, data: Any = None, *, deadline_s: float) -> Mapping[int, Any]:  # noqa: ARG002
        """This process's data."""
        return {0: data}


class Gatherings:
    """Numbers the gatherings of a coordinator, so that their names differ."""

    def __init__(self, coordinator: Coordinator, *, deadline_s: float) -> None:
        self._coordinator, self._deadline_s, self._number = coordinator, deadline_s, 0
        self.rank = coordinator.rank

    def gather(self, what: str, data: Any = None) -> list[Any]:
        """Everybody's data, rank 0's first."""
        self._number += 1
        brought = self._coordinator.gather(f"checkpoint {self._number} {what}", data, deadline_s=self._deadline_s)
        return [brought[rank] for rank in sorted(brought)]

    def from_first(self, what: str, data: Any = None) -> Any:
        """What rank 0 has brought."""
        return self.gather(what, data)[0]
