"""What the fields of a record may hold, as rules with a name; each room's records are checked once, when made."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """What a value must be, in words that follow "give", and whether it is."""

    words: str
    holds: Callable[[Any], bool]


AT_LEAST_1 = Rule("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Rule("0 or more", lambda value: 0 <= value < math.inf)
POSITIVE = Rule("a positive number", lambda value: 0 < value < math.inf)
SECONDS = Rule("a positive number of seconds", lambda value: 0 < value < math.inf)


def check_fields(record: object, rule: Rule, *names: str) -> None:
    """Raise ValueError where a field of the record is not what the rule says; None always is."""
    for name in names:
        value = getattr(record, name)
        if value is not None and not rule.holds(value):
            raise ValueError(f"{name} is {value}: give {rule.words}")
