"""The small languages of simulate's flags: jitter, link delays, message sizes, entries of a comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.durations import Durations, parse_numbers
from experiments.ordering import Ordering
from rrfp_jax.arbitration import READY, SCHEDULE, STRICT, hint_names
from rrfp_jax.schedules import schedule_names
from rrfp_jax.simulation import PAPER_LEVELS, InjectedSleeps, MemoryWeights, bimodal, lognormal, paper, straggler
from rrfp_jax.tasks import Placement

JITTER_FORMS = "lognormal:SIGMA, bimodal:PROBABILITY,FACTOR, paper:J0|J1|J2|J3, straggler:STAGE,FACTOR"

_Factor = Callable[[Durations, Placement, np.random.Generator], Durations]


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """What ``--jitter`` says: factors on the durations, one after the other, and at most one level of sleeps."""

    factors: tuple[_Factor, ...] = ()
    level: str | None = None

    def apply(
        self, durations_ms: Durations, placement: Placement, rng: np.random.Generator
    ) -> tuple[Durations, InjectedSleeps | None]:
        """The durations of every step with jitter, and the sleeps that depend on the order, if any."""
        for factor in self.factors:
            durations_ms = factor(durations_ms, placement, rng)
        sleeps = paper(PAPER_LEVELS[self.level], durations_ms.shape, rng) if self.level else None
        return durations_ms, sleeps


def parse_jitter(text: str | None) -> Jitter:
    """One form of :data:`JITTER_FORMS`, or several joined by ``+``."""
    jitter = Jitter()
    for part in text.split("+") if text else ():
        name, _, argument = part.partition(":")
        if name == "paper":
            if argument not in PAPER_LEVELS or jitter.level:
                raise ValueError(f"jitter {part!r} is not one level of {', '.join(PAPER_LEVELS)}: write paper:J3")
            jitter = replace(jitter, level=argument)
        else:
            jitter = replace(jitter, factors=(*jitter.factors, _factor(part, name, argument)))
    return jitter


def _factor(part: str, name: str, argument: str) -> _Factor:
    counts = {"lognormal": 1, "bimodal": 2, "straggler": 2}
    if name not in counts:
        raise ValueError(f"jitter {part!r} is unknown: write one of {JITTER_FORMS}, or several joined by +")
    numbers = parse_numbers(argument, f"jitter {name}", example=JITTER_FORMS)
    if len(numbers) != counts[name]:
        raise ValueError(f"jitter {part!r} has {len(numbers)} numbers instead of {counts[name]}: write {JITTER_FORMS}")
    if name == "lognormal":
        return lambda durations_ms, _, rng: lognormal(durations_ms, numbers[0], rng)
    if name == "bimodal":
        return lambda durations_ms, _, rng: bimodal(durations_ms, numbers[0], numbers[1], rng)
    stage = int(numbers[0])
    if stage != numbers[0]:
        raise ValueError(f"jitter {part!r} names no stage: write for example straggler:2,1.5")
    return lambda durations_ms, placement, _: straggler(durations_ms, placement, stage, numbers[1])


def parse_link_delays_ms(text: str | None) -> dict[tuple[int, int], float]:
    """``6-7:30`` or ``0-1:5,6-7:30``: extra milliseconds on the link between two stages, both directions."""
    delays: dict[tuple[int, int], float] = {}
    for part in text.split(",") if text else ():
        stages, _, delay = part.partition(":")
        try:
            a, b = (int(stage) for stage in stages.split("-"))
            delays[a, b] = float(delay)
        except ValueError:
            raise ValueError(
                f"link-delay-ms {part!r} is not a delay: write two stages and milliseconds, for example 6-7:30"
            ) from None
    return delays


def parse_message_bytes(text: str | None) -> tuple[float, float]:
    """``A`` or ``A,G``: the bytes of an activation and of a gradient."""
    if text is None:
        return 0.0, 0.0
    sizes = parse_numbers(text, "message-bytes", example="33554432,33554432")
    if len(sizes) > 2:
        raise ValueError(f"message-bytes {text} has {len(sizes)} numbers: write those of an activation and a gradient")
    return sizes[0], sizes[-1]


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
