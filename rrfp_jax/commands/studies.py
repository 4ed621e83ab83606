"""The setting of a simulated or emulated run, from its options: how long tasks take, which chunks feed which, on which
machine, and with which noise.

Durations are constants, a file, or the trace of a recorded run. A file also tells which pairs of chunk and microbatch
do not exist in a step, for example without images.

Without options about the graph a schedule makes its own chain. ``--encoders 2,1`` gives two encoders, of two chunks and
of one, whose last chunks feed the first chunk of a decoder; each chunk has a stage of its own unless
``--stage-of-chunk`` says otherwise. The decoder runs a microbatch without the encoders that the microbatch skips.
"""

import argparse
import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import Agreement, DecisionTimer, Dispatch, Order, StageArbiter, StepRules, dispatch_of
from rrfp_jax.core.dispatch import CERTAIN, JUST_IN_TIME, PAIRS, parse_dispatch
from rrfp_jax.record_files import parse_json, read_record
from rrfp_jax.schedules import (
    Absences,
    Edge,
    PipelineGraph,
    Placement,
    ScheduleTable,
    Task,
    TaskKind,
    absences,
    linear,
    schedule_entry,
)
from rrfp_jax.schedules.registry import is_schedule, schedules_of_any_graph
from rrfp_jax.schedules.slots import SlotLengths, per_stage
from rrfp_jax.schedules.timeline import Span, Timeline
from rrfp_jax.simulation import (
    PAPER_LEVELS,
    Communication,
    Costs,
    InjectedSleeps,
    Links,
    Machine,
    bimodal,
    both_directions,
    check_durations,
    constant,
    for_graph,
    lognormal,
    paper,
    recorded,
    straggler,
)
from rrfp_jax.simulation.costs import Durations

_BETWEEN_COLLECTIONS = 100_000
"""Records that are made and not yet gone before the garbage collector looks for cycles."""
_MOST_NUMBERS = 1 << 25
"""Largest number of durations in a file: 256 MB of them."""
Profile = tuple[float, float, float]
RULES = StepRules(updates=False, agreement=Agreement.ALL)
"""Rules of a simulated step: it ends for all stages when all have reported the end of their tasks, as in emulate."""
_JITTER_FORMS = "lognormal:SIGMA, bimodal:PROBABILITY,FACTOR, paper:J0|J1|J2|J3, straggler:STAGE,FACTOR"

# -- durations -------------------------------------------------------------------------------------------------------


class ConstantDurations:
    """The same three numbers, in milliseconds, for every chunk and microbatch; slices of a chunk share them.

    Like the other sources of durations it has ``num_steps``; ``absent``, the pairs of chunk and microbatch that each
    step lacks (empty: none is lacking); and two methods, which are described here once.
    """

    num_steps = 1
    absent: Sequence[Absences] = ()

    def __init__(self, durations_ms: Profile) -> None:
        self.durations_ms = durations_ms

    def for_graph(self, graph: PipelineGraph) -> Durations:
        """Returns the durations of this pipeline, [steps, chunks, microbatches, 3]; raises ValueError where they do not
        fit it."""
        shares = np.array(graph.weights or 1.0).reshape(-1, 1, 1)
        return constant(self.durations_ms, graph) * shares

    def profile_ms(self) -> Profile:
        """Returns the mean F, input gradient and weight gradient of one chunk, in milliseconds."""
        return self.durations_ms


class GivenDurations:
    """An array [steps, chunks, microbatches, 3] of milliseconds, in which pairs that do not exist take none."""

    def __init__(self, durations_ms: Durations, absent: Sequence[Absences] = ()) -> None:
        self.durations_ms, self.absent = durations_ms, absent
        self.num_steps: int = durations_ms.shape[0]

    def for_graph(self, graph: PipelineGraph) -> Durations:
        return for_graph(self.durations_ms, graph)

    def profile_ms(self) -> Profile:
        forward, input_gradient, weight_gradient = self.durations_ms.mean(axis=(0, 1, 2)).tolist()
        return forward, input_gradient, weight_gradient


class RecordedDurations:
    """Durations of the tasks of a recorded run: means per chunk and kind, or every task by itself.

    Task by task, a pair without a forward in a step was not there in that step, where its chunk may be skipped.
    """

    def __init__(self, timeline: Timeline, *, per_task: bool) -> None:
        self.timeline, self.per_task = timeline, per_task
        self.num_steps = len(timeline.steps()) if per_task else 1
        self.absent: Sequence[Absences] = ()
        if per_task:
            steps = [
                {(s.task.chunk, s.task.microbatch) for s in step.spans if s.task.kind is TaskKind.F}
                for step in timeline.by_step()
            ]
            chunks, microbatches = (range(1 + max(numbers)) for numbers in zip(*set().union(*steps), strict=True))
            every = {(chunk, m) for chunk in chunks for m in microbatches}
            missing = [absences(every - present) for present in steps]
            self.absent = missing if any(missing) else ()

    def for_graph(self, graph: PipelineGraph) -> Durations:
        # Chunks that only lead to optional edges may be skipped, as encoders of images are.
        skippable: set[int] = set()
        for chunk in reversed(range(graph.num_chunks)):
            readers = [s for s in graph.successors(chunk) if chunk not in graph.optional_predecessors(s)]
            if graph.successors(chunk) and skippable.issuperset(readers):
                skippable.add(chunk)
        may_lack = skippable | dict(graph.absent).keys()
        if not self.absent or any(chunk not in may_lack for pairs in self.absent for chunk, _ in pairs):
            # This call also names a task that is missing although its chunk may not be skipped.
            return recorded(self.timeline, graph, per_task=self.per_task)
        steps = zip(self.timeline.by_step(), self.absent, strict=True)
        return np.concatenate([recorded(step, graph.skipping(pairs), per_task=True) for step, pairs in steps])

    def profile_ms(self) -> Profile:
        by_kind: dict[TaskKind, list[float]] = defaultdict(list)
        for span in self.timeline.spans:
            by_kind[span.task.kind].append((span.end_s - span.start_s) * 1e3)
        forward, fused, input_gradient, weight_gradient = (
            fmean(by_kind[kind]) if by_kind[kind] else 0.0 for kind in (TaskKind.F, TaskKind.B, TaskKind.I, TaskKind.W)
        )
        return forward, input_gradient or fused, weight_gradient


DurationSource = ConstantDurations | GivenDurations | RecordedDurations


def parse_durations_ms(text: str, flag: str = "durations-ms") -> Profile:
    """Returns F, input gradient and weight gradient of a text such as ``10,10,10``, in milliseconds or another unit."""
    numbers = parse_numbers(text, flag, example="10,10,10")
    if len(numbers) != 3 or min(numbers) < 0:
        raise ValueError(
            f"{flag} {text} must be three numbers, 0 or more, for F, input gradient and weight gradient: write 10,10,10"
        )
    forward, input_gradient, weight_gradient = numbers
    return forward, input_gradient, weight_gradient


def parse_numbers(text: str, flag: str, *, example: str) -> Sequence[float]:
    """Returns the numbers between commas; raises ValueError with the flag and an example."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not np.isfinite(numbers).all():
        raise ValueError(f"{flag} {text!r} is not made of numbers: write for example {example}")
    return numbers


def load_durations(path: str) -> GivenDurations:
    """Returns the durations in an ``.npy`` file, milliseconds as float64 [steps, chunks, microbatches, 3].

    A pair of chunk and microbatch that does not exist in a step is NaN there. Raises ValueError where the file is
    missing, is not one array of real numbers, or holds no such durations.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # a map checks the file's size against its head
    except OSError as error:
        raise ValueError(f"cannot read durations {path}: {error.strerror or 'it is not an .npy file'}") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"durations {path} are not a whole .npy file of numbers: write it with numpy.save") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise ValueError(f"durations {path} do not hold one array of real numbers: write it with numpy.save")
    if array.size > _MOST_NUMBERS:
        raise ValueError(f"durations {path} hold more than {_MOST_NUMBERS} numbers: give fewer steps")
    try:
        return from_array(array.astype(np.float64))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_array(durations_ms: Durations) -> GivenDurations:
    """Returns durations from an array in which absent pairs are NaN; raises ValueError for impossible ones."""
    missing = np.isnan(durations_ms)
    if durations_ms.ndim == 4 and (missing.any(axis=-1) != missing.all(axis=-1)).any():
        raise ValueError("durations are NaN for some tasks of a pair only: a pair that does not exist has no task")
    for step in range(len(durations_ms)):
        if missing[step].all():
            raise ValueError(f"durations of step {step} are non-finite everywhere: give milliseconds for what exists")
    present_ms = np.where(missing, 0.0, durations_ms)
    check_durations(present_ms)
    pairs = [
        absences((chunk, m) for chunk, m in np.argwhere(missing[step].all(axis=-1)).tolist())
        for step in range(len(missing))
    ]
    return GivenDurations(present_ms, pairs if any(pairs) else ())


def load_trace(path: str) -> Timeline:
    """Returns the tasks in a trace file that a run has written; raises ValueError for anything else."""
    try:
        events = parse_json(read_record(Path(path))[0])["traceEvents"]
        spans = [
            Span(
                event["args"]["step"],
                event["pid"] - 1,
                Task.parse(event["name"]),
                event["ts"] / 1e6,
                (event["ts"] + event["dur"]) / 1e6,
            )
            for event in events
            if event["ph"] == "X" and event["cat"].startswith("task,")
        ]
    except OSError as error:
        raise ValueError(f"cannot read trace {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace of a run: give the trace.json of a run directory") from error
    if not spans:
        raise ValueError(f"trace {path} holds no task: record at least one step")
    return Timeline(1 + max(span.stage for span in spans), spans)


# -- the graph ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options about the graph. Raises ValueError for sizes that no graph has."""

    encoders: tuple[int, ...] = ()
    """Chunks of each encoder."""
    frozen_encoder: bool = False
    frozen_chunks: tuple[int, ...] = ()
    stage_of_chunk: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if any(count < 1 for count in self.encoders):
            raise ValueError(f"encoders {_joined(self.encoders)} have no chunk somewhere: give each at least 1")


class ModelGraph(NamedTuple):
    """A pipeline of encoders and a decoder."""

    graph: PipelineGraph
    placement: Placement
    encoders: tuple[range, ...]
    """The chunks of each encoder; the decoder has all that follow."""

    @property
    def decoder(self) -> range:
        """The chunks of the decoder."""
        return range(self.encoders[-1].stop if self.encoders else 0, self.graph.num_chunks)


def make_graph(options: GraphOptions, *, num_stages: int, num_microbatches: int) -> ModelGraph:
    """Returns the graph and placement of these sizes; raises ValueError, with the remedy, where they do not fit."""
    if options.frozen_encoder and not options.encoders:
        raise ValueError("frozen-encoder freezes encoders, and there is none: give --encoders 1, for example")
    placement = linear(num_stages) if options.stage_of_chunk is None else Placement(options.stage_of_chunk)
    num_chunks = placement.num_chunks
    if placement.num_stages != num_stages:
        raise ValueError(
            f"stage-of-chunk {_joined(placement.stage_of_chunk)} names {placement.num_stages} stages, num-stages is "
            f"{num_stages}: give both the same number"
        )
    if sum(options.encoders) >= num_chunks:
        raise ValueError(
            f"encoders take {sum(options.encoders)} of {num_chunks} chunks, which leaves the decoder none: give more "
            "stages, or a --stage-of-chunk with more chunks"
        )
    encoders, first = [], 0
    for count in options.encoders:
        encoders.append(range(first, first + count))
        first += count
    edges = [Edge(c, c + 1) for chunks in (*encoders, range(first, num_chunks)) for c in chunks[:-1]]
    edges += [Edge(chunks[-1], first, is_optional=True) for chunks in encoders]
    frozen = frozenset(range(first) if options.frozen_encoder else ()) | frozenset(options.frozen_chunks)
    graph = PipelineGraph(num_chunks, num_microbatches, tuple(sorted(edges)), frozen=frozen)
    if not any(graph.trains(chunk) for chunk in range(num_chunks)):
        raise ValueError(f"frozen-chunks {_joined(sorted(frozen))} leave nothing to train: leave one of them out")
    return ModelGraph(graph, placement, tuple(encoders))


def check_fits_graph(
    orderings: Sequence[OrderingOptions], *, has_graph: bool, chunks_per_stage: int | None = None
) -> None:
    """Raise ValueError, with the remedy, where schedules make a pipeline of their own and there is one."""
    if not has_graph:
        return
    if chunks_per_stage is not None:
        raise ValueError(
            "chunks-per-stage makes a looped chain, and the graph is given: write --stage-of-chunk, for example "
            "0,1,0,1, in its place"
        )
    for ordering in orderings:
        name = ordering.schedule
        if name is not None and is_schedule(name) and not schedule_entry(name).any_graph:
            raise ValueError(
                f"schedule {name!r} makes a chain of chunks and its own placement, not this graph: take one of "
                f"{', '.join(schedules_of_any_graph())}, or a hint"
            )


def requested_graph(arguments: argparse.Namespace, *, num_microbatches: int) -> ModelGraph | None:
    """Returns the graph of the options; None where they leave it to the schedule. Raises ValueError with the remedy."""
    options = parse_graph(arguments)
    if options == GraphOptions():
        return None
    return make_graph(options, num_stages=arguments.num_stages, num_microbatches=num_microbatches)


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`parse_graph` reads."""
    add = parser.add_argument_group("graph").add_argument
    add(
        "--encoders",
        "--encoder-stages",
        metavar="N|N,N,...",
        help="chunks of each encoder, of which the last feeds the decoder, each on a stage of its own (default: none)",
    )
    add("--frozen-encoder", action="store_true", help="the encoders never change: they run F alone")
    add(
        "--frozen-chunks",
        metavar="C,C,...",
        help="chunks that never change; they pass gradients on to those before them that train (default: none)",
    )
    add("--stage-of-chunk", metavar="S,S,...", help="the stage of every chunk (default: each chunk on its own)")


def parse_graph(arguments: argparse.Namespace) -> GraphOptions:
    """Returns the options about the graph; raises ValueError with the remedy."""
    stages = arguments.stage_of_chunk
    return GraphOptions(
        encoders=_integers(arguments.encoders, "encoders", "2,1"),
        frozen_encoder=arguments.frozen_encoder,
        frozen_chunks=_integers(arguments.frozen_chunks, "frozen-chunks", "0,1"),
        stage_of_chunk=None if stages is None else _integers(stages, "stage-of-chunk", "0,0,1,2"),
    )


def _integers(text: str | None, flag: str, example: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise ValueError(f"{flag} {text!r} is not made of whole numbers: write for example {example}") from None


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


# -- the machine ----------------------------------------------------------------------------------------------------


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
        metavar=f"0|{JUST_IN_TIME}|{CERTAIN}|{PAIRS}",
        help="when a stage is handed its next task: at the end of the running one, when that is about to end, or once "
        f"nothing can change the choice; {PAIRS}: as {JUST_IN_TIME}, and two tasks at once where they can run as one "
        "program (default 0)",
    )
    add(
        "--collectives-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="how much longer F and I take where they run alone, for the collectives inside them; a pair hides these",
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
    sizes: Sequence[float] = (0.0,)
    if arguments.message_bytes is not None:
        sizes = parse_numbers(arguments.message_bytes, "message-bytes", example="33554432,33554432")
    if len(sizes) > 2:
        raise ValueError(
            f"message-bytes {arguments.message_bytes} has {len(sizes)} numbers: write those of an activation and a "
            "gradient"
        )
    links = Links(
        latency_ms=arguments.comm_ms,
        activation_bytes=sizes[0],
        gradient_bytes=sizes[-1],
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
    return order.arbiters(RULES, certain_ahead=how.certain, pairs=how.pairs)


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


# -- noise ----------------------------------------------------------------------------------------------------------

_Factor = Callable[[Durations, Placement, np.random.Generator], Durations]
Jitter = Callable[[Durations, Placement, np.random.Generator], tuple[Durations, InjectedSleeps | None]]
"""Gives the durations of every step with jitter, and the sleeps that depend on the order, if any."""


def parse_jitter(text: str | None) -> Jitter:
    """Returns the jitter of a text: one form of ``_JITTER_FORMS``, or several joined by ``+``."""
    factors: list[_Factor] = []
    level: str | None = None
    for part in text.split("+") if text else ():
        name, _, argument = part.partition(":")
        if name != "paper":
            factors.append(_factor(part, name, argument))
        elif argument not in PAPER_LEVELS or level:
            raise ValueError(f"jitter {part!r} is not one level of {', '.join(PAPER_LEVELS)}: write paper:J3")
        else:
            level = argument

    def jitter(
        durations_ms: Durations, placement: Placement, rng: np.random.Generator
    ) -> tuple[Durations, InjectedSleeps | None]:
        for factor in factors:
            durations_ms = factor(durations_ms, placement, rng)
        return durations_ms, paper(PAPER_LEVELS[level], durations_ms.shape, rng) if level else None

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
    durations_ms, sleeps = parse_jitter(arguments.jitter)(durations_ms, placement, rng)
    return Costs(durations_ms=durations_ms, sleeps=sleeps, collectives_ms=arguments.collectives_ms)


def chunk_durations(table: ScheduleTable, durations_ms: Profile, parts: Sequence[float] = ()) -> Durations:
    """Returns F, I and W of a stage divided among its chunks by ``parts``, [1, chunks, microbatches, 3]."""
    length = per_stage(table, SlotLengths(*durations_ms), parts)
    kinds = (TaskKind.F, TaskKind.I, TaskKind.W)
    by_chunk = [[length(Task(kind, chunk, 0)) for kind in kinds] for chunk in range(table.graph.num_chunks)]
    return np.repeat(np.array([by_chunk], np.float64)[:, :, None], table.graph.num_microbatches, axis=2)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collects garbage rarely while the context lasts.

    A search or a simulation makes millions of records without cycles. At the usual rate the collector walks over all of
    them again and again, which takes a tenth of a search and a fifth of a large simulation.
    """
    before = gc.get_threshold()
    gc.set_threshold(_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
