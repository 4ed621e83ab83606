"""A choice among orders by the time that they take."""

from dataclasses import dataclass
from typing import Any

from rrfp_jax.schedules.language.stage import Described, Mistake


@dataclass(frozen=True)
class Quickest(Described):
    """The alternative that strict execution ends first with the profiled times; as a hint the first one ranks."""

    alternatives: tuple[Described, ...]


def quickest(*alternatives: Any) -> Quickest:
    """Of these orders the one that takes least time with the profiled times; of equal ones the first."""
    if not alternatives:
        raise Mistake("quickest has nothing to choose from: give it orders")
    wrong = next((one for one in alternatives if not isinstance(one, Described)), None)
    if wrong is not None:
        raise Mistake(f"quickest chooses among orders, not {wrong!r}")
    return Quickest(alternatives)
