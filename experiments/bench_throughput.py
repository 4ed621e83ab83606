"""Bytes per second from one process of this machine to another, by transport, beside gloo.

*Frames* are bytes from memory to memory, as the network carries them; *arrays* go from a device to a device: an array
that is ready is staged, sent, received, put on the device and waited for. ``gloo`` is ``send`` and ``recv`` of
``torch.distributed`` between tensors that exist before. *One way* counts one message at a time, half of a round trip;
*both* is one each way at the same time, per direction. All pairs of processes live through the whole measurement, are
idle but for one, and take turns; medians are printed.

Torch is no dependency. Where the interpreter at hand does not have it, ``--torch-python`` names one that has.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.transport_pair import PATIENCE_S, WAYS, Stage, Way, name_of, pair
from experiments.turns import printed_by, torch_processes

SIZES_MIB = (4, 16, 64)
MODES = ("one way", "both")
_TURNS = 5
_MESSAGES = 4
"""Number of messages in a turn, of which the first is not counted."""
_TOPIC = b"frames"

Measure = Callable[[int, str], list[float]]
"""Function of a size in MiB and a mode that returns the seconds that each message took one way."""


def bench_throughput(console: Console, torch_python: str | None = None) -> None:
    """Prints a table of gigabytes per second."""
    with ExitStack() as stack:
        measures: dict[str, Measure] = {}
        gloo = stack.enter_context(gloo_pair(torch_python or sys.executable))
        if gloo is None:
            console.print("gloo: this Python has no torch; give one that has with --torch-python PATH")
        else:
            measures["gloo"] = gloo
        for way in WAYS:
            measures |= stack.enter_context(_measures_of(way))
        figures = _in_turns(measures)
    table = Table(title="two processes: GB/s of each direction, medians, taken in turn", title_justify="left")
    for heading in ("way", *(f"{mib} MiB, {mode}" for mib in SIZES_MIB for mode in MODES)):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for name in measures:
        cells = []
        for case, seconds in figures[name].items():
            rate = (case[0] << 20) / median(seconds) / 1e9
            beside = median(figures["gloo"][case]) / median(seconds) if gloo is not None and name != "gloo" else None
            cells.append(f"{rate:.2f}" if beside is None else f"{rate:.2f} ({beside:.2f}x)")
        table.add_row(name, *cells)
    console.print(table)


def _in_turns(measures: dict[str, Measure]) -> dict[str, dict[tuple[int, str], list[float]]]:
    cases = [(mib, mode) for mib in SIZES_MIB for mode in MODES]
    figures: dict[str, dict[tuple[int, str], list[float]]] = {name: {c: [] for c in cases} for name in measures}
    for _ in range(_TURNS):
        for case in cases:
            for name, measure in measures.items():
                figures[name][case] += measure(*case)[1:]
    return figures


@contextmanager
def _measures_of(way: Way) -> Iterator[dict[str, Measure]]:
    """Yields the measurements of frames and of arrays by name."""
    with pair(way, [mib << 20 for mib in SIZES_MIB], _obey) as pipes:

        def measure(what: str, mib: int, mode: str) -> list[float]:
            for pipe in pipes:
                pipe.send((what, mib, mode))
            one, _ = (_heard(pipe) for pipe in pipes)
            return one

        kinds = ("arrays",) if way[0] == "transfer" else ("frames", "arrays")
        yield {f"{name_of(way)}, {what}": partial(measure, what) for what in kinds}


def _heard(pipe: Connection) -> list[float]:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"a process that is measured said nothing for {PATIENCE_S:.0f} s")
    seconds: list[float] = pipe.recv()
    return seconds


# -- a process of ours -----------------------------------------------------------------------------------------------


def _obey(stage: Stage, pipe: Connection) -> None:
    """Measures as the pipe tells it to."""
    frames = _Frames(stage)
    while True:
        what, mib, mode = pipe.recv()
        edge = SIZES_MIB.index(mib)
        pipe.send(_play(stage.rank, mode, *(frames.both(edge) if what == "frames" else _arrays(stage, edge))))


def _play(rank: int, mode: str, throw: Callable[[int], None], catch: Callable[[], None]) -> list[float]:
    seconds = []
    for number in range(_MESSAGES):
        started_s = time.perf_counter()
        if mode == "both" or rank == 0:
            throw(number)
            catch()
        else:
            catch()
            throw(number)
        seconds.append((time.perf_counter() - started_s) / (1 if mode == "both" else 2))
    return seconds


def _arrays(stage: Stage, edge: int) -> tuple[Callable[[int], None], Callable[[], None]]:
    import jax

    device = jax.devices()[0]

    def catch() -> None:
        jax.device_put(stage.catch(), device).block_until_ready()

    return lambda step: stage.throw(edge, step), catch


class _Frames:
    """Sender of bytes from this process's memory to the other's, without a device."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._came = stage, SimpleQueue[Any]()
        stage.network.subscribe_packed(_TOPIC, lambda rank, header, frames: self._came.put(frames))

    def both(self, edge: int) -> tuple[Callable[[int], None], Callable[[], None]]:
        import numpy as np

        stage, frame = self._stage, np.asarray(self._stage.values[edge]).view(np.uint8).data

        def throw(_: int) -> None:
            stage.loop.call_soon_threadsafe(lambda: stage.network.send_arrays(1 - stage.rank, _TOPIC, b"", [frame]))

        def catch() -> None:
            self._came.get(timeout=PATIENCE_S)

        return throw, catch


# -- gloo ------------------------------------------------------------------------------------------------------------

_GLOO = """
import json, sys, time
num_messages, rank, num_ranks, port = map(int, sys.argv[1:])
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
print("ready", flush=True)
other, tensors = 1 - rank, {}
for line in sys.stdin:
    mib, mode = json.loads(line)
    out, came = tensors.setdefault(mib, (torch.zeros(mib << 18), torch.zeros(mib << 18)))
    seconds = []
    for _ in range(num_messages):
        started_s = time.perf_counter()
        if mode == "both":
            works = [dist.isend(out, other), dist.irecv(came, other)]
            for work in works:
                work.wait()
        elif rank == 0:
            dist.send(out, other)
            dist.recv(came, other)
        else:
            dist.recv(came, other)
            dist.send(out, other)
        seconds.append((time.perf_counter() - started_s) / (1 if mode == "both" else 2))
    print(json.dumps(seconds), flush=True)
"""


@contextmanager
def gloo_pair(python: str) -> Iterator[Measure | None]:
    """Yields the measure of two ``torch.distributed`` processes, bound as ours are; None if ``python`` has no torch."""
    if printed_by(python, "import torch") is None:
        yield None
        return
    with torch_processes(python, ("-c", _GLOO, str(_MESSAGES)), 2) as members:
        for member in members:
            member.answer()

        def measure(mib: int, mode: str) -> list[float]:
            for member in members:
                member.tell(json.dumps([mib, mode]))
            one, _ = (json.loads(member.answer()) for member in members)
            seconds: list[float] = one
            return seconds

        yield measure
