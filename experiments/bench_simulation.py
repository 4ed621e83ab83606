"""How fast the simulator is: 64 stages x 512 microbatches x F, I and W, and how time grows with the number of tasks."""

from time import process_time

from rich.console import Console

from experiments.ordering import parse_ordering
from experiments.simulate import RULES
from experiments.tables import make_console
from rrfp_jax.simulation import Costs, constant, simulate

NUM_STAGES = 64
MICROBATCHES = (64, 128, 256, 512)


def bench_simulation(console: Console | None = None) -> dict[int, float]:
    """Print and return the CPU seconds per number of tasks, for the hint bfw; the largest case has 98,304 tasks."""
    console = console or make_console()
    seconds = {3 * NUM_STAGES * m: simulation_s(NUM_STAGES, m) for m in MICROBATCHES}
    console.print(f"simulation, {NUM_STAGES} stages, hint bfw (arbiters made and driven, CPU time)")
    for num_tasks, duration_s in seconds.items():
        console.print(f"  {num_tasks:7,} tasks  {duration_s:6.2f} s  {duration_s / num_tasks * 1e6:5.1f} us per task")
    return seconds


def simulation_s(num_stages: int, num_microbatches: int) -> float:
    """CPU seconds for one simulated step."""
    start_s = process_time()
    resolved = parse_ordering(hint="bfw").resolve(num_stages=num_stages, num_microbatches=num_microbatches)
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), resolved.graph))
    simulate(resolved.arbiters(RULES), costs)
    return process_time() - start_s


if __name__ == "__main__":
    bench_simulation()
