"""Reading ``config.json`` field by field, so that none is passed over.

Every field is either read by a family, or known to say nothing about what the model computes, or refused by name,
unless its value says that something is off.
"""

import math
from collections.abc import Mapping
from typing import Any

from rrfp_jax.bounded_text import shown
from rrfp_jax.exchange.silent_fields import SILENT

_MOST = (1 << 31) - 1


class ConfigFields:
    """The fields of one object of ``config.json``.

    Args:
        values: the object.
        where: what it is, for messages: the file, or the file and the way to the object.
        defaults: what the family gives a field that is missing.

    All methods raise ValueError, in one sentence with the field's name.
    """

    def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any]) -> None:
        self._values, self.where, self._defaults = values, where, defaults
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there, and not null."""
        return self._values.get(name) is not None

    def get(self, name: str, *older: str) -> Any:
        """The value of a field, or under an older name, or the family's."""
        self._read.update((name, *older))
        for each in (name, *older):
            if self._values.get(each) is not None:
                return self._values[each]
        # null is a value too, where there is something else by default
        return None if name in self._values else self._defaults.get(name)

    def whole(self, name: str, *older: str) -> int:
        """A whole number of at least 1."""
        value = self.get(name, *older)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise self.refusal(name, value, f"a whole number from 1 to {_MOST} is needed")
        return value

    def number(self, name: str) -> float:
        """Returns a number, neither infinite nor NaN."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, value, "a number is needed")
        if not abs(value) < math.inf:
            raise self.refusal(name, value, "a finite number is needed")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; null is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(name, value, "true or false is needed")
        return bool(value)

    def choice(self, name: str, known: Mapping[str, Any]) -> Any:
        """What one of several words stands for."""
        value = self.get(name)
        if not isinstance(value, str) or value not in known:
            raise self.refusal(name, value, f"models here know {', '.join(known)}")
        return known[value]

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """Refuse all other values than these and null."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.refusal(name, value, why)

    def part(self, name: str, defaults: Mapping[str, Any] | None = None) -> "ConfigFields":
        """The fields of an object in this one; of none where it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, value, "an object is needed")
        return ConfigFields(value or {}, f"{self.where}: {name}", defaults or {})

    def refusal(self, name: str, value: Any, why: str) -> ValueError:
        """The error for a field's value."""
        return ValueError(f"{self.where}: {name} is {shown(value)}: {why}")

    def finish(self) -> None:
        """Refuse the first field that nobody has read, unless it is silent or off."""
        for name, value in self._values.items():
            if name in self._read or name in SILENT or value is None or value is False or value in ({}, [], ""):
                continue
            raise self.refusal(name, value, "models here have nothing for this field")
