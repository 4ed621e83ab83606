"""Measure the costs of the runtime itself, in ratios taken within one run.

::

    python -m experiments.bench                      # everything
    python -m experiments.bench --only runtime

``runtime``: the real runtime on four emulated stages: without work, the time per step of 128 tasks; with F 10 ms and
backward 20 ms, strict 1F1B and BF against the time that the work alone needs; looped stages, ``bf-deep`` against strict
interleaved 1F1B. ``simulation``: tasks per second of the simulator. ``dispatch``: the host's cost by the moment of its
decisions, simulated. ``foresight``: tables with foresight beside the same consumed strictly, simulated. ``fidelity``:
emulated against simulated step times. ``multimodal``: workloads of images and text, real beside forecast.
``deterministic``: the cost of accumulating in microbatch order. ``offload``: half of 1F1B's memory beside the whole,
emulated and real. ``plan``: forecasts of step and memory beside real training (``experiments.bench_plan``). ``orders``:
searched orders beside named tables, simulated. ``split``: the cost of splitting a backward. ``device``: four stages on
one device beside a plain jitted loop (``make bench-gpu`` on an accelerator). ``transport``: the cost of a message
between two processes. ``throughput``: bytes per second between two processes, beside gloo's. ``processes``: the cost of
a pipeline in several processes, whether transfers overlap compute, and the cost of agreement within a stage.
``tokenize``: tokens of 100 MB of text, beside the ``tokenizers`` library alone. ``flow``: pipelines of callables beside
bare queues and threads. All sides of a comparison run in turn,
several times; medians are printed.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.bench_control import bench_control
from experiments.bench_deterministic import bench_deterministic
from experiments.bench_device import bench_device
from experiments.bench_dispatch import bench_dispatch
from experiments.bench_fidelity import bench_fidelity
from experiments.bench_flow import bench_flow
from experiments.bench_foresight import bench_foresight
from experiments.bench_multimodal import bench_multimodal
from experiments.bench_offload import bench_offload
from experiments.bench_orders import bench_orders
from experiments.bench_plan import bench_plan
from experiments.bench_processes import bench_processes
from experiments.bench_simulation import bench_simulation
from experiments.bench_split import bench_split
from experiments.bench_throughput import bench_throughput
from experiments.bench_tokenize import bench_tokenize
from experiments.bench_transport import bench_transport
from experiments.emulate import EMULATED_STEP
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.common.process import use_cpu
from rrfp_jax.simulation.costs import constant
from rrfp_jax.testing import emulate

NUM_STAGES, NUM_MICROBATCHES, REPEATS = 4, 16, 5


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    use_cpu(NUM_STAGES)
    console = make_console()
    for name, part in _parts(arguments.torch_python).items():
        if arguments.only in (None, name):
            part(console)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("bench", __doc__)
    names = [*_parts(None)]
    parser.add_argument(
        "--only", choices=names, metavar="NAME", help=f"measure this alone: {', '.join(names)} (default: all)"
    )
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter that has torch, for 'throughput'")
    return parser


def _parts(torch_python: str | None) -> dict[str, Callable[[Console], object]]:
    return {
        "runtime": bench_runtime,
        "control": bench_control,
        "simulation": bench_simulation,
        "dispatch": bench_dispatch,
        "foresight": bench_foresight,
        "fidelity": bench_fidelity,
        "multimodal": bench_multimodal,
        "deterministic": bench_deterministic,
        "offload": bench_offload,
        "plan": bench_plan,
        "split": bench_split,
        "orders": bench_orders,
        "device": bench_device,
        "transport": bench_transport,
        "tokenize": bench_tokenize,
        "flow": bench_flow,
        "throughput": lambda console: bench_throughput(console, torch_python),
        "processes": bench_processes,
    }


def bench_runtime(console: Console) -> None:
    """Prints the overhead without work, and measured against ideal times with work."""
    empty_ms = emulated_ms((0, 0, 0), 60, hint="bf", window=8)
    num_tasks = 2 * NUM_STAGES * NUM_MICROBATCHES
    console.print(
        f"runtime, {NUM_STAGES} stages x {NUM_MICROBATCHES} microbatches, no work: median {median(empty_ms):.2f} ms "
        f"per step, {median(empty_ms) * 1e3 / num_tasks:.0f} us per task"
    )
    table = Table(title="with work: medians of makespans in ms, taken in turn", title_justify="left")
    for heading in ("order", "ideal", "measured", "ratio"):
        table.add_column(heading, justify="left" if heading == "order" else "right")
    for name, ideal_ms, measured_ms in _in_turn(_CASES):
        table.add_row(name, f"{ideal_ms:.0f}", f"{measured_ms:.1f}", f"{measured_ms / ideal_ms:.3f}")
    console.print(table)


Case = tuple[str, float, tuple[float, float, float], dict[str, Any]]
"""Name, makespan of the strict table by its longest path, durations of F, I and W, and order."""

_CASES: list[Case] = [
    ("1f1b strict, 10/20 ms", 570, (10, 10, 10), {"schedule": "1f1b", "consume": "strict"}),
    ("bf, window 8, 10/20 ms", 570, (10, 10, 10), {"hint": "bf", "window": 8}),
    (
        "interleaved 1f1b strict, 2 chunks, 5/10 ms",
        525,
        (5, 5, 5),
        {"schedule": "interleaved-1f1b", "consume": "strict", "chunks_per_stage": 2},
    ),
    ("bf-deep, window 8, 2 chunks, 5/10 ms", 525, (5, 5, 5), {"hint": "bf-deep", "window": 8, "chunks_per_stage": 2}),
]


def _in_turn(cases: list[Case]) -> list[tuple[str, float, float]]:
    measured: dict[str, list[float]] = {name: [] for name, *_ in cases}
    for _ in range(REPEATS):
        for name, _, durations_ms, order in cases:
            measured[name] += emulated_ms(durations_ms, 2, **order)
    return [(name, ideal_ms, median(measured[name])) for name, ideal_ms, *_ in cases]


def emulated_ms(
    durations_ms: tuple[float, float, float], num_steps: int, *, chunks_per_stage: int = 1, **order: Any
) -> list[float]:
    """Returns the makespans of some emulated steps, in milliseconds."""
    resolved = OrderingOptions(**order).resolve(
        num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, chunks_per_stage=chunks_per_stage
    )
    durations: np.ndarray = constant(durations_ms, resolved.graph)
    timeline = emulate(resolved.arbiters(EMULATED_STEP), durations, num_steps).timeline
    return [timeline.of_step(step).makespan_s() * 1e3 for step in timeline.steps()]


if __name__ == "__main__":
    run_command(main)
