"""What the runtime added to the durations that an emulated run was given."""

from collections import defaultdict
from itertools import pairwise
from statistics import fmean

import numpy as np

from rrfp_jax.simulation.costs import of_tasks
from rrfp_jax.timeline import IdleReason, Span, Timeline


def dispatch_overhead_ms(timeline: Timeline, durations_ms: np.ndarray) -> float:
    """Mean milliseconds per task between the end of one task and the start of the next that were not its duration.

    The sum of two parts: how long the host takes from the end of a task to the start of the next, where the next was
    ready at once; and how much longer tasks ran than the durations say (sleeps overshoot, calls cost time). It is what
    a simulation of the same run takes as its dispatch overhead. ``durations_ms`` is [steps, chunks, microbatches, 3].
    """
    nominal_ms = of_tasks(durations_ms)
    excess_ms = []
    for step, _, task, start_s, end_s in timeline.spans:
        asked_ms = nominal_ms[task.kind][step % len(durations_ms)][task.chunk][task.microbatch]
        excess_ms.append((end_s - start_s) * 1e3 - asked_ms)
    return fmean(excess_ms) + fmean(_gaps_ms(timeline) or [0.0])


def _gaps_ms(timeline: Timeline) -> list[float]:
    """Between two tasks of a stage where nothing but the host stood in between."""
    host = {(w.stage, w.start_s, w.end_s) for w in timeline.waits if w.reason is IdleReason.HOST}
    per_stage: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        per_stage[span.stage].append(span)
    return [
        (later.start_s - earlier.end_s) * 1e3
        for stage, spans in per_stage.items()
        for earlier, later in pairwise(spans)
        if (stage, earlier.end_s, later.start_s) in host
    ]
