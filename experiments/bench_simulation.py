"""Speed of the core in virtual time, by processor time.

The simulator on 64 stages x 512 microbatches x F, I and W, and how its time grows with the number of tasks; and one
arbiter with its window of 32 always full, per event, which must not depend on how many forwards wait behind it.
"""

import gc
from collections import deque
from time import process_time

from rich.console import Console

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import RULES
from rrfp_jax.core import (
    HINTS,
    Event,
    InputArrived,
    Message,
    MessageKind,
    RunTask,
    StageArbiter,
    StageSetup,
    StepStarted,
    TaskFinished,
    ready,
)
from rrfp_jax.schedules import TaskKind, chain, linear
from rrfp_jax.simulation import Costs, constant, simulate

NUM_STAGES = 64
MICROBATCHES = (64, 128, 256, 512)
WINDOW = 32
MICROBATCHES_PER_STEP = (64, 512, 1024, 2048)


def bench_simulation(console: Console | None = None) -> dict[int, float]:
    """Prints and returns the CPU seconds per number of tasks, for the hint bfw; the largest case has 98,304 tasks."""
    console = console or make_console()
    gc.collect()
    gc.freeze()  # what imports left behind is not the core's to walk over
    seconds = {3 * NUM_STAGES * m: simulation_s(NUM_STAGES, m) for m in MICROBATCHES}
    console.print(f"simulation, {NUM_STAGES} stages, hint bfw (arbiters made and driven, CPU time)")
    for num_tasks, duration_s in seconds.items():
        console.print(f"  {num_tasks:7,} tasks  {duration_s:6.2f} s  {duration_s / num_tasks * 1e6:5.1f} us per task")
    console.print(f"one arbiter, hint bf, window {WINDOW} always full (CPU time, best of 3)")
    for num_microbatches in MICROBATCHES_PER_STEP:
        event_s = min(event_with_full_window_s(num_microbatches) for _ in range(3))
        console.print(f"  {num_microbatches:7,} microbatches  {event_s * 1e6:5.1f} us per event")
    gc.unfreeze()
    return seconds


def simulation_s(num_stages: int, num_microbatches: int) -> float:
    """Returns the CPU seconds for one simulated step."""
    start_s = process_time()
    resolved = OrderingOptions(hint="bfw").resolve(num_stages=num_stages, num_microbatches=num_microbatches)
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), resolved.graph))
    simulate(resolved.arbiters(RULES), costs)
    return process_time() - start_s


def event_with_full_window_s(num_microbatches: int) -> float:
    """Returns the CPU seconds per event of a first stage whose gradients come only when its window is full."""
    graph, placement = chain(2, num_microbatches), linear(2)
    arbiter = StageArbiter(StageSetup(graph, placement, 0, consumption=ready(HINTS["bf"]), window=WINDOW, rules=RULES))
    events: deque[Event] = deque([StepStarted(0, 0.0)])
    owed: deque[int] = deque()
    num_events, start_s = 0, process_time()
    while events:
        for instruction in arbiter.handle(events.popleft()):
            if isinstance(instruction, RunTask):
                events.append(TaskFinished(0, 0.0, instruction.task))
                if instruction.task.kind is TaskKind.F:
                    owed.append(instruction.task.microbatch)
        num_events += 1
        if not events and owed:
            events.append(InputArrived(0, 0.0, Message(MessageKind.GRADIENT, 1, 0, owed.popleft())))
    return (process_time() - start_s) / num_events


if __name__ == "__main__":
    bench_simulation()
