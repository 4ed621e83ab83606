"""What the fields of a record may hold, as rules with a name; each room's records are checked once, when made."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rrfp_jax.bounded_text import shown


class Rule(NamedTuple):
    """What a value must be, in words that follow "give", and whether it is."""

    words: str
    holds: Callable[[Any], bool]


AT_LEAST_1 = Rule("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Rule("0 or more", lambda value: 0 <= value < math.inf)
POSITIVE = Rule("a positive number", lambda value: 0 < value < math.inf)
SECONDS = Rule("a positive number of seconds", lambda value: 0 < value < math.inf)


_MOST = {
    **dict.fromkeys(("num_layers", "num_stages", "chunks_per_stage", "encoder_stages", "data", "tensor"), 1 << 14),
    **dict.fromkeys(("num_heads", "num_kv_heads", "num_experts", "experts_per_token"), 1 << 16),
    **dict.fromkeys(("num_microbatches", "group_size", "offload", "recompute"), 1 << 16),
    **dict.fromkeys(
        ("devices", "batch_size", "length", "image_length", "max_patches", "patch_size", "merge", "image_size"), 1 << 24
    ),
    **dict.fromkeys(("vocab_size", "hidden", "head_dim", "mlp_dim", "shared_mlp_dim"), 1 << 31),
}
"""Far more than any machine has, by the name of the field. What is counted is gone through one by one, before anything
shows how much of it there is; so a number that a file names is refused for itself."""


def check_fields(record: object, rule: Rule, *names: str) -> None:
    """Raise ValueError where a field of the record is not what the rule says, or beyond all bounds; None never is."""
    for name in names:
        value = getattr(record, name)
        if value is not None and not rule.holds(value):
            raise ValueError(f"{name} is {shown(value)}: give {rule.words}")
        if name in _MOST and isinstance(value, int) and value > _MOST[name]:
            raise ValueError(f"{name} is {shown(value)}: give at most {_MOST[name]}")


def fill_fields(record: object, choice: str, what: str, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Of a frozen record whose field ``choice`` names a kind: give the kind's own fields that are None their defaults.

    ``known`` has the fields of every kind with their defaults; ``what`` is what there are kinds of, for messages.

    Raises ValueError where the kind is not known, or where a field that only others have is not None.
    """
    kind = getattr(record, choice)
    if kind not in known:
        raise ValueError(f"{choice} is {kind!r}: give one of {', '.join(known)}")
    own = known[kind]
    for field in dict.fromkeys(field for fields in known.values() for field in fields):
        if field in own and getattr(record, field) is None:
            object.__setattr__(record, field, own[field])
        elif field not in own and getattr(record, field) is not None:
            has = f"which has {', '.join(own)}" if own else "which has none"
            raise ValueError(f"{field} is no field of the {what} {kind}, {has}: leave {field} out, or make it null")
