"""Run the real runtime on emulated stages: programs that sleep for given durations, on virtual CPU devices.

::

    python -m experiments.emulate --num-stages 4 --num-microbatches 16 \\
        --hint bf --window 8
    rrfp launch --processes 4 -- \\
        experiments.emulate --num-stages 4 --durations-ms 0,0,0

With all durations zero the programs do not sleep, and the rest is the overhead of the runtime itself. With
``--accelerator`` every stage has an emulated accelerator, with a queue of its own and a launch cost on the host, and
the table tells how much of its own time it was idle. Started by
``python -m experiments.launch --processes N -- experiments.emulate ...`` the stages are spread over N processes.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.workload_options import add_workload_arguments, has_graph, plan_workload
from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.commands.common.console import add_timeline_argument, check_outputs, draw, make_console, make_table
from rrfp_jax.commands.common.errors import checking_input
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import OrderingOptions, add_ordering_arguments, given_order
from rrfp_jax.commands.common.process import enter
from rrfp_jax.commands.main import run
from rrfp_jax.commands.simulate import GivenWork
from rrfp_jax.commands.simulate_reports import engine_columns, engines_in_words
from rrfp_jax.commands.studies import (
    GivenDurations,
    Profile,
    add_graph_arguments,
    check_fits_graph,
    load_durations,
    parse_durations_ms,
    parse_graph,
    parse_link_delays_ms,
    requested_graph,
)
from rrfp_jax.core import Agreement, Dispatch, GroupProtocol, Order, StepRules, dispatch_of
from rrfp_jax.core.dispatch import AUTO, parse_dispatch
from rrfp_jax.core.replicas import Replication, microbatches_per_replica
from rrfp_jax.schedules import bits
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import Links, both_directions
from rrfp_jax.simulation.costs import constant, for_graph
from rrfp_jax.simulation.result import RunMetrics, bottleneck, memory_figures, run_metrics

EMULATED_STEP = StepRules(updates=False, agreement=Agreement.ALL)
"""Emulated chunks have no parameters; as in training, the next step starts once all stages have agreed."""


_PRIVATE = ("events", "json", "timeline", "trace")
"""Names of the options that may differ between ranks."""
_LOG_STEPS = 10
_LAUNCH_MS = 0.3
_DURATIONS_MS = "10,10,10"


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        check_outputs(timeline=arguments.timeline, trace=arguments.trace, events=arguments.events)
        if not 0 < arguments.progress_deadline_s < math.inf:
            raise ValueError(
                f"progress-deadline-s is {arguments.progress_deadline_s}: give a positive number of seconds"
            )
        dispatch = _dispatch(arguments)
        workload = plan_workload(arguments, parse_graph(arguments), num_steps=arguments.steps)
        resolved = _resolve(arguments, workload)
        durations = _durations(arguments, resolved, workload)
        durations_ms, num_steps = durations.durations_ms, _num_steps(arguments, durations)
        delays_ms = parse_link_delays_ms(arguments.link_delay_ms)
        links = Links(extra_ms=both_directions(delays_ms, arguments.num_stages * arguments.data))

        process = enter(
            num_stages=arguments.num_stages,
            data=arguments.data,
            tensor=arguments.tensor,
            configuration={name: value for name, value in vars(arguments).items() if name not in _PRIVATE},
            cluster=ClusterConfig(
                silence_deadline_s=arguments.silence_deadline_s,
                encrypt_arrays=arguments.encrypt_arrays == "true",
                transport=arguments.transport,
            ),
            platform="cpu",
            devices=arguments.devices,
        )

    from experiments.emulate_figures import agreement_us_per_task, process_figures
    from rrfp_jax.testing import dispatch_overhead_ms, emulate, idle_shares

    with checking_input():
        arbiters = resolved.arbiters(
            EMULATED_STEP,
            certain_ahead=dispatch.certain,
            members=process.members(),
            protocol=GroupProtocol(arguments.group_protocol),
            shortest_s=process.shortest_foreseen_s(),
        )
    emulation = emulate(
        arbiters,
        durations_ms,
        num_steps,
        process=process,
        activation_bytes=arguments.activation_bytes,
        launch_ms=arguments.launch_ms if arguments.accelerator else None,
        just_in_time=dispatch.just_in_time,
        progress_deadline_s=arguments.progress_deadline_s,
        log_steps=_LOG_STEPS,
        events=arguments.events and Path(arguments.events),
        link_delays_ms=links.extra_ms,
        absent=durations.absent,
    )
    agreement_us = agreement_us_per_task(process, arbiters, emulation)
    process.finish()
    if process.rank:
        return 0
    metrics = run_metrics(emulation.timeline, emulation.step_ms)
    figures: dict[str, Any] = {
        **asdict(metrics),
        "dispatch_overhead_ms": dispatch_overhead_ms(emulation.timeline, durations_ms),
        **process_figures(process, emulation),
    }
    figures |= memory_figures(emulation.timeline, resolved.graph, resolved.placement)
    if any(metrics.engine_busy):
        figures["bottleneck"] = bottleneck(metrics.engine_busy, metrics.stage_bubbles, metrics.waited_for_engines)
    if resolved.foresight is not None:
        figures["looking_ahead"] = emulation.looking_ahead
    if emulation.on_device is not None:
        figures["device_idle"] = idle_shares(emulation.on_device)
    if agreement_us is not None:
        figures["agreement_us_per_task"] = agreement_us
    if workload is not None:
        figures["workload"] = workload.figures
    if arguments.json:
        print(json.dumps(figures), flush=True)
    else:
        _show(resolved, metrics, figures, workload)
    _write_pictures(arguments, resolved, emulation.timeline)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("emulate", __doc__)
    parser.add_argument("--num-stages", type=int, default=4, metavar="N", help="stages of the pipeline")
    parser.add_argument(
        "--num-microbatches", type=int, default=16, metavar="N", help="microbatches of a step, over all replicas"
    )
    parser.add_argument("--data", type=int, default=1, metavar="N", help="replicas of the whole pipeline")
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="devices of each stage")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="devices of each process, which its stages share where they are fewer (default: one for each)",
    )
    parser.add_argument(
        "--chunks-per-stage",
        type=int,
        metavar="N",
        help="chunks of the model on every stage (default: as the schedule has it, else 1)",
    )
    add_graph_arguments(parser)
    add_ordering_arguments(parser)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--durations-ms",
        default=None,
        metavar="F,I,W",
        help="milliseconds of a forward, an input gradient and a weight gradient, the same for every chunk and "
        "microbatch (default 10,10,10)",
    )
    work.add_argument(
        "--durations",
        metavar="D.npy",
        help="milliseconds, float64 [steps, chunks, microbatches, 3]: F, I, W; NaN where a pair of chunk and "
        "microbatch does not exist",
    )
    add_workload_arguments(work)
    work.add_argument("--steps", type=int, metavar="N", help="steps (default: those of the durations file, else 10)")
    work.add_argument(
        "--dispatch-ahead",
        default=AUTO,
        metavar="auto|just-in-time|certain|0",
        help="when a stage is handed its next task: shortly before the running one ends, once nothing can "
        "change the choice, or, by 0, at its end (default auto: just-in-time with --accelerator, else certain)",
    )
    work.add_argument(
        "--accelerator", action="store_true", help="tasks run on emulated accelerators, which have queues of their own"
    )
    work.add_argument(
        "--launch-ms",
        type=float,
        metavar="MS",
        help="with --accelerator, what handing over a task costs the host (default 0.3)",
    )
    work.add_argument(
        "--progress-deadline-s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long no task may finish before the run is given up",
    )
    between = parser.add_argument_group("between processes")
    between.add_argument(
        "--transport",
        choices=("auto", "sockets", "transfer"),
        default="auto",
        help="how tensors travel: through host memory (sockets, which auto takes) or by JAX's transfer server",
    )
    between.add_argument(
        "--group-protocol",
        choices=tuple(GroupProtocol),
        default=GroupProtocol.LEADER,
        help="how the processes of one stage agree on the next task",
    )
    between.add_argument(
        "--activation-bytes", type=int, default=32, metavar="N", help="bytes of what travels between chunks"
    )
    between.add_argument(
        "--encrypt-arrays",
        choices=("true", "false"),
        default="true",
        help="false: arrays travel authenticated by their heads only",
    )
    between.add_argument(
        "--silence-deadline-s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long another process may be silent before it counts as lost",
    )
    work.add_argument(
        "--link-delay-ms",
        metavar="A-B:MS,...",
        help="hand tensors on a link between two stages over so much later, both directions, as 1-2:30",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    add_timeline_argument(output, "emulate")
    output.add_argument("--events", metavar="FILE.json.gz", help="write the last events, for rrfp replay")
    output.add_argument("--trace", metavar="FILE.json", help="write all steps for ui.perfetto.dev")
    return parser


def _dispatch(arguments: argparse.Namespace) -> Dispatch:
    if arguments.launch_ms is None:
        arguments.launch_ms = _LAUNCH_MS
    elif not arguments.accelerator:
        raise ValueError("launch-ms is what handing a task to an accelerator costs: give --accelerator too")
    elif not 0 <= arguments.launch_ms < math.inf:
        raise ValueError(f"launch-ms is {arguments.launch_ms}: give 0 or more milliseconds")
    how = dispatch_of(parse_dispatch(arguments.dispatch_ahead), on_host=not arguments.accelerator)
    if how.pairs:
        raise ValueError("emulated stages run one task at a time, so pairs are for simulate and train: leave them out")
    return how


def _resolve(arguments: argparse.Namespace, workload: GivenWork | None) -> Order:
    ordering = OrderingOptions(**given_order(arguments))
    check_fits_graph([ordering], has_graph=has_graph(arguments), chunks_per_stage=arguments.chunks_per_stage)
    num_microbatches = microbatches_per_replica(arguments.num_microbatches, max(arguments.data, 1))
    if workload is None:
        model = requested_graph(arguments, num_microbatches=num_microbatches)
    else:
        graph = replace(workload.model.graph, num_microbatches=num_microbatches)
        model = workload.model._replace(graph=graph)
    return ordering.resolve(
        num_stages=arguments.num_stages,
        num_microbatches=num_microbatches,
        chunks_per_stage=arguments.chunks_per_stage,
        lengths_ms=_profile_ms(arguments, workload) if ordering.offload or ordering.recompute is not None else None,
        placement=model and model.placement,
        graph=model and model.graph,
        num_replicas=arguments.data,
    )


def _profile_ms(arguments: argparse.Namespace, workload: GivenWork | None) -> Profile:
    """Returns the mean milliseconds of F, input gradient and weight gradient of one chunk."""
    if workload is not None:
        return workload.durations.profile_ms()
    if arguments.durations is not None:
        return load_durations(arguments.durations).profile_ms()
    return parse_durations_ms(arguments.durations_ms or _DURATIONS_MS)


def _durations(arguments: argparse.Namespace, resolved: Order, workload: GivenWork | None) -> GivenDurations:
    if workload is not None and workload.arranged is not None:
        if arguments.data > 1:
            raise ValueError("balance order is for one replica: leave data out")
        return workload.arranged(resolved)
    if workload is not None:
        return _on_replicas(workload.durations, arguments.data)
    if arguments.durations is None:
        same_ms = constant(parse_durations_ms(arguments.durations_ms or _DURATIONS_MS), resolved.graph)
        return GivenDurations(for_graph(same_ms, resolved.graph))
    if arguments.durations_ms is not None:
        raise ValueError("--durations and --durations-ms both say how long tasks take: give one of them")
    durations = load_durations(arguments.durations)
    for pairs in durations.absent:
        resolved.graph.skipping(pairs)
    return GivenDurations(durations.for_graph(resolved.graph), durations.absent)


def _on_replicas(durations: GivenDurations, num_replicas: int) -> GivenDurations:
    """Returns the durations of so many replicas of the pipeline, each of which runs its share of the microbatches."""
    _, num_chunks, num_microbatches, _ = durations.durations_ms.shape
    copies = Replication(
        num_chunks=num_chunks,
        num_microbatches=microbatches_per_replica(num_microbatches, num_replicas),
        num_replicas=num_replicas,
    )
    absent = [copies.pairs((chunk, m) for chunk, mask in pairs for m in bits(mask)) for pairs in durations.absent]
    return GivenDurations(np.repeat(durations.durations_ms, num_replicas, axis=1), absent)


def _num_steps(arguments: argparse.Namespace, durations: GivenDurations) -> int:
    if arguments.steps is None:
        return 10 if arguments.durations is None else durations.num_steps
    if arguments.steps < 1:
        raise ValueError(f"steps is {arguments.steps}: give at least 1")
    return arguments.steps


def _write_pictures(arguments: argparse.Namespace, resolved: Order, timeline: Timeline) -> None:
    if arguments.timeline:
        draw([(f"{resolved.label}, real runtime on emulated stages", timeline)], arguments.timeline)
    if arguments.trace:
        from rrfp_jax.observe.chrome_trace import write_trace

        write_trace(timeline, arguments.trace)


def _show(resolved: Order, metrics: RunMetrics, figures: Mapping[str, Any], workload: GivenWork | None) -> None:
    idle = figures.get("device_idle")
    engines = engine_columns(figures)
    headings = ["stage", "bubble", "peak in flight", "may hold"] + ["device idle"] * (idle is not None)
    table = make_table(f"{resolved.label}, {len(metrics.step_ms)} steps", *headings, *engines, numeric=True)
    for stage, bubble in enumerate(metrics.stage_bubbles):
        row = [str(stage), f"{bubble:.1%}", str(metrics.peak_in_flight[stage]), resolved.bounds[stage]]
        row += [] if idle is None else [f"{idle[stage]:.1%}"]
        table.add_row(*row, *(cells[stage] for cells in engines.values()))
    console = make_console()
    console.print(table)
    for line in figures_in_words(metrics, figures):
        console.print(line, soft_wrap=True)
    if workload is not None:
        console.print(workload.text, soft_wrap=True)


def figures_in_words(metrics: RunMetrics, figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields one sentence per figure: its value, and the costs that it includes and excludes."""
    yield (
        f"step {metrics.step_ms_mean:.2f} ms, makespan {metrics.makespan_ms_mean:.2f} ms, bubble fraction "
        f"{metrics.bubble_fraction:.1%}; a step over its tasks on all stages: {metrics.us_per_task:.1f} us"
    )
    yield (
        f"dispatch overhead {figures['dispatch_overhead_ms']:.3f} ms per task: what the host took between two tasks, "
        "and what tasks took beyond their durations; none of it is work, and other load on the machine adds to it"
    )
    if "looking_ahead" in figures:
        yield (
            f"foresight is at work on {figures['looking_ahead']} of {len(metrics.stage_bubbles)} stages: it sleeps "
            "where tasks are too short for it"
        )
    if "device_idle" in figures:
        idle = figures["device_idle"]
        busiest = min(range(len(idle)), key=idle.__getitem__)
        yield (
            f"device idle {idle[busiest]:.1%} on the busiest stage ({busiest}): of its own time, from its first task "
            "of a step to its last, waits for other stages included"
        )
    yield from engines_in_words(figures)
    if "wall_us_per_rank_task" in figures:
        yield (
            f"per task of a process: {figures['wall_us_per_rank_task']:.1f} us of wall time, work, waits and overhead "
            f"together (without work, --durations-ms 0,0,0, it is the runtime's own cost), and "
            f"{figures['cpu_us_per_task']:.1f} us of processor time"
        )
    if "agreement_us_per_task" in figures:
        yield (
            f"agreement {figures['agreement_us_per_task']:.1f} us per task: from when a task could start on all "
            "processes of its stage to when the last of them started it"
        )


if __name__ == "__main__":
    run("experiments.emulate")
