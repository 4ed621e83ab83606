"""Simulate a schedule or a hint: the runtime's own arbiters in virtual time.

::

    rrfp simulate --list
    rrfp simulate --num-stages 4 --num-microbatches 8 --schedule zb-h1 --show
    rrfp simulate --num-stages 8 --num-microbatches 24 --schedule zb-h1 \\
        --consume strict --durations-ms 18.522,18.086,9.337 --comm-ms 0.601 --json
    rrfp simulate --num-stages 8 --num-microbatches 32 --window 8 --steps 10 \\
        --compare 1f1b:strict,bf,bfw --jitter lognormal:0.5 --timeline out.png

With ``--json`` the last line on stdout is one JSON object; with ``--compare`` its key ``compare`` holds one per entry.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console

from rrfp_jax.commands.common.console import add_timeline_argument, check_outputs, draw, make_console
from rrfp_jax.commands.common.errors import BadInput, checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import OrderingOptions, add_ordering_arguments, given_order
from rrfp_jax.commands.simulate_reports import ScheduleView, show_comparison, show_names, show_run
from rrfp_jax.commands.studies import (
    ConstantDurations,
    DurationSource,
    GivenDurations,
    ModelGraph,
    RecordedDurations,
    add_graph_arguments,
    add_machine_arguments,
    add_noise_arguments,
    arbiters_of,
    check_fits_graph,
    check_noise,
    dispatch,
    load_durations,
    load_trace,
    make_costs,
    make_machine,
    parse_durations_ms,
    parse_numbers,
    rare_collections,
    requested_graph,
)
from rrfp_jax.core import READY, SCHEDULE, STRICT, Order, StageArbiter, hint_names
from rrfp_jax.runtime.operations import host_copies
from rrfp_jax.schedules import (
    ScheduleRequest,
    chain,
    lanes_beside,
    linear,
    schedule_entry,
    schedule_names,
    write_csv,
)
from rrfp_jax.schedules.registry import is_rule, is_schedule
from rrfp_jax.schedules.slots import SlotLengths
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import (
    Costs,
    MemoryWeights,
    Simulation,
    at_least_ms,
    bf_upper_bound_ms,
    find_optimum,
    for_steps,
    lower_bound,
    peak_memory,
    run_metrics,
)
from rrfp_jax.simulation import simulate as run_simulation
from rrfp_jax.simulation.result import RunMetrics, bottleneck, memory_figures

_ROWS, _SLOTS = "rows", "slots"
_FOOTPRINT, _FORESIGHT = "footprint", "foresight"


class GivenWork(NamedTuple):
    """Durations and a graph that come from a study's own options, in place of the command's."""

    durations: GivenDurations
    model: ModelGraph
    figures: dict[str, Any]
    """The JSON object below the key ``workload``."""
    text: str
    """One line for people."""
    arranged: Callable[[Order], GivenDurations] | None = None
    """Returns the durations with microbatches in the best order for an order of tasks; None: they stay as they come."""


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Options that a study adds to this command, for the work that is simulated."""

    add: Callable[[argparse._ArgumentGroup], None]
    """Adds the options."""
    read: Callable[[argparse.Namespace], GivenWork | None]
    """Returns the work that the options ask for; None if they ask for none. Raises ValueError with the remedy."""


class _Scenario:
    """Everything that the orders of one command share. Raises ValueError, with the remedy, for options that do not fit.

    Attributes:
        model: the requested graph; None: each schedule makes its own.
        num_steps: steps to simulate.
    """

    def __init__(self, arguments: argparse.Namespace, work: GivenWork | None) -> None:
        check_noise(arguments)
        if arguments.optimum is not None and not arguments.optimum > 0:
            raise ValueError(f"optimum has {arguments.optimum} s: give the solver more than 0")
        check_outputs(timeline=arguments.timeline, trace=arguments.trace)
        if arguments.trace and arguments.compare:
            raise ValueError("a trace holds one run: leave --compare out, or take --timeline for a picture of all")
        _refuse_beside_show(arguments)
        self.arguments, self.work = arguments, work
        self.memory_weights = MemoryWeights()
        if (text := arguments.memory_weights) is not None:
            weights = parse_numbers(text, "memory-weights", example="1,0.5,0.5")
            if len(weights) != 3:
                raise ValueError(
                    f"memory-weights {text} has {len(weights)} numbers: write those of F, I and W, as 1,0.5,0.5"
                )
            names = ("forward", "input_gradient", "weight_gradient")
            self.memory_weights = MemoryWeights(**dict(zip(names, weights, strict=True)))
        self.durations: DurationSource = work.durations if work else _durations(arguments)
        self.machine = make_machine(arguments)
        self.model = work.model if work else requested_graph(arguments, num_microbatches=arguments.num_microbatches)
        if arguments.timeline_steps is not None and arguments.timeline_steps < 1:
            raise ValueError(f"timeline-steps is {arguments.timeline_steps}: draw at least 1")
        self.num_steps: int = self.durations.num_steps if arguments.steps is None else arguments.steps
        if self.num_steps < 1:
            raise ValueError(f"steps is {self.num_steps}: simulate at least 1")


class _Candidate:
    """One order in a scenario. Raises ValueError where the order does not fit the scenario."""

    def __init__(self, scenario: _Scenario, ordering: OrderingOptions, label: str | None) -> None:
        arguments, durations = scenario.arguments, scenario.durations
        self.scenario = scenario
        self.order: Order = ordering.resolve(
            num_stages=arguments.num_stages,
            num_microbatches=arguments.num_microbatches,
            chunks_per_stage=arguments.chunks_per_stage,
            slices=arguments.slices,
            durations_ms=durations.profile_ms(),
            comm_ms=scenario.machine.links.latency_ms,
            placement=scenario.model and scenario.model.placement,
            graph=scenario.model and scenario.model.graph,
        )
        self.label = label or self.order.label
        if scenario.work is not None and scenario.work.arranged is not None:
            durations = scenario.work.arranged(self.order)
        self.absent = durations.absent
        durations_ms = for_steps(durations.for_graph(self.order.graph), scenario.num_steps)
        for pairs in durations.absent:
            self.order.graph.skipping(pairs)  # raises for a pair that this graph cannot lack
        # Arbiters are made here, before anything runs, so that a bad window is refused before a long simulation.
        self.arbiters = arbiters_of(self.order, arguments)
        self.costs: Costs = make_costs(arguments, durations_ms, self.order.placement)

    def simulate(self, costs: Costs, arbiters: list[StageArbiter]) -> Simulation:
        """Returns a simulation of all steps under these costs."""
        machine, num_steps = self.scenario.machine, self.scenario.num_steps
        return run_simulation(arbiters, costs, machine=machine, num_steps=num_steps, absent=self.absent)

    def run(self) -> None:
        """Simulate the order; sets ``timeline``, and ``result``, the JSON object of this order.

        The result has the figures that an emulated run has too, and those that only a simulation knows.
        """
        scenario, costs = self.scenario, self.costs
        simulation = self.simulate(costs, self.arbiters)
        timeline, graph, placement = simulation.timeline, self.order.graph, self.order.placement
        self.timeline: Timeline = timeline
        metrics = run_metrics(timeline, simulation.step_ms)
        result = asdict(metrics)
        result["peak_memory"] = peak_memory(timeline, graph, placement, scenario.memory_weights)
        result |= memory_figures(timeline, graph, placement)
        if any(metrics.engine_busy):
            result |= self._engine_figures(metrics)
        result["work_ms"] = round(sum(timeline.work_s()) * 1e3 / scenario.num_steps, 6)

        shortest_ms = at_least_ms(costs.durations_ms, costs.sleeps)
        links = scenario.machine.links
        # The graph of every step, without the chunk and microbatch pairs that the step lacks.
        absent = self.absent or [()]
        graphs = [graph.skipping(absent[step % len(absent)]) for step in range(scenario.num_steps)]
        # Dispatching before a task has ended hides the host's time, so a bound must not count on it.
        host_ms = 0.0 if dispatch(scenario.arguments).is_early else scenario.machine.host_ms
        bounds = [
            lower_bound(of_step, placement, step_ms, links=links, host_ms=host_ms, operations_ms=costs.operations_ms)
            for of_step, step_ms in zip(graphs, shortest_ms, strict=True)
        ]
        result["lower_bound_ms"] = round(fmean(bound.total_ms for bound in bounds), 6)
        result["upper_bound_ms"] = self._upper_bound_ms()
        if self.order.delay:  # Both bounds are of a step that flushes.
            works_ms = [[ms[list(chunks)].sum() for chunks in placement.chunks_of_stage] for ms in shortest_ms]
            result["lower_bound_ms"], result["upper_bound_ms"] = round(float(fmean(map(max, works_ms))), 6), None
        if (limit_s := scenario.arguments.optimum) is not None:
            options: dict[str, Any] = {"links": links, "time_limit_s": limit_s}
            if (slots := scenario.arguments.offload) is not None:  # the solver itself chooses what moves
                lengths = SlotLengths(*scenario.durations.profile_ms())
                options |= {"slots": slots, "copies": host_copies(scenario.arguments.copy_ms, lengths=lengths)}
                graphs = [replace(of_step, ops=()) for of_step in graphs]
            try:
                found = [find_optimum(g, placement, ms, **options) for g, ms in zip(graphs, shortest_ms, strict=True)]
            except (ImportError, ValueError) as error:  # no solver, or no order found in the time that the user gave
                raise BadInput(str(error)) from error
            result["optimum_ms"] = round(fmean(one.makespan_ms for one in found), 6)
            result["optimum_is_proven"] = all(one.is_proven for one in found)
        self.result: dict[str, Any] = result

    def _engine_figures(self, metrics: RunMetrics) -> dict[str, Any]:
        """Simulate the same run with engines that take no time; returns its makespan, and the engine, named in a
        sentence, that holds the run up (None if no engine does)."""
        free = dict.fromkeys(lanes_beside(self.order.graph), 0.0)
        without = replace(self.costs, operations_ms={**self.costs.operations_ms, **free})
        simulation = self.simulate(without, arbiters_of(self.order, self.scenario.arguments))
        without_ms = run_metrics(simulation.timeline, simulation.step_ms).makespan_ms_mean
        gain = 1 - without_ms / metrics.makespan_ms_mean if metrics.makespan_ms_mean else 0.0
        engine = bottleneck(metrics.engine_busy, metrics.stage_bubbles, metrics.waited_for_engines, gain=gain)
        return {"makespan_ms_without_engines": without_ms, "bottleneck": engine}

    def _upper_bound_ms(self) -> float | None:
        """Returns the paper's bound for bf, mean over the steps, or None where its assumptions do not hold."""
        order, graph, links = self.order, self.order.graph, self.scenario.machine.links
        num_stages, num_microbatches = order.placement.num_stages, graph.num_microbatches
        has_costs = links.latency_ms or links.activation_bytes or links.gradient_bytes or any(links.extra_ms.values())
        applies = (
            order.is_bf
            and not has_costs
            and self.costs.sleeps is None
            and not self.scenario.machine.host_ms
            and order.placement == linear(num_stages)
            and graph == chain(num_stages, num_microbatches)
            and min(order.windows) >= num_microbatches
        )
        if not applies:
            return None
        steps = self.costs.durations_ms
        return round(fmean(bf_upper_bound_ms(step[..., 0], step[..., 1] + step[..., 2]) for step in steps), 6)


def main(argv: list[str] | None = None, *, work: WorkOptions | None = None) -> int:
    """Run the command, with the options of a study if there is one, and return its exit code."""
    parser = make_parser(work)
    arguments = parser.parse_args(argv)
    console = make_console()
    if arguments.list:
        show_names(console)
        return 0
    if arguments.num_stages is None or arguments.num_microbatches is None:
        parser.error("give --num-stages and --num-microbatches (or --list for the names of schedules and hints)")
    with rare_collections():
        with checking_input():
            scenario = _Scenario(arguments, work.read(arguments) if work else None)
            orderings = _orderings(arguments)
            check_fits_graph(
                [one for _, one in orderings],
                has_graph=scenario.model is not None,
                chunks_per_stage=arguments.chunks_per_stage,
            )
            if arguments.show is not None:
                view = _view(scenario, orderings[0][1])
                timelines = [(f"{view.table.name}, strict", view.strict.timeline)]
            else:
                candidates = [_Candidate(scenario, ordering, label) for label, ordering in orderings]
        if arguments.show is None:
            for candidate in candidates:
                candidate.run()
            timelines = [(candidate.label, candidate.timeline) for candidate in candidates]
    if arguments.show is None:
        _show_results(console, scenario, candidates)
    elif arguments.json:
        view.print_json()
    else:
        view.print_text(console, has_slots=arguments.show == _SLOTS)
    _write_files(arguments, timelines)
    return 0


def _write_files(arguments: argparse.Namespace, timelines: Sequence[tuple[str, Timeline]]) -> None:
    """Write the requested pictures and traces, and load their libraries only then."""
    if arguments.timeline:
        draw(timelines, arguments.timeline, num_steps=arguments.timeline_steps)
    if arguments.trace:
        from rrfp_jax.observe.chrome_trace import write_trace

        write_trace(timelines[0][1], arguments.trace)


def _show_results(console: Console, scenario: _Scenario, candidates: Sequence[_Candidate]) -> None:
    """Print the results of all orders, as tables or as one JSON object."""
    arguments, work = scenario.arguments, scenario.work
    first, results = candidates[0], {one.label: one.result for one in candidates}
    if arguments.json:
        printed: dict[str, Any] = {"compare": results} if arguments.compare else first.result
        print(json.dumps(printed | ({} if work is None else {"workload": work.figures}), allow_nan=False), flush=True)
        return
    if arguments.compare:
        show_comparison(console, results)
    else:
        show_run(console, first.label, first.result, first.order.bounds)
    if work is not None:
        console.print(work.text, soft_wrap=True)


def make_parser(work: WorkOptions | None = None) -> CommandParser:
    """Returns the parser of the command, with the options of a study if there is one."""
    parser = CommandParser("simulate", __doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="name every schedule and hint, and end")
    add("--num-stages", type=int, metavar="P", help="stages of the pipeline (required, but for --list)")
    add("--num-microbatches", type=int, metavar="M", help="microbatches of a step (required, but for --list)")
    add(
        "--chunks-per-stage",
        type=int,
        metavar="V",
        help="chunks on every stage (default: the schedule's own number, else 1)",
    )
    add(
        "--slices",
        type=int,
        metavar="N",
        help="slices of a sequence, which run through each chunk one after the other and share its time equally "
        "(default: as many as stages for schedules of slices, else 1)",
    )
    add_graph_arguments(parser)
    add_ordering_arguments(parser)
    add(
        "--compare",
        metavar="A,B,...",
        help="several orders side by side, by the names that --list has: hints, and schedules, alone or with :strict, "
        ":ready (readiness alone) or :ready+footprint+foresight",
    )
    add(
        "--show",
        nargs="?",
        const=_ROWS,
        choices=(_ROWS, _SLOTS),
        help=f"show the table of --schedule itself: its rows, what stages hold, its formulas, and one step simulated "
        f"strictly and with foresight; {_SLOTS}: draw its ideal slots too (optional, {_ROWS} without a word)",
    )
    add("--csv", metavar="FILE", help="with --show, write the table, as torch.distributed.pipelining reads it")
    add("--steps", type=int, metavar="N", help="steps, one after the other (default: as many as the durations have)")
    group = parser.add_argument_group("costs")
    add = group.add_argument
    add(
        "--durations-ms",
        metavar="F,I,W",
        help="milliseconds of a chunk's forward, input gradient and weight gradient; a backward in one takes I + W "
        "(default 10,10,10)",
    )
    add(
        "--durations",
        metavar="FILE",
        help="an .npy file of milliseconds [steps, chunks, microbatches, 3], NaN where a pair of chunk and microbatch "
        "does not exist, or a run's trace .json",
    )
    add(
        "--recorded",
        choices=("mean", "tasks"),
        help="what to take of a trace: means per chunk and kind (default), or every task by itself",
    )
    add_noise_arguments(group)
    add(
        "--memory-weights",
        metavar="F,I,W",
        help="memory that a forward holds, and what an input gradient and a weight gradient free of it (default 1,0,1)",
    )
    if work is not None:
        work.add(parser.add_argument_group("workload"))
    add_machine_arguments(parser.add_argument_group("machine"))
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--json", action="store_true", help="one JSON object on the last line of stdout, instead of tables")
    add_timeline_argument(group, "simulate")
    add(
        "--timeline-steps",
        type=int,
        metavar="N",
        help="how many of the last steps are drawn (default: one as a picture, in a page as many as it can well hold)",
    )
    add("--trace", metavar="FILE.json", help="write all steps for ui.perfetto.dev")
    add(
        "--optimum",
        type=float,
        metavar="SECONDS",
        help="look so long for the optimum, with --offload of copies too; for small cases, needs the extra 'optimum'",
    )
    return parser


def _durations(arguments: argparse.Namespace) -> DurationSource:
    path: str | None = arguments.durations
    if path is not None and arguments.durations_ms is not None:
        raise ValueError("durations come from --durations or from --durations-ms: give one of them")
    is_trace = path is not None and path.endswith(".json")
    if arguments.recorded and not is_trace:
        raise ValueError("--recorded is about the trace of a run: give one with --durations trace.json")
    if path is None:
        return ConstantDurations(parse_durations_ms(arguments.durations_ms or "10,10,10"))
    if is_trace:
        return RecordedDurations(load_trace(path), per_task=arguments.recorded == "tasks")
    return load_durations(path)


def _orderings(arguments: argparse.Namespace) -> Sequence[tuple[str | None, OrderingOptions]]:
    """Returns the orders to simulate with their labels; an order labels itself where the label is None."""
    given = given_order(arguments)
    if arguments.compare is None:
        return [(None, OrderingOptions(**given))]
    common = {name: given.pop(name) for name in ("window", "backward")}
    group_size = given.pop("group_size")
    doubled = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if doubled:
        raise ValueError(f"compare names the orders itself: leave {', '.join(doubled)} out")
    return parse_entries(arguments.compare, OrderingOptions(**common), group_size=group_size)


def _view(scenario: _Scenario, ordering: OrderingOptions) -> ScheduleView:
    arguments, window = scenario.arguments, ordering.window
    assert ordering.schedule is not None
    request = ScheduleRequest(
        num_stages=arguments.num_stages,
        num_microbatches=arguments.num_microbatches,
        chunks_per_stage=arguments.chunks_per_stage,
        group_size=ordering.group_size,
        slices=arguments.slices,
        window=window,
        durations_ms=scenario.durations.profile_ms(),
        comm_ms=scenario.machine.links.latency_ms,
        memory_limit=None if window is None else float(min(window) if isinstance(window, tuple) else window),
        graph=scenario.model and scenario.model.graph,
        placement=scenario.model and scenario.model.placement,
    )
    view = ScheduleView(ordering.schedule, request, scenario.machine)
    ordering.on(view.table)  # raises for words that mean nothing beside this table
    if arguments.csv is not None:
        write_csv(view.table, arguments.csv)
    return view


def _refuse_beside_show(arguments: argparse.Namespace) -> None:
    """Raise ValueError, with the remedy, for options that belong to ``--show`` alone or mean nothing beside it."""
    if arguments.show is None:
        if arguments.csv is not None:
            raise ValueError("csv writes the table that --show shows: give --show too")
        return
    if arguments.schedule is None:
        raise ValueError("show is about the table of a schedule: give --schedule, for example zb-h1")
    for_runs = ("compare", "steps", "jitter", "durations", "workload", "optimum")
    for_orders = ("consume", "hint", "offload", "recompute")
    said = [f"--{name}" for name in (*for_runs, *for_orders) if getattr(arguments, name, None) is not None]
    if said:
        raise ValueError(f"show simulates one step of the schedule as it is: leave {', '.join(said)} out")


def parse_entries(
    text: str, base: OrderingOptions, *, group_size: int | None = None
) -> list[tuple[str, OrderingOptions]]:
    """``1f1b:strict,zb-h1:ready+footprint+foresight,bf``: hints, and schedules with how they are consumed.

    A schedule without a colon is consumed as ``base`` and the defaults have it. ``base`` gives window and backward to
    all of them; ``group_size`` goes to the schedules that have groups.
    """
    names = text.split(",")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"compare names {', '.join(map(repr, twice))} twice: name each entry once")
    entries = [(name, _entry(name, base)) for name in names]
    grouped = {
        label
        for label, one in entries
        if one.schedule is not None and is_schedule(one.schedule) and schedule_entry(one.schedule).has_groups
    }
    if group_size is not None and not grouped:
        raise ValueError(
            f"no entry of compare has groups of {group_size} microbatches: name gis, or leave group-size out"
        )
    return [(label, replace(one, group_size=group_size) if label in grouped else one) for label, one in entries]


def _entry(entry: str, base: OrderingOptions) -> OrderingOptions:
    path, of_file, rest = entry.partition(".py:")
    name, colon, words = rest.partition(":") if of_file else entry.partition(":")
    name = path + of_file + name if of_file else name
    if is_schedule(name) or name.endswith(".csv"):
        if not colon:
            return replace(base, schedule=name)
        # The words are complete: ready alone is readiness without footprint and foresight.
        consume, *more = words.split("+")
        if consume == STRICT and not more:
            return replace(base, schedule=name, consume=STRICT)
        if consume != READY or not set(more) <= {_FOOTPRINT, _FORESIGHT} or len(set(more)) < len(more):
            choices = f"{name}:{STRICT}, {name}:{READY} or {name}:{READY}+{_FOOTPRINT}+{_FORESIGHT}"
            raise ValueError(f"compare entry {entry!r} ends in {words!r}: write {choices}")
        said: dict[str, Any] = {each: each in more for each in (_FOOTPRINT, _FORESIGHT)}
        return replace(base, schedule=name, consume=READY, **said)
    if name == SCHEDULE or not (name in hint_names() or is_rule(name)):
        known = ", ".join([*schedule_names(), *(hint for hint in hint_names() if hint != SCHEDULE)])
        raise ValueError(f"compare entry {entry!r} names no schedule and no hint: choose among {known}")
    if words not in ("", READY):
        raise ValueError(f"compare entry {entry!r}: {words} needs a schedule, and {name!r} is a hint")
    return replace(base, hint=name)


if __name__ == "__main__":
    run_command(main)
