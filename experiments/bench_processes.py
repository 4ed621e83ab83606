"""Cost of a pipeline in several processes of this machine, each case through the launcher.

Without work: wall time and processor time (user and system, of all ranks) per task of a rank. With work: the step
against the time that the work alone needs. Large activations: the step against a simulation whose links have the
one-way time that :mod:`experiments.bench_transport` measures here. A stage over two processes: the time that each task
waits for agreement.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments import bench_transport, transport_pair
from experiments.emulate import EMULATED_STEP
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.simulation import Costs, Links, Machine, simulate
from rrfp_jax.simulation.costs import constant

_REPEATS = 3
_PATIENCE_S = 300
_FOUR = ("--num-stages", "4", "--num-microbatches", "16")
_LARGE_BYTES = 4 << 20
_TASKS_PER_TRANSFER = 4
_IDEAL_MS = 570.0
_TRANSPORTS = ("sockets", "transfer")


def bench_processes(console: Console) -> None:
    """Prints the figures of all cases."""
    table = Table(title="4 processes, 4 stages x 16 microbatches: medians, taken in turn", title_justify="left")
    for heading in ("transport", "wall us per rank task", "CPU us per task", "10/20 ms against ideal"):
        table.add_column(heading, justify="left" if heading == "transport" else "right")
    empty: dict[str, list[dict[str, Any]]] = {transport: [] for transport in _TRANSPORTS}
    full: dict[str, list[dict[str, Any]]] = {transport: [] for transport in _TRANSPORTS}
    for _ in range(_REPEATS):
        for transport in _TRANSPORTS:
            way = (*_FOUR, "--transport", transport)
            empty[transport].append(launch(4, *way, "--durations-ms", "0,0,0", "--steps", "100"))
            full[transport].append(launch(4, *way, "--durations-ms", "10,10,10", "--steps", "3"))
    for transport, runs in empty.items():
        table.add_row(
            transport,
            f"{_median(runs, 'wall_us_per_rank_task'):.0f}",
            f"{_median(runs, 'cpu_us_per_task'):.0f}",
            f"{median(ms for run in full[transport] for ms in run['makespan_ms']) / _IDEAL_MS:.3f}",
        )
    console.print(table)
    _show_overlap(console)
    _show_agreement(console)


def launch(num_processes: int, *arguments: str) -> dict[str, Any]:
    """Returns the JSON that an emulated run on so many processes prints."""
    command = [sys.executable, "-m", "experiments.launch", "--processes", str(num_processes), "--"]
    ended = subprocess.run(
        [*command, "experiments.emulate", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"the emulated run ended with code {ended.returncode}: {ended.stderr.strip()[-2000:]}")
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def _show_overlap(console: Console) -> None:
    """Prints whether transfers overlap compute. Tasks last four times as long as a message is under way."""
    for way in transport_pair.WAYS:
        transport, encrypt_arrays = way
        one_way_ms = {size: us * 1e-3 for size, us, _ in bench_transport.measure(way)}
        latency_ms = one_way_ms["4 MiB"]
        task_ms = _TASKS_PER_TRANSFER * latency_ms
        size = ("--activation-bytes", str(_LARGE_BYTES), "--encrypt-arrays", str(encrypt_arrays).lower())
        work = ("--num-stages", "2", "--num-microbatches", "16", "--durations-ms", ",".join([f"{task_ms:.3f}"] * 3))
        run = launch(2, *work, *size, "--transport", transport, "--steps", "4")
        measured_ms, ideal_ms = median(run["makespan_ms"]), _ideal_ms(task_ms, latency_ms)
        console.print(
            f"2 processes, 4 MiB activations, {transport_pair.name_of(way)}: one way "
            f"{latency_ms:.2f} ms, tasks of {task_ms:.1f} ms, step {measured_ms:.1f} ms, ideal {ideal_ms:.1f} ms, "
            f"ratio {measured_ms / ideal_ms:.3f}, at most {run['peak_transport_bytes'] / _LARGE_BYTES:.0f} held at once"
        )


def _ideal_ms(task_ms: float, latency_ms: float) -> float:
    order = OrderingOptions().resolve(num_stages=2, num_microbatches=16)
    simulation = simulate(
        order.arbiters(EMULATED_STEP),
        Costs(durations_ms=constant((task_ms,) * 3, order.graph)),
        machine=Machine(links=Links(latency_ms=latency_ms)),
    )
    return simulation.timeline.makespan_s() * 1e3


def _show_agreement(console: Console) -> None:
    grouped = ("--num-stages", "2", "--tensor", "2", "--num-microbatches", "16", "--steps", "20")
    for protocol in ("leader", "propose"):
        for durations in ("0,0,0", "10,10,10"):
            runs = [
                launch(4, *grouped, "--group-protocol", protocol, "--durations-ms", durations) for _ in range(_REPEATS)
            ]
            console.print(
                f"4 processes, 2 stages x tensor 2, {protocol}, tasks of {durations} ms: agreement "
                f"{_median(runs, 'agreement_us_per_task'):.0f} us per task"
            )


def _median(runs: Sequence[dict[str, Any]], name: str) -> float:
    return median(run[name] for run in runs)
