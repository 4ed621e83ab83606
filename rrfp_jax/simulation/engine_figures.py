"""What a run's engines beside compute did: how busy they were, what they moved away, and whether they held it up."""

from collections import defaultdict
from itertools import accumulate
from statistics import fmean

from rrfp_jax.tasks import PipelineGraph, Placement
from rrfp_jax.timeline import Timeline

NOTICED = 0.01
"""A share of the makespan from which something is worth a sentence."""


def engines_busy(timeline: Timeline) -> list[dict[str, float]]:
    """Per stage, the share of the makespan in which each of its engines was busy; mean over the steps."""
    shares: dict[tuple[int, str], list[float]] = {
        (stage, lane): [] for stage, lane in sorted({(span.stage, span.lane) for span in timeline.beside()})
    }
    for step in timeline.by_step():
        busy_s: dict[tuple[int, str], float] = defaultdict(float)
        for span in step.beside():
            busy_s[span.stage, span.lane] += span.end_s - span.start_s
        for engine, of_steps in shares.items():
            of_steps.append(busy_s[engine] / step.makespan_s() if step.makespan_s() else 0.0)
    return [
        {lane: fmean(of_steps) for (of, lane), of_steps in shares.items() if of == stage}
        for stage in range(timeline.num_stages)
    ]


def host_peaks(timeline: Timeline, graph: PipelineGraph, placement: Placement) -> list[float]:
    """The most that each stage had moved away at once, in microbatches, as :func:`rrfp_jax.simulation.peak_memory`.

    What an engine frees and an operation that comes after it takes back on an engine was away in between, from the
    start of the one to the end of the other. What is dropped, or made again, was not moved.
    """
    frees = {op.letter: op for op in graph.ops if op.is_beside and op.frees}
    back = {op.letter: op for op in graph.ops if op.is_beside and op.holds}
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(placement.num_stages)]
    for span in timeline.beside():
        kind, chunk, m = span.task
        if m < 0 or not graph.has_backward(chunk):
            continue
        if kind in frees and any(kind in op.after and op.exists(chunk, m) for op in back.values()):
            changes[span.stage].append((span.start_s, 1, frees[kind].frees))
        if kind in back:
            changes[span.stage] += [
                (span.end_s, 0, -op.frees)
                for letter, op in frees.items()
                if letter in back[kind].after and op.exists(chunk, m)
            ]
    return [
        max(accumulate((change for _, _, change in sorted(of_stage)), initial=0.0))
        / graph.passes_per_microbatch(chunks)
        for of_stage, chunks in zip(changes, placement.chunks_of_stage, strict=True)
    ]


def bottleneck(
    busy: list[dict[str, float]],
    stage_bubbles: list[float],
    waited: list[float],
    *,
    gain: float | None = None,
) -> str | None:
    """One sentence about the engine that holds the steps up; None where none does.

    Args:
        busy: of :func:`engines_busy`.
        stage_bubbles: per stage, the idle share of the makespan.
        waited: per stage, the share of the makespan in which it waited for an engine.
        gain: the part of the makespan by which it would be shorter if engines took no time; None: nobody knows.
    """
    shares = {(stage, lane): share for stage, lanes in enumerate(busy) for lane, share in lanes.items()}
    if not shares or max(waited) < NOTICED or (gain is not None and gain < NOTICED):
        return None
    (stage, lane), most = max(shares.items(), key=lambda item: item[1])
    without = "" if gain is None else f" (if engines took no time, the makespan would be {gain:.0%} shorter)"
    if most > 1 - min(stage_bubbles):
        return (
            f"the engine {lane} of stage {stage} is busy {most:.0%} of the makespan, more than any stage computes: it "
            f"holds the step up{without}; give it fewer or shorter operations, or the stage more memory"
        )
    if gain is None:
        return None
    stage = max(range(len(waited)), key=waited.__getitem__)
    return (
        f"stage {stage} waits {waited[stage]:.0%} of the makespan for engines that are not always busy{without}: issue "
        "their operations earlier (lead), or give the stage more memory"
    )
