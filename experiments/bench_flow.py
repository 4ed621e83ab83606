"""Cost of a token without work in :func:`rrfp_jax.flow`, beside bare queues and threads, and beside arbiters.

The pipes are serial, parallel with four workers, and serial. Bare are a thread for each worker and a ``queue.Queue`` of
as many places as there are lines before each pipe; a serial pipe keeps what comes too early. Both run in turn. The
arbiters' cost is that of their events alone, without threads and calls: one for each pipe, or one for all of them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import Queue
from statistics import median
from typing import Any

from rich.console import Console

from rrfp_jax.commands.common.console import make_table
from rrfp_jax.core import InputArrived, RunTask, Send, StepStarted, TaskFinished
from rrfp_jax.core.arbiter import StageArbiter
from rrfp_jax.core.hints import BF_DEEP, ready
from rrfp_jax.core.memory import AheadBound
from rrfp_jax.core.plan import Agreement, StepRules
from rrfp_jax.core.stage_setup import StageSetup
from rrfp_jax.flows import Pipe, flow
from rrfp_jax.schedules import Edge, PipelineGraph, linear, looped

NUM_TOKENS, REPEATS = 100_000, 3
LINES = (4, 16, 64, 256)
WORKERS = (1, 4, 1)
_TOKENS_PER_STEP, _STEPS = 512, 20


def bench_flow(console: Console) -> None:
    """Prints microseconds per token, medians of runs taken in turn."""
    headings = ("bare queues", "flow", "ratio", "an arbiter per pipe", "one arbiter")
    table = make_table("flow: microseconds per token, of four pipes without work", "lines", *headings, numeric=True)
    for lines in LINES:
        ways: dict[str, Callable[[], float]] = {"bare": lambda n=lines: _bare_s(n), "flow": lambda n=lines: _flow_s(n)}  # type: ignore[misc]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, way in ways.items():
                seconds[name].append(way() / NUM_TOKENS)
        bare_s, flow_s = (median(seconds[name]) for name in ways)
        arbiters = (_events_s(lines, num_stages) for num_stages in (1 + len(WORKERS), 1))
        told = [f"{each * 1e6:.1f}" for each in (bare_s, flow_s, *arbiters)]
        table.add_row(str(lines), *told[:2], f"{flow_s / bare_s:.2f}", *told[2:])
    console.print(table)


def _pipes(sink: Callable[[Any], None]) -> list[Pipe]:
    runs = (lambda value: value, lambda value: value, sink)
    return [Pipe(run, workers=number) for run, number in zip(runs, WORKERS, strict=True)]


def _flow_s(lines: int) -> float:
    got: list[int] = []
    began = time.perf_counter()
    flow(range(NUM_TOKENS), *_pipes(got.append), lines=lines)
    taken = time.perf_counter() - began
    assert got == list(range(NUM_TOKENS))
    return taken


def _bare_s(lines: int) -> float:
    got: list[int] = []
    began = time.perf_counter()
    run_bare(range(NUM_TOKENS), _pipes(got.append), lines)
    taken = time.perf_counter() - began
    assert got == list(range(NUM_TOKENS))
    return taken


def run_bare(source: Iterable[Any], pipes: list[Pipe], lines: int) -> None:
    """Runs pipes as one writes them by hand: a queue before each, and a thread for each worker."""
    queues: list[Queue[tuple[int, Any] | None]] = [Queue(lines) for _ in pipes]
    left, lock = [pipe.workers for pipe in pipes], threading.Lock()

    def feed() -> None:
        for item in enumerate(source):
            queues[0].put(item)
        queues[0].put(None)

    def work(number: int) -> None:
        pipe, coming, following = pipes[number], queues[number], queues[number + 1 : number + 2]
        early: dict[int, Any] = {}
        turn = 0
        while (item := coming.get()) is not None:
            if pipe.workers > 1:
                result = item[0], pipe.run(item[1])
                for queue in following:
                    queue.put(result)
                continue
            early[item[0]] = item[1]
            while turn in early:
                result = turn, pipe.run(early.pop(turn))
                for queue in following:
                    queue.put(result)
                turn += 1
        with lock:
            left[number] -= 1
            others = [coming] if left[number] else following
        for queue in others:
            queue.put(None)

    threads = [threading.Thread(target=feed)]
    threads += [threading.Thread(target=work, args=(n,)) for n, pipe in enumerate(pipes) for _ in range(pipe.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _events_s(lines: int, num_stages: int) -> float:
    """Returns the seconds that arbiters take for a token: F alone, on a stage for each pipe, or on one for all.

    The lines are the window of one stage; of several stages they bound the source ahead of its last reader.
    """
    num_chunks = 1 + len(WORKERS)
    edges = {(chunk, chunk + 1) for chunk in range(num_chunks - 1)} | (
        {(0, num_chunks - 1)} if num_stages > 1 else set()
    )
    graph = PipelineGraph(
        num_chunks,
        _TOKENS_PER_STEP,
        tuple(Edge(*edge, carries_gradient=False) for edge in sorted(edges)),
        frozen=frozenset(range(num_chunks)),
    )
    placement = linear(num_chunks) if num_stages > 1 else looped(1, num_chunks)
    arbiters = [
        StageArbiter(
            StageSetup(
                graph,
                placement,
                stage,
                consumption=ready(BF_DEEP),
                window=_TOKENS_PER_STEP if num_stages > 1 else lines,
                rules=StepRules(updates=False, agreement=Agreement.NONE),
                read_ahead=(AheadBound(chunk=0, limit=lines),) if num_stages > 1 and stage == 0 else (),
            )
        )
        for stage in range(num_stages)
    ]
    began = time.perf_counter()
    for step in range(_STEPS):
        events: deque[tuple[int, Any]] = deque((stage, StepStarted(step, 0.0)) for stage in range(num_stages))
        while events:
            stage, event = events.popleft()
            for instruction in arbiters[stage].handle(event):
                if isinstance(instruction, RunTask):
                    events.append((stage, TaskFinished(step, 0.0, instruction.task)))
                elif isinstance(instruction, Send):
                    events.append((instruction.stage, InputArrived(step, 0.0, instruction.message)))
        assert not any(arbiter.is_active for arbiter in arbiters)
    return (time.perf_counter() - began) / _STEPS / _TOKENS_PER_STEP
