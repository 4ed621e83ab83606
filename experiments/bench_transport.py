"""Cost of a message between two processes of this machine, by transport and size.

*One way* is half a round trip; *CPU* is the processor time of both processes, user and system, per message. Small
arrays are sent by ``transfer`` here too; in a run they go through sockets anyway.
"""

import time
from multiprocessing.connection import Connection

from rich.console import Console
from rich.table import Table

from experiments.transport_pair import WAYS, Stage, Way, name_of, pair

SIZES = (("32 B", 32, 2000), ("64 KiB", 1 << 16, 1000), ("4 MiB", 1 << 22, 200))
"""Name, bytes and number of round trips."""
_WARM_UP = 50

Figures = tuple[str, float, float]
"""Size, one-way time in us, and processor time in us."""


def bench_transport(console: Console) -> None:
    """Prints a table of times per message."""
    table = Table(title="two processes, one message at a time: us per message", title_justify="left")
    for heading in ("transport", "size", "one way", "CPU"):
        table.add_column(heading, justify="left" if heading == "transport" else "right")
    for way in WAYS:
        for size, one_way_us, cpu_us in measure(way):
            table.add_row(name_of(way), size, f"{one_way_us:.0f}", f"{cpu_us:.0f}")
    console.print(table)


def measure(way: Way) -> list[Figures]:
    """Returns the figures of every size."""
    with pair(way, [num_bytes for _, num_bytes, _ in SIZES], _play_all) as pipes:
        here, there = (pipe.recv() for pipe in pipes)
        for pipe in pipes:
            pipe.send("end")
    return [
        (name, seconds * 1e6 / 2, (one + other) * 1e6 / 2)
        for (name, seconds, one), (_, _, other) in zip(here, there, strict=True)
    ]


def _play_all(stage: Stage, pipe: Connection) -> None:
    pipe.send([(name, *_play(stage, edge, num_rounds)) for edge, (name, _, num_rounds) in enumerate(SIZES)])
    pipe.recv()


def _play(stage: Stage, edge: int, num_rounds: int) -> tuple[float, float]:
    """Returns the seconds per round trip, and this process's processor seconds in one."""
    _rounds(stage, edge, _WARM_UP)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    _rounds(stage, edge, num_rounds)
    elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return elapsed_s / num_rounds, cpu_s / num_rounds


def _rounds(stage: Stage, edge: int, num_rounds: int) -> None:
    for step in range(num_rounds):
        if stage.rank == 0:
            stage.throw(edge, step)
            stage.catch()
        else:
            stage.catch()
            stage.throw(edge, step)
