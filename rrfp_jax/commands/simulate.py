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
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import BadInput, checking_input, run_command
from rrfp_jax.commands.common.garbage import rare_collections
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import Ordering, given_order, parse_ordering
from rrfp_jax.commands.common.outputs import check_outputs, draw
from rrfp_jax.commands.studies.durations import (
    ConstantDurations,
    DurationSource,
    GivenDurations,
    RecordedDurations,
    load_durations,
    load_trace,
    parse_durations_ms,
)
from rrfp_jax.commands.studies.graphs import ModelGraph, check_fits_graph, requested_graph
from rrfp_jax.commands.studies.machine import arbiters_of, check_noise, dispatch, make_costs, make_machine
from rrfp_jax.commands.studies.schedule_view import ScheduleView, view_schedule
from rrfp_jax.commands.studies.simulate_options import (
    SLOTS,
    parse_entries,
    parse_memory_weights,
    refuse_beside_show,
    simulate_parser,
)
from rrfp_jax.commands.studies.simulate_report import show_comparison, show_names, show_run
from rrfp_jax.core import Order, StageArbiter
from rrfp_jax.schedules import PipelineGraph, ScheduleRequest, chain, lanes_beside, linear, write_csv
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import (
    Costs,
    Machine,
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


class GivenWork(NamedTuple):
    """Durations and a graph that come from a study's own options, in place of the command's."""

    durations: GivenDurations
    model: ModelGraph
    figures: dict[str, Any]
    """The JSON object below the key ``workload``."""
    text: str
    """One line for people."""


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Options that a study adds to this command, for the work that is simulated."""

    add: Callable[[argparse._ArgumentGroup], None]
    """Adds the options."""
    read: Callable[[argparse.Namespace], GivenWork | None]
    """Returns the work that the options ask for; None if they ask for none. Raises ValueError with the remedy."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that the entries of a comparison share."""

    arguments: argparse.Namespace
    durations: DurationSource
    machine: Machine
    model: ModelGraph | None = None
    """The requested graph; None: each schedule makes its own."""
    work: GivenWork | None = None

    @property
    def num_steps(self) -> int:
        """Steps to simulate."""
        asked: int | None = self.arguments.steps
        return self.durations.num_steps if asked is None else asked

    def graphs(self, graph: PipelineGraph) -> list[PipelineGraph]:
        """Returns the graph of every step, without the chunk and microbatch pairs that the step lacks."""
        absent = self.durations.absent or [()]
        return [graph.skipping(absent[step % len(absent)]) for step in range(self.num_steps)]


@dataclass(frozen=True, kw_only=True)
class PreparedOrder:
    """One order that fits the scenario."""

    order: Order
    arbiters: list[StageArbiter]
    costs: Costs


@dataclass(frozen=True, kw_only=True)
class SimulatedOrder:
    """One simulated order."""

    order: Order
    timeline: Timeline
    result: dict[str, Any]
    """The JSON object of this order."""


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
            scenario = make_scenario(arguments, work.read(arguments) if work else None)
            orderings = _orderings(arguments)
            check_fits_graph(
                [one for _, one in orderings],
                has_graph=scenario.model is not None,
                chunks_per_stage=arguments.chunks_per_stage,
            )
            if arguments.show is not None:
                view = _view(scenario)
                if arguments.csv is not None:
                    write_csv(view.table, arguments.csv)
            else:
                prepared = [(label, prepare(scenario, ordering)) for label, ordering in orderings]
        if arguments.show is not None:
            _show_view(console, arguments, view)
            return 0
        outcomes = {label or one.order.label: simulate_order(scenario, one) for label, one in prepared}
    show(console, scenario, outcomes)
    _write_files(arguments, [(label, outcome.timeline) for label, outcome in outcomes.items()])
    return 0


def make_parser(work: WorkOptions | None = None) -> CommandParser:
    """Returns the parser of the command, with the options of a study if there is one."""
    return simulate_parser(__doc__, add_work=work.add if work else None)


def make_scenario(arguments: argparse.Namespace, work: GivenWork | None = None) -> Scenario:
    """Check and read all options that do not depend on the order. Raises ValueError with the remedy."""
    check_noise(arguments)
    if arguments.optimum is not None and not arguments.optimum > 0:
        raise ValueError(f"optimum has {arguments.optimum} s: give the solver more than 0")
    check_outputs(timeline=arguments.timeline, trace=arguments.trace)
    if arguments.trace and arguments.compare:
        raise ValueError("a trace holds one run: leave --compare out, or take --timeline for a picture of all")
    refuse_beside_show(arguments)
    parse_memory_weights(arguments.memory_weights)
    scenario = Scenario(
        arguments=arguments,
        durations=work.durations if work else _durations(arguments),
        machine=make_machine(arguments),
        model=work.model if work else requested_graph(arguments, num_microbatches=arguments.num_microbatches),
        work=work,
    )
    if arguments.timeline_steps is not None and arguments.timeline_steps < 1:
        raise ValueError(f"timeline-steps is {arguments.timeline_steps}: draw at least 1")
    if scenario.num_steps < 1:
        raise ValueError(f"steps is {scenario.num_steps}: simulate at least 1")
    return scenario


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


def _orderings(arguments: argparse.Namespace) -> Sequence[tuple[str | None, Ordering]]:
    """Returns the orders to simulate with their labels; an order labels itself where the label is None."""
    given = given_order(arguments)
    if arguments.compare is None:
        return [(None, parse_ordering(**given))]
    common = {name: given.pop(name) for name in ("window", "backward")}
    group_size = given.pop("group_size")
    doubled = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if doubled:
        raise ValueError(f"compare names the orders itself: leave {', '.join(doubled)} out")
    return parse_entries(arguments.compare, parse_ordering(**common), group_size=group_size)


def prepare(scenario: Scenario, ordering: Ordering) -> PreparedOrder:
    """Build one order with its costs. Raises ValueError where it does not fit the scenario."""
    arguments, durations = scenario.arguments, scenario.durations
    order = ordering.resolve(
        num_stages=arguments.num_stages,
        num_microbatches=arguments.num_microbatches,
        chunks_per_stage=arguments.chunks_per_stage,
        durations_ms=durations.profile_ms(),
        comm_ms=scenario.machine.links.latency_ms,
        placement=scenario.model and scenario.model.placement,
        graph=scenario.model and scenario.model.graph,
    )
    durations_ms = for_steps(durations.for_graph(order.graph), scenario.num_steps)
    for pairs in durations.absent:
        order.graph.skipping(pairs)  # raises for a pair that this graph cannot lack
    return PreparedOrder(
        order=order,
        arbiters=arbiters_of(order, arguments),
        costs=make_costs(arguments, durations_ms, order.placement),
    )


def simulate_order(scenario: Scenario, one: PreparedOrder) -> SimulatedOrder:
    """Simulate one order."""
    simulation = _simulate(scenario, one.arbiters, one.costs)
    result = _result(scenario, one.order, one.costs, simulation)
    return SimulatedOrder(order=one.order, timeline=simulation.timeline, result=result)


def _simulate(scenario: Scenario, arbiters: list[StageArbiter], costs: Costs) -> Simulation:
    absent, num_steps = scenario.durations.absent, scenario.num_steps
    return run_simulation(arbiters, costs, machine=scenario.machine, num_steps=num_steps, absent=absent)


def _result(scenario: Scenario, order: Order, costs: Costs, simulation: Simulation) -> dict[str, Any]:
    """Returns the figures that an emulated run has too, and those that only a simulation knows."""
    timeline, graph, placement = simulation.timeline, order.graph, order.placement
    arguments, machine = scenario.arguments, scenario.machine
    metrics = run_metrics(timeline, simulation.step_ms)
    result = metrics.as_dict()
    result["peak_memory"] = peak_memory(timeline, graph, placement, parse_memory_weights(arguments.memory_weights))
    result |= memory_figures(timeline, graph, placement)
    if any(metrics.engine_busy):
        result |= _engine_figures(scenario, order, costs, metrics)
    result["work_ms"] = round(sum(timeline.work_s()) * 1e3 / scenario.num_steps, 6)

    shortest_ms = at_least_ms(costs.durations_ms, costs.sleeps)
    # Dispatching before a task has ended hides the host's time, so a bound must not count on it.
    host_ms = 0.0 if dispatch(arguments).is_early else machine.host_ms
    bounds = [
        lower_bound(
            of_step, placement, step_ms, links=machine.links, host_ms=host_ms, operations_ms=costs.operations_ms
        ).total_ms
        for of_step, step_ms in zip(scenario.graphs(graph), shortest_ms, strict=True)
    ]
    result["lower_bound_ms"] = round(fmean(bounds), 6)
    result["upper_bound_ms"] = _upper_bound_ms(scenario, order, costs)
    if arguments.optimum is not None:
        result |= _optimum(scenario, order, shortest_ms)
    return result


def _engine_figures(scenario: Scenario, order: Order, costs: Costs, metrics: RunMetrics) -> dict[str, Any]:
    """Simulate the same run with engines that take no time; returns its makespan, and the engine, named in a sentence,
    that holds the run up (None if no engine does)."""
    free = dict.fromkeys(lanes_beside(order.graph), 0.0)
    without = replace(costs, operations_ms={**costs.operations_ms, **free})
    simulation = _simulate(scenario, arbiters_of(order, scenario.arguments), without)
    without_ms = run_metrics(simulation.timeline, simulation.step_ms).makespan_ms_mean
    gain = 1 - without_ms / metrics.makespan_ms_mean if metrics.makespan_ms_mean else 0.0
    return {
        "makespan_ms_without_engines": without_ms,
        "bottleneck": bottleneck(metrics.engine_busy, metrics.stage_bubbles, metrics.waited_for_engines, gain=gain),
    }


def _upper_bound_ms(scenario: Scenario, order: Order, costs: Costs) -> float | None:
    """Returns the paper's bound for bf, mean over the steps, or None where its assumptions do not hold."""
    links, graph = scenario.machine.links, order.graph
    num_stages, num_microbatches = order.placement.num_stages, graph.num_microbatches
    is_free = not (links.latency_ms or links.activation_bytes or links.gradient_bytes or any(links.extra_ms.values()))
    applies = (
        order.is_bf
        and is_free
        and costs.sleeps is None
        and not scenario.machine.host_ms
        and order.placement == linear(num_stages)
        and graph == chain(num_stages, num_microbatches)
        and min(order.windows) >= num_microbatches
    )
    if not applies:
        return None
    steps = costs.durations_ms
    return round(fmean(bf_upper_bound_ms(step[..., 0], step[..., 1] + step[..., 2]) for step in steps), 6)


def _optimum(scenario: Scenario, order: Order, shortest_ms: np.ndarray) -> dict[str, Any]:
    links, limit_s = scenario.machine.links, scenario.arguments.optimum
    try:
        found = [
            find_optimum(of_step, order.placement, step_ms, links=links, time_limit_s=limit_s)
            for of_step, step_ms in zip(scenario.graphs(order.graph), shortest_ms, strict=True)
        ]
    except (ImportError, ValueError) as error:  # no solver, or no order found in the time that the user gave
        raise BadInput(str(error)) from error
    return {
        "optimum_ms": round(fmean(one.makespan_ms for one in found), 6),
        "optimum_is_proven": all(one.is_proven for one in found),
    }


def _view(scenario: Scenario) -> ScheduleView:
    arguments = scenario.arguments
    ordering = parse_ordering(**given_order(arguments))
    assert ordering.schedule is not None
    window = (ordering.window,) if isinstance(ordering.window, int) else ordering.window
    request = ScheduleRequest(
        num_stages=arguments.num_stages,
        num_microbatches=arguments.num_microbatches,
        chunks_per_stage=arguments.chunks_per_stage,
        group_size=ordering.group_size,
        window=ordering.window,
        durations_ms=scenario.durations.profile_ms(),
        comm_ms=scenario.machine.links.latency_ms,
        memory_limit=None if window is None else float(min(window)),
        graph=scenario.model and scenario.model.graph,
        placement=scenario.model and scenario.model.placement,
    )
    return view_schedule(ordering.schedule, request, scenario.machine)


def _show_view(console: Console, arguments: argparse.Namespace, view: ScheduleView) -> None:
    _write_files(arguments, [(f"{view.table.name}, strict", view.strict.timeline)])
    if arguments.json:
        view.print_json()
    else:
        view.print_text(console, has_slots=arguments.show == SLOTS)


def _write_files(arguments: argparse.Namespace, timelines: Sequence[tuple[str, Timeline]]) -> None:
    """Write the requested pictures and traces, and load their libraries only then."""
    if arguments.timeline:
        draw(timelines, arguments.timeline, num_steps=arguments.timeline_steps)
    if arguments.trace:
        from rrfp_jax.observe.chrome_trace import write_trace

        write_trace(timelines[0][1], arguments.trace)


def show(console: Console, scenario: Scenario, outcomes: dict[str, SimulatedOrder]) -> None:
    """Print the results of all orders, as tables or as one JSON object."""
    arguments, work = scenario.arguments, scenario.work
    if arguments.json:
        results = {label: outcome.result for label, outcome in outcomes.items()}
        printed = {"compare": results} if arguments.compare else next(iter(results.values()))
        if work is not None:
            printed = printed | {"workload": work.figures}
        print(json.dumps(printed, allow_nan=False), flush=True)
        return
    if arguments.compare:
        show_comparison(console, {label: outcome.result for label, outcome in outcomes.items()})
    else:
        outcome = next(iter(outcomes.values()))
        show_run(console, outcome.order.label, outcome.result, outcome.order.bounds)
    if work is not None:
        console.print(work.text, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
