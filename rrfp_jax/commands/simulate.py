"""Simulate a schedule or a hint: the runtime's own arbiters in virtual time.

::

    rrfp simulate --list
    rrfp simulate --num-stages 8 --num-microbatches 24 --schedule zb-h1 \\
        --consume strict --durations-ms 18.522,18.086,9.337 --comm-ms 0.601 --json
    rrfp simulate --num-stages 8 --num-microbatches 32 --window 8 --steps 10 \\
        --compare 1f1b:strict,bf,bfw --jitter lognormal:0.5 --timeline out.png
    rrfp simulate --num-stages 8 --num-microbatches 16 --window 8 \\
        --workload interleaved --compare 1f1b:strict,zb-h1:strict,zb-h1,bfw

With ``--json`` the last line on stdout is one JSON object; with ``--compare`` its key ``compare`` holds one per entry.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from rrfp_jax.arbitration import Order, StageArbiter
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import BadInput, checking_input, run_command
from rrfp_jax.commands.common.garbage import rare_collections
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import Ordering, given_order, parse_ordering
from rrfp_jax.commands.common.outputs import check_outputs, draw
from rrfp_jax.commands.studies.durations import (
    ConstantDurations,
    DurationSource,
    RecordedDurations,
    load_durations,
    load_trace,
    parse_durations_ms,
)
from rrfp_jax.commands.studies.graphs import ModelGraph, check_fits_graph, parse_graph, requested_graph
from rrfp_jax.commands.studies.machine import arbiters_of, dispatch, make_machine
from rrfp_jax.commands.studies.noise import check_noise, make_costs
from rrfp_jax.commands.studies.simulate_options import parse_entries, parse_memory_weights, simulate_parser
from rrfp_jax.commands.studies.simulate_report import show_comparison, show_names, show_run
from rrfp_jax.commands.studies.workload_options import Planned, has_graph, plan_workload
from rrfp_jax.schedules import PipelineGraph, chain, lanes_beside, linear
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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all entries of a comparison have in common, from the flags."""

    arguments: argparse.Namespace
    durations: DurationSource
    machine: Machine
    model: ModelGraph | None = None
    """The graph that was asked for; None: the schedule's own."""
    workload: Planned | None = None

    @property
    def num_steps(self) -> int:
        asked: int | None = self.arguments.steps
        return self.durations.num_steps if asked is None else asked

    def graphs(self, graph: PipelineGraph) -> list[PipelineGraph]:
        """That of every step, without the pairs that it lacks."""
        absent = self.durations.absent or [()]
        return [graph.skipping(absent[step % len(absent)]) for step in range(self.num_steps)]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One order that fits the setting."""

    ordering: Order
    arbiters: list[StageArbiter]
    costs: Costs


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One simulated order."""

    ordering: Order
    timeline: Timeline
    result: dict[str, Any]
    """What ``--json`` prints."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    console = make_console()
    if arguments.list:
        show_names(console)
        return 0
    if arguments.num_stages is None or arguments.num_microbatches is None:
        parser.error("give --num-stages and --num-microbatches (or --list for the names of schedules and hints)")
    with rare_collections():
        with checking_input():
            setting = make_setting(arguments)
            orderings = _orderings(arguments)
            check_fits_graph(
                [one for _, one in orderings],
                has_graph=has_graph(arguments),
                chunks_per_stage=arguments.chunks_per_stage,
            )
            prepared = [(label, prepare(setting, ordering)) for label, ordering in orderings]
        outcomes = {label or one.ordering.label: run(setting, one) for label, one in prepared}
    show(console, setting, outcomes)
    write_files(arguments, outcomes)
    return 0


def make_parser() -> CommandParser:
    """The parser of the command."""
    return simulate_parser(__doc__)


def make_setting(arguments: argparse.Namespace) -> Setting:
    """Check and read everything that does not depend on the order. Raises ValueError with the remedy."""
    check_noise(arguments)
    if arguments.optimum is not None and not arguments.optimum > 0:
        raise ValueError(f"optimum has {arguments.optimum} s: give the solver more than 0")
    check_outputs(timeline=arguments.timeline, trace=arguments.trace)
    if arguments.trace and arguments.compare:
        raise ValueError("a trace holds one run: leave --compare out, or take --timeline for a picture of all")
    parse_memory_weights(arguments.memory_weights)
    workload = plan_workload(arguments, parse_graph(arguments), num_steps=arguments.steps)
    setting = Setting(
        arguments=arguments,
        durations=workload.drawn.durations if workload else _durations(arguments),
        machine=make_machine(arguments),
        model=workload.model if workload else requested_graph(arguments, num_microbatches=arguments.num_microbatches),
        workload=workload,
    )
    if arguments.timeline_steps is not None and arguments.timeline_steps < 1:
        raise ValueError(f"timeline-steps is {arguments.timeline_steps}: draw at least 1")
    if setting.num_steps < 1:
        raise ValueError(f"steps is {setting.num_steps}: simulate at least 1")
    return setting


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
    """The orders to simulate with their labels; None leaves the label to the order itself."""
    given = given_order(arguments)
    if arguments.compare is None:
        return [(None, parse_ordering(**given))]
    common = {name: given.pop(name) for name in ("window", "backward")}
    group_size = given.pop("group_size")
    doubled = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if doubled:
        raise ValueError(f"compare names the orders itself: leave {', '.join(doubled)} out")
    return parse_entries(arguments.compare, parse_ordering(**common), group_size=group_size)


def prepare(setting: Setting, ordering: Ordering) -> Prepared:
    """Build one order with its costs. Raises ValueError where it does not fit the setting."""
    arguments = setting.arguments
    resolved = ordering.resolve(
        num_stages=arguments.num_stages,
        num_microbatches=arguments.num_microbatches,
        chunks_per_stage=arguments.chunks_per_stage,
        durations_ms=setting.durations.profile_ms(),
        comm_ms=setting.machine.links.latency_ms,
        placement=setting.model and setting.model.placement,
        graph=setting.model and setting.model.graph,
    )
    durations_ms = for_steps(setting.durations.for_graph(resolved.graph), setting.num_steps)
    for pairs in setting.durations.absent:
        resolved.graph.skipping(pairs)
    return Prepared(
        ordering=resolved,
        arbiters=arbiters_of(resolved, arguments),
        costs=make_costs(arguments, durations_ms, resolved.placement),
    )


def run(setting: Setting, one: Prepared) -> Outcome:
    """Simulate one order."""
    simulation = run_simulation(
        one.arbiters,
        one.costs,
        machine=setting.machine,
        num_steps=setting.num_steps,
        absent=setting.durations.absent,
    )
    return Outcome(
        ordering=one.ordering,
        timeline=simulation.timeline,
        result=result_of(setting, one.ordering, one.costs, simulation),
    )


def result_of(setting: Setting, ordering: Order, costs: Costs, simulation: Simulation) -> dict[str, Any]:
    """The keys of emulate, and what only a simulation knows."""
    timeline, graph, placement = simulation.timeline, ordering.graph, ordering.placement
    weights = parse_memory_weights(setting.arguments.memory_weights)
    shortest_ms = at_least_ms(costs.durations_ms, costs.sleeps)
    # Dispatching before a task has ended hides the host; a bound must not count on it.
    host_ms = 0.0 if dispatch(setting.arguments).is_early else setting.machine.host_ms
    graphs = setting.graphs(graph)
    bounds = [
        lower_bound(
            of_step, placement, step_ms, links=setting.machine.links, host_ms=host_ms, operations_ms=costs.operations_ms
        ).total_ms
        for of_step, step_ms in zip(graphs, shortest_ms, strict=True)
    ]
    metrics = run_metrics(timeline, simulation.step_ms)
    result = metrics.as_dict()
    result["peak_memory"] = peak_memory(timeline, graph, placement, weights)
    result |= memory_figures(timeline, graph, placement)
    if any(metrics.engine_busy):
        result |= _engine_figures(setting, ordering, costs, metrics)
    result["work_ms"] = round(sum(timeline.work_s()) * 1e3 / setting.num_steps, 6)
    result["lower_bound_ms"] = round(fmean(bounds), 6)
    result["upper_bound_ms"] = _upper_bound_ms(setting, ordering, costs)
    if setting.arguments.optimum is not None:
        result |= _optimum(setting, ordering, shortest_ms)
    return result


def _engine_figures(setting: Setting, ordering: Order, costs: Costs, metrics: RunMetrics) -> dict[str, Any]:
    """What engines cost, by the same run without their time; and which one holds it up, in words or None."""
    free = dict.fromkeys(lanes_beside(ordering.graph), 0.0)
    simulation = run_simulation(
        arbiters_of(ordering, setting.arguments),
        replace(costs, operations_ms={**costs.operations_ms, **free}),
        machine=setting.machine,
        num_steps=setting.num_steps,
        absent=setting.durations.absent,
    )
    without_ms = run_metrics(simulation.timeline, simulation.step_ms).makespan_ms_mean
    gain = 1 - without_ms / metrics.makespan_ms_mean if metrics.makespan_ms_mean else 0.0
    return {
        "makespan_ms_without_engines": without_ms,
        "bottleneck": bottleneck(metrics.engine_busy, metrics.stage_bubbles, metrics.waited_for_engines, gain=gain),
    }


def _upper_bound_ms(setting: Setting, ordering: Order, costs: Costs) -> float | None:
    """The paper's bound for bf, mean over the steps, where its assumptions hold; else None."""
    links, graph = setting.machine.links, ordering.graph
    num_stages, num_microbatches = ordering.placement.num_stages, graph.num_microbatches
    free = not (links.latency_ms or links.activation_bytes or links.gradient_bytes or any(links.extra_ms.values()))
    applies = (
        ordering.is_bf
        and free
        and costs.sleeps is None
        and not setting.machine.host_ms
        and ordering.placement == linear(num_stages)
        and graph == chain(num_stages, num_microbatches)
        and min(ordering.windows) >= num_microbatches
    )
    if not applies:
        return None
    steps = costs.durations_ms
    return round(fmean(bf_upper_bound_ms(step[..., 0], step[..., 1] + step[..., 2]) for step in steps), 6)


def _optimum(setting: Setting, ordering: Order, shortest_ms: np.ndarray) -> dict[str, Any]:
    try:
        found = [
            find_optimum(
                of_step,
                ordering.placement,
                step_ms,
                links=setting.machine.links,
                time_limit_s=setting.arguments.optimum,
            )
            for of_step, step_ms in zip(setting.graphs(ordering.graph), shortest_ms, strict=True)
        ]
    except (ImportError, ValueError) as error:  # no solver, or no order found in the time that the user gave
        raise BadInput(str(error)) from error
    return {
        "optimum_ms": round(fmean(one.makespan_ms for one in found), 6),
        "optimum_is_proven": all(one.is_proven for one in found),
    }


def write_files(arguments: argparse.Namespace, outcomes: dict[str, Outcome]) -> None:
    """The pictures and traces that were asked for; their libraries are loaded only then."""
    timelines = [(label, outcome.timeline) for label, outcome in outcomes.items()]
    if arguments.timeline:
        draw(timelines, arguments.timeline, num_steps=arguments.timeline_steps)
    if arguments.trace:
        from rrfp_jax.observe.chrome_trace import write_trace

        write_trace(timelines[0][1], arguments.trace)


def show(console: Console, setting: Setting, outcomes: dict[str, Outcome]) -> None:
    arguments, workload = setting.arguments, setting.workload
    if arguments.json:
        results = {label: outcome.result for label, outcome in outcomes.items()}
        printed = {"compare": results} if arguments.compare else next(iter(results.values()))
        if workload is not None:
            printed = printed | {"workload": workload.figures}
        print(json.dumps(printed, allow_nan=False), flush=True)
    elif arguments.compare:
        show_comparison(console, {label: outcome.result for label, outcome in outcomes.items()})
    else:
        outcome = next(iter(outcomes.values()))
        show_run(console, outcome.ordering.label, outcome.result, outcome.ordering.bounds)
    if workload is not None and not arguments.json:
        console.print(workload.text, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
