"""The small languages of simulate's flags: memory weights and the entries of a comparison."""

from collections.abc import Sequence
from dataclasses import replace

from experiments.durations import parse_numbers
from experiments.ordering import Ordering
from rrfp_jax.arbitration import READY, SCHEDULE, STRICT, hint_names
from rrfp_jax.schedules import schedule_names
from rrfp_jax.simulation import MemoryWeights


def parse_memory_weights(text: str | None) -> MemoryWeights:
    """``F,I,W``: what F holds, I frees and W frees."""
    if text is None:
        return MemoryWeights()
    weights = parse_numbers(text, "memory-weights", example="1,0.5,0.5")
    if len(weights) != 3:
        raise ValueError(f"memory-weights {text} has {len(weights)} numbers: write those of F, I and W, as 1,0.5,0.5")
    return MemoryWeights(forward=weights[0], input_gradient=weights[1], weight_gradient=weights[2])


def parse_entries(text: str, base: Ordering) -> list[tuple[str, Ordering]]:
    """``1f1b:strict,bf,bfw``: hints, and schedules consumed strictly or (without a word) as hints.

    ``base`` gives window and backward to all of them.
    """
    return [(entry, _entry(entry, base)) for entry in _distinct(text.split(","))]


def _distinct(entries: Sequence[str]) -> Sequence[str]:
    twice = sorted({entry for entry in entries if entries.count(entry) > 1})
    if twice:
        raise ValueError(f"compare names {', '.join(map(repr, twice))} twice: name each entry once")
    return entries


def _entry(entry: str, base: Ordering) -> Ordering:
    name, colon, consume = entry.partition(":")
    if colon and consume not in (READY, STRICT):
        raise ValueError(f"compare entry {entry!r} ends in {consume!r}: write {name}:{STRICT} or {name}:{READY}")
    if name in schedule_names() or name.endswith(".csv"):
        return replace(base, schedule=name, consume=consume or READY)
    if name not in hint_names() or name == SCHEDULE:
        known = ", ".join([*schedule_names(), *(hint for hint in hint_names() if hint != SCHEDULE)])
        raise ValueError(f"compare entry {entry!r} names no schedule and no hint: choose among {known}")
    if consume == STRICT:
        raise ValueError(f"compare entry {entry!r}: only a schedule can be consumed strictly, {name!r} is a hint")
    return replace(base, hint=name)
