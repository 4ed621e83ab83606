"""What happens between tasks: the flags that simulate and levels share, and the machine that they describe."""

import argparse
import math

from rrfp_jax.arbitration import DecisionTimer, Dispatch, Order, StageArbiter, dispatch_of
from rrfp_jax.arbitration.dispatch import CERTAIN, JUST_IN_TIME, parse_dispatch
from rrfp_jax.commands.studies.durations import parse_numbers
from rrfp_jax.commands.studies.execution import RULES
from rrfp_jax.simulation import Communication, Links, Machine, both_directions


def add_machine_arguments(group: argparse._ArgumentGroup) -> None:
    """Links, communication and the host's overheads."""
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
    """The machine of these flags, ``--num-stages`` and ``--seed``; raises ValueError with the remedy."""
    how = dispatch(arguments)
    if arguments.comm not in tuple(Communication):
        raise ValueError(f"comm {arguments.comm!r} is unknown: choose one of {', '.join(Communication)}")
    if arguments.comm != Communication.ASYNC and (arguments.contention or how.is_early):
        flag = "contention" if arguments.contention else "dispatch-ahead"
        raise ValueError(f"{flag} has no effect with {arguments.comm} communication: leave it out, or take async")
    if (arguments.message_bytes is None) != (arguments.bandwidth_gb_per_s is None):
        raise ValueError("--message-bytes and --bandwidth-gb-per-s belong together: give both or neither")
    activation_bytes, gradient_bytes = parse_message_bytes(arguments.message_bytes)
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
    """When stages are handed their next task; raises ValueError with the remedy."""
    return dispatch_of(parse_dispatch(arguments.dispatch_ahead), on_host=False)


def arbiters_of(order: Order, arguments: argparse.Namespace) -> list[StageArbiter]:
    """Fresh arbiters of all stages, for steps of tasks alone."""
    how = dispatch(arguments)
    return order.arbiters(RULES, certain_ahead=how.certain)


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
