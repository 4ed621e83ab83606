"""Fields of records are judged by rules that say in words what to give."""

import math
from dataclasses import dataclass

import pytest

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, SECONDS, FieldRule, check_fields


@dataclass(frozen=True)
class Record:
    field: float | None
    other: float = 1


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (AT_LEAST_1, [1, 7], [0, -1]),
        (NOT_NEGATIVE, [0, 0.5], [-1, math.inf, math.nan]),
        (POSITIVE, [1e-9, 3], [0, -1, math.inf, math.nan]),
        (SECONDS, [0.1], [0, math.inf]),
    ],
)
def test_what_rules_hold_for(rule: FieldRule, good: list[float], bad: list[float]):
    for value in (None, *good):
        check_fields(Record(value), rule, "field", "other")
    for value in bad:
        with pytest.raises(ValueError, match=f"^field is {value}: give {rule.words}$"):
            check_fields(Record(value), rule, "other", "field")
