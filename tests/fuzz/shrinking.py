"""Find the simplest composition that shows the same finding, greedily: one field at a time."""

import time
from collections.abc import Callable

from tests.fuzz.composition import Composition, simpler
from tests.fuzz.trial import Outcome, tried


def shrunk(
    composition: Composition,
    outcome: Outcome,
    *,
    attempt: Callable[[Composition], Outcome] = tried,
    most_s: float = 60.0,
) -> Composition:
    """Returns a composition of which no single field can be made simpler without losing the finding, or the simplest
    one until ``most_s`` have passed."""
    end_s = time.monotonic() + most_s
    found, goes_on = composition, True
    refused: set[Composition] = set()
    while goes_on:
        goes_on = False
        for candidate in simpler(found):
            if time.monotonic() > end_s:
                return found
            if candidate in refused:
                continue
            if _is_same(attempt(candidate), outcome):
                found, goes_on = candidate, True
                break
            refused.add(candidate)
    return found


def _is_same(outcome: Outcome, wanted: Outcome) -> bool:
    return outcome.kind == wanted.kind and outcome.sentence == wanted.sentence
