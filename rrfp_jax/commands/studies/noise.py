"""Jitter on task durations: the flags that simulate and levels share, and the costs that result."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rrfp_jax.commands.studies.durations import Durations, parse_numbers
from rrfp_jax.schedules import Placement
from rrfp_jax.simulation import PAPER_LEVELS, Costs, InjectedSleeps, bimodal, lognormal, paper, straggler

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


def add_noise_arguments(group: argparse._ArgumentGroup) -> None:
    """``--jitter`` and ``--seed``."""
    add = group.add_argument
    add(
        "--jitter",
        metavar="FORM",
        help=f"how durations vary: {JITTER_FORMS}; several joined by + (default: not at all)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the jitter; the same tasks meet the same noise whatever the order",
    )


def check_noise(arguments: argparse.Namespace) -> None:
    """Raise ValueError, with the remedy, where these flags mean nothing."""
    if arguments.seed < 0:
        raise ValueError(f"seed is {arguments.seed}: give 0 or more")
    parse_jitter(arguments.jitter)


def make_costs(arguments: argparse.Namespace, durations_ms: Durations, placement: Placement) -> Costs:
    """Durations of every step, with the jitter asked for."""
    rng = np.random.default_rng(arguments.seed)
    durations_ms, sleeps = parse_jitter(arguments.jitter).apply(durations_ms, placement, rng)
    return Costs(durations_ms=durations_ms, sleeps=sleeps)
