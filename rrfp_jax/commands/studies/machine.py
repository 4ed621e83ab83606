"""The simulated machine: the options of simulate and levels for links, host and jitter, and how stages run on it."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rrfp_jax.commands.studies.work import Profile, parse_numbers
from rrfp_jax.core import Agreement, DecisionTimer, Dispatch, Order, StageArbiter, StepRules, dispatch_of
from rrfp_jax.core.dispatch import CERTAIN, JUST_IN_TIME, parse_dispatch
from rrfp_jax.schedules import Placement, ScheduleTable, Task, TaskKind
from rrfp_jax.schedules.slots import SlotLengths, per_stage
from rrfp_jax.simulation import (
    PAPER_LEVELS,
    Communication,
    Costs,
    InjectedSleeps,
    Links,
    Machine,
    bimodal,
    both_directions,
    lognormal,
    paper,
    straggler,
)
from rrfp_jax.simulation.costs import Durations


def add_machine_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options for links, communication and the host's overheads."""
    add = group.add_argument
    add(
        "--comm",
        metavar="|".join(Communication),
        default="async",
        help="who is occupied while a tensor travels: nobody, the sender, or both",
    )
    add("--comm-ms", type=float, default=0.0, metavar="MS", help="latency of every tensor between stages")
    add("--message-bytes", metavar="A[,G]", help="size of an activation and of a gradient; needs --bandwidth-gb-per-s")
    add(
        "--bandwidth-gb-per-s",
        type=float,
        metavar="X",
        help="bandwidth of each directed link, in 10^9 bytes per second; needs --message-bytes",
    )
    add("--contention", action="store_true", help="a directed link carries one tensor at a time (async only)")
    add("--link-delay-ms", metavar="A-B:MS,...", help="extra latency of a link, both directions, as 6-7:30")
    add("--dispatch-overhead-ms", type=float, default=0.0, metavar="MS", help="what the host takes for every task")
    add(
        "--dispatch-ahead",
        default="0",
        metavar=f"0|{JUST_IN_TIME}|{CERTAIN}",
        help="when a stage is handed its next task: at the end of the running one, when that is about to end, or once "
        "nothing can change the choice (default 0)",
    )
    add(
        "--agreement-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="what the processes of one stage take to agree on every task",
    )
    add("--control-ms", type=float, default=0.0, metavar="MS", help="latency of the reports and verdicts between steps")
    add(
        "--announce-ms",
        type=float,
        metavar="MS",
        help="latency of what foresight announces (default: as of a tensor without bytes)",
    )
    add(
        "--announce-loss",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the announcements that never arrive, from 0 to 1",
    )


def make_machine(arguments: argparse.Namespace) -> Machine:
    """Returns the machine of these options, ``--num-stages`` and ``--seed``; raises ValueError with the remedy."""
    how = dispatch(arguments)
    if arguments.comm not in tuple(Communication):
        raise ValueError(f"comm {arguments.comm!r} is unknown: choose one of {', '.join(Communication)}")
    if arguments.comm != Communication.ASYNC and (arguments.contention or how.is_early):
        flag = "contention" if arguments.contention else "dispatch-ahead"
        raise ValueError(f"{flag} has no effect with {arguments.comm} communication: leave it out, or take async")
    if (arguments.message_bytes is None) != (arguments.bandwidth_gb_per_s is None):
        raise ValueError("--message-bytes and --bandwidth-gb-per-s belong together: give both or neither")
    activation_bytes, gradient_bytes = _message_bytes(arguments.message_bytes)
    links = Links(
        latency_ms=arguments.comm_ms,
        activation_bytes=activation_bytes,
        gradient_bytes=gradient_bytes,
        bandwidth_gb_per_s=math.inf if arguments.bandwidth_gb_per_s is None else arguments.bandwidth_gb_per_s,
        extra_ms=both_directions(parse_link_delays_ms(arguments.link_delay_ms), arguments.num_stages),
        control_ms=arguments.control_ms,
        announce_ms=arguments.announce_ms,
        announce_loss=arguments.announce_loss,
        loss_seed=arguments.seed,
        contention=arguments.contention,
    )
    return Machine(
        links=links,
        communication=Communication(arguments.comm),
        dispatch_overhead_ms=arguments.dispatch_overhead_ms,
        agreement_ms=arguments.agreement_ms,
        just_in_time=DecisionTimer if how.just_in_time else None,
    )


def dispatch(arguments: argparse.Namespace) -> Dispatch:
    """Returns when stages are handed their next task; raises ValueError with the remedy."""
    return dispatch_of(parse_dispatch(arguments.dispatch_ahead), on_host=False)


def arbiters_of(order: Order, arguments: argparse.Namespace) -> list[StageArbiter]:
    """Returns fresh arbiters of all stages, for steps of tasks alone."""
    how = dispatch(arguments)
    return order.arbiters(RULES, certain_ahead=how.certain)


def parse_link_delays_ms(text: str | None) -> dict[tuple[int, int], float]:
    """Returns the extra milliseconds on links between two stages, both directions, from a text as ``0-1:5,6-7:30``."""
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


def _message_bytes(text: str | None) -> tuple[float, float]:
    """Returns the bytes of an activation and of a gradient from a text ``A`` or ``A,G``."""
    if text is None:
        return 0.0, 0.0
    sizes = parse_numbers(text, "message-bytes", example="33554432,33554432")
    if len(sizes) > 2:
        raise ValueError(f"message-bytes {text} has {len(sizes)} numbers: write those of an activation and a gradient")
    return sizes[0], sizes[-1]


RULES = StepRules(updates=False, agreement=Agreement.ALL)
"""Rules of a simulated step: it ends for all stages when all have reported the end of their tasks, as in emulate."""


def chunk_durations(table: ScheduleTable, durations_ms: Profile, parts: Sequence[float] = ()) -> Durations:
    """Returns F, I and W of a stage divided among its chunks by ``parts``, [1, chunks, microbatches, 3]."""
    length = per_stage(table, SlotLengths(*durations_ms), parts)
    kinds = (TaskKind.F, TaskKind.I, TaskKind.W)
    by_chunk = [[length(Task(kind, chunk, 0)) for kind in kinds] for chunk in range(table.graph.num_chunks)]
    return np.repeat(np.array([by_chunk], np.float64)[:, :, None], table.graph.num_microbatches, axis=2)


_JITTER_FORMS = "lognormal:SIGMA, bimodal:PROBABILITY,FACTOR, paper:J0|J1|J2|J3, straggler:STAGE,FACTOR"

_Factor = Callable[[Durations, Placement, np.random.Generator], Durations]


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Jitter of a run: factors on the durations, one after the other, and at most one level of sleeps."""

    factors: tuple[_Factor, ...] = ()
    level: str | None = None

    def apply(
        self, durations_ms: Durations, placement: Placement, rng: np.random.Generator
    ) -> tuple[Durations, InjectedSleeps | None]:
        """Returns the durations of every step with jitter, and the sleeps that depend on the order, if any."""
        for factor in self.factors:
            durations_ms = factor(durations_ms, placement, rng)
        sleeps = paper(PAPER_LEVELS[self.level], durations_ms.shape, rng) if self.level else None
        return durations_ms, sleeps


def parse_jitter(text: str | None) -> Jitter:
    """Returns the jitter of a text: one form of ``_JITTER_FORMS``, or several joined by ``+``."""
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
        raise ValueError(f"jitter {part!r} is unknown: write one of {_JITTER_FORMS}, or several joined by +")
    numbers = parse_numbers(argument, f"jitter {name}", example=_JITTER_FORMS)
    if len(numbers) != counts[name]:
        raise ValueError(f"jitter {part!r} has {len(numbers)} numbers instead of {counts[name]}: write {_JITTER_FORMS}")
    if name == "lognormal":
        return lambda durations_ms, _, rng: lognormal(durations_ms, numbers[0], rng)
    if name == "bimodal":
        return lambda durations_ms, _, rng: bimodal(durations_ms, numbers[0], numbers[1], rng)
    stage = int(numbers[0])
    if stage != numbers[0]:
        raise ValueError(f"jitter {part!r} names no stage: write for example straggler:2,1.5")
    return lambda durations_ms, placement, _: straggler(durations_ms, placement, stage, numbers[1])


def add_noise_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options ``--jitter`` and ``--seed``."""
    add = group.add_argument
    add(
        "--jitter",
        metavar="FORM",
        help=f"how durations vary: {_JITTER_FORMS}; several joined by + (default: not at all)",
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
    """Returns the costs of every step, with the requested jitter."""
    rng = np.random.default_rng(arguments.seed)
    durations_ms, sleeps = parse_jitter(arguments.jitter).apply(durations_ms, placement, rng)
    return Costs(durations_ms=durations_ms, sleeps=sleeps)
