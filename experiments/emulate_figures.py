"""What several processes cost: figures of an emulated run that only its processes together can tell."""

from statistics import fmean

from rrfp_jax.runtime.process import Process
from rrfp_jax.testing import Emulation


def process_figures(process: Process, emulation: Emulation) -> dict[str, float]:
    """Cost per task of a rank, without the first step, which warms up; empty for one process or one step.

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
    """Tasks of a step over all ranks; one of a stage that spans processes counts on each of them."""
    layout = process.layout
    last = emulation.timeline.steps()[-1]
    spans = [span for span in emulation.timeline.spans if span.step == last and span.task.microbatch >= 0]
    return sum(len(layout.ranks_of(span.stage)) for span in spans)
