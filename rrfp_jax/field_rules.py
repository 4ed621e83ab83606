"""Rules for the fields of a record and the arguments of a function: their types, and rules with a name.

The records of each room are checked once, when they are made. Types are those of the annotations, so that a wrong type
ends in one sentence that names the field or argument, and not as an error out of the code that first computes with it.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rrfp_jax.readable import shown


class FieldRule(NamedTuple):
    """A condition on a value, in words that follow "give", and the function that tests it."""

    words: str
    holds: Callable[[Any], bool]


AT_LEAST_1 = FieldRule("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = FieldRule("0 or more", lambda value: 0 <= value < math.inf)
POSITIVE = FieldRule("a positive number", lambda value: 0 < value < math.inf)
SECONDS = FieldRule("a positive number of seconds", lambda value: 0 < value < math.inf)
MOST = 1 << 20
COUNTABLE = FieldRule(f"at most {MOST:,}", lambda value: value <= MOST)
"""FieldRule for numbers of which a list is made: a slip must not use up the memory of the machine."""

_F = TypeVar("_F", bound=Callable[..., Any])
_EXAMPLES = {
    "Placement": "such as linear(2)",
    "ScheduleTable": "as build_schedule makes it",
    "GradientTransformation": "such as optax.adamw(3e-4)",
}
_STAND_FOR: dict[Any, tuple[Any, ...]] = {tuple: (list, Iterator), frozenset: (list, tuple, Set, Iterator)}


_MOST = {
    **dict.fromkeys(("num_layers", "num_stages", "chunks_per_stage", "replicas", "data", "tensor"), 1 << 14),
    **dict.fromkeys(("num_heads", "num_kv_heads", "num_experts", "experts_per_token"), 1 << 16),
    **dict.fromkeys(("num_microbatches", "group_size", "offload", "recompute"), 1 << 16),
    **dict.fromkeys(
        ("devices", "batch_size", "length", "image_length", "max_patches", "patch_size", "merge", "image_size"), 1 << 24
    ),
    **dict.fromkeys(("vocab_size", "hidden", "head_dim", "mlp_dim", "shared_mlp_dim"), 1 << 31),
}
"""Upper bounds by the name of the field, far more than any machine has. Counted things are gone through one by one,
before anything shows how many there are, so a number that a file names is refused for itself."""


def check_fields(record: object, rule: FieldRule, *names: str) -> None:
    """Raise ValueError if a field of the record has a wrong type, breaks the rule, or is beyond all bounds.

    None is always accepted.
    """
    kind: Any = type(record)
    hints = _hints(kind)
    for name in names:
        value = getattr(record, name)
        if value is not None:
            _check_type(name, value, hints[name])
        if value is not None and not rule.holds(value):
            told = f"{value:.200}" if isinstance(value, str) else shown(value)
            raise ValueError(f"{name} is {told}: give {rule.words}")
        if name in _MOST and isinstance(value, int) and value > _MOST[name]:
            raise ValueError(f"{name} is {shown(value)}: give at most {_MOST[name]}")


def fill_fields(record: object, choice: str, what: str, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Gives the fields of a frozen record that are None their defaults, where they belong to the kind in ``choice``.

    ``known`` has the fields of every kind with their defaults; ``what`` is the noun of the kinds, for messages.

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


# -- patterns of names -------------------------------------------------------------------------------------------------


def matches(pattern: str, name: str) -> bool:
    """Whether a layer of this name is one that the pattern stands for."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def nearest_name(pattern: str, names: Sequence[str]) -> str:
    """Returns words on the layer, or the beginning of names, that is most like a pattern."""
    parts = [name.split(".") for name in names]
    choices = dict.fromkeys(".".join(part[:end]) for part in parts for end in range(1, len(part) + 1))
    nearest = difflib.get_close_matches(pattern, choices, n=1, cutoff=0.0)
    return f"the nearest is {nearest[0]!r}" if nearest else "the model has no layers"


# -- types -------------------------------------------------------------------------------------------------------------


def check_types(record: object, *names: str) -> None:
    """Raise ValueError if a field of a frozen record, one of ``names`` or any at all, is not of its annotated type.

    Lists and sets in place of tuples and frozen sets are converted, so that the record stays hashable.
    """
    kind: Any = type(record)
    hints = _hints(kind)
    for name in names or hints:
        value = getattr(record, name)
        if (fitted := _fitted(value, hints[name])) is not value:
            object.__setattr__(record, name, fitted)
        _check_type(name, fitted, hints[name])


def typed(function: _F) -> _F:
    """Returns the function with a check that raises ValueError for arguments that are not of their annotated types."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        hints = _hints(function)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # Python's own words for a missing or unknown argument are good
            return function(*args, **kwargs)
        for name, value in given.items():
            if name in hints:
                _check_type(name, value, hints[name])
        return function(*args, **kwargs)

    return cast(_F, checked)


def is_whole(value: object) -> bool:
    """Returns whether a value is a whole number, of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def with_type(value: object) -> str:
    """Returns a value with its type for messages: on one line, shortened if it is long."""
    return f"{' '.join(shown(value).split())} ({type(value).__name__})"


@cache
def _hints(of: Any) -> dict[str, Any]:
    hints = get_type_hints(of)
    return {name: hints[name] for name in getattr(of, "__dataclass_fields__", hints) if name in hints}


def _check_type(name: str, value: Any, hint: Any) -> None:
    rule = _rule(hint)
    if not rule.holds(value):
        raise ValueError(f"{name} is {with_type(value)}: give {rule.words}")


def _fitted(value: Any, hint: Any) -> Any:
    """Returns a list, a set or an iterator as the tuple or frozen set that the annotation has, if it has one."""
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        wanted: Any = get_origin(kind)
        if isinstance(value, _STAND_FOR.get(wanted, ())) and not isinstance(value, wanted):
            try:
                return wanted(value)
            except TypeError:  # a set cannot hold such items
                return value
    return value


@cache
def _rule(hint: Any) -> FieldRule:
    """Returns the rule for a value of this annotation, as far as it can be told without looking into generators."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        rules = [_rule(argument) for argument in arguments]
        words = ", ".join(rule.words for rule in rules[:-1]) + f" or {rules[-1].words}"
        return FieldRule(words, lambda value: any(rule.holds(value) for rule in rules))
    if origin is Literal:
        return FieldRule(f"one of {', '.join(map(str, arguments))}", lambda value: value in arguments)
    says_nothing = getattr(hint, "_is_protocol", False) or isinstance(hint, TypeVar)
    simple = Any if says_nothing and origin is None else origin or hint
    if simple in _SIMPLE:
        return _SIMPLE[simple]
    if origin is not None:
        return _collection_rule(origin, arguments)
    names = getattr(hint, "_fields", None)  # of a named tuple: anything with these attributes will do, as in optax
    return FieldRule(
        _named(hint),
        lambda value: isinstance(value, hint) if names is None else all(hasattr(value, name) for name in names),
    )


_SIMPLE: dict[Any, FieldRule] = {
    Any: FieldRule("anything", lambda value: True),
    Callable: FieldRule("a function", callable),
    NoneType: FieldRule("None", lambda value: value is None),
    bool: FieldRule("True or False", lambda value: type(value).__name__.rstrip("_") == "bool"),  # also NumPy's
    int: FieldRule("a whole number", is_whole),
    float: FieldRule("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    str: FieldRule("text", lambda value: isinstance(value, str)),
}


_PLURALS = {"text": "texts", "anything": "values", "a dictionary": "dictionaries"}


def _collection_rule(origin: Any, arguments: tuple[Any, ...]) -> FieldRule:
    if issubclass(origin, Mapping):
        key, item = map(_rule, arguments)
        return FieldRule(
            "a dictionary",
            lambda value: isinstance(value, Mapping) and all(key.holds(k) and item.holds(v) for k, v in value.items()),
        )
    if origin is tuple and arguments[1:] != (...,):
        rules = [_rule(argument) for argument in arguments]
        return FieldRule(
            f"{len(rules)} values ({', '.join(rule.words for rule in rules)})",
            lambda value: (
                isinstance(value, tuple | list)
                and len(value) == len(rules)
                and all(rule.holds(item) for rule, item in zip(rules, value, strict=True))
            ),
        )
    if issubclass(origin, Iterable):
        each, kinds = _rule(arguments[0]), {tuple: Sequence, list: Sequence, frozenset: Set}.get(origin, origin)
        article, _, noun = each.words.partition(" ")
        plural = _PLURALS.get(each.words) or (f"{noun}s" if article in ("a", "an") else each.words)
        return FieldRule(
            f"a {'set' if kinds is Set else 'list'} of {plural}",
            lambda value: (
                isinstance(value, kinds)
                and not isinstance(value, str | bytes)
                and getattr(value, "shape", None) != ()  # such an array only says it is iterable
                and (not isinstance(value, Collection) or all(map(each.holds, value)))
            ),
        )
    return FieldRule(_named(origin), lambda value: isinstance(value, origin))


def _named(kind: Any) -> str:
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return " ".join(filter(None, (article, kind.__name__, _EXAMPLES.get(kind.__name__))))
