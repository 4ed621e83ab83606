"""Cost of several processes: figures of an emulated run that only its processes together can tell."""

from statistics import fmean

from experiments.agreement_overhead import Launch, agreement_overhead, launches
from rrfp_jax.core import RunTask, StageArbiter
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Task
from rrfp_jax.testing import Emulation


def process_figures(process: Process, emulation: Emulation) -> dict[str, float]:
    """Returns the cost per task of a rank, without the first step, which warms up; empty for one process or one step.

    ``wall_us_per_rank_task`` is the time of a step over the tasks that a rank runs in it; ``cpu_us_per_task`` the
    processor time of all ranks, user and system, over the tasks of all.
    """
    layout, step_ms = process.layout, emulation.step_ms[1:]
    if layout.num_ranks == 1 or not step_ms:
        return {}
    num_tasks = num_rank_tasks(process, emulation)
    return {
        "wall_us_per_rank_task": fmean(step_ms) * 1e3 * layout.num_ranks / num_tasks,
        "cpu_us_per_task": emulation.cpu_s * 1e6 / len(step_ms) / num_tasks,
        "peak_transport_bytes": emulation.peak_transport_bytes,
    }


def num_rank_tasks(process: Process, emulation: Emulation) -> int:
    """Returns the tasks of a step over all ranks. A task of a stage that spans processes counts on each of them."""
    layout = process.layout
    last = emulation.timeline.steps()[-1]
    spans = [span for span in emulation.timeline.spans if span.step == last and span.task.microbatch >= 0]
    return sum(len(layout.ranks_of(span.stage)) for span in spans)


def agreement_us_per_task(process: Process, arbiters: list[StageArbiter], emulation: Emulation) -> float | None:
    """Returns the cost of agreement within groups per task; None if no stage spans processes. All processes call it.

    The time between a task's launch on the last process of its stage and the moment when it was ready on all of them
    and all of them were idle; the mean over the steps that the event logs hold, the first excepted.
    """
    groups = {
        unit: ranks for unit in range(process.layout.num_units) if len(ranks := process.layout.ranks_of(unit)) > 1
    }
    later_s = 0.0 if process.peers is None else process.peers.clocks.offset_s
    told = [
        [arbiter.stage, run.step, str(run.task), launch.launch_s + later_s, launch.could_launch_s + later_s]
        for arbiter in arbiters
        if arbiter.stage in groups
        for run, launch in _launches(arbiter, emulation).items()
        if run.step
    ]
    everybody = process.gather("launches", told)
    if not groups:
        return None
    costs_s = [cost_s for unit, ranks in groups.items() for cost_s in _costs_s([everybody[r] for r in ranks], unit)]
    return fmean(costs_s) * 1e6


def _launches(arbiter: StageArbiter, emulation: Emulation) -> dict[RunTask, Launch]:
    return launches(arbiter, [entry for segment in emulation.logs[arbiter.stage].segments for entry in segment.entries])


def _costs_s(members: list[list[list]], unit: int) -> list[float]:
    return list(
        agreement_overhead(
            [
                {RunTask(step, Task.parse(task)): Launch(*times) for of, step, task, *times in told if of == unit}
                for told in members
            ]
        ).values()
    )
