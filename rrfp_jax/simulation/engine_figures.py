"""What a run's engines beside compute did: how busy they were, what they moved away, and whether they held it up."""

from collections import defaultdict
from itertools import accumulate
from statistics import fmean

from rrfp_jax.arbitration.footprint import memory_effect, memory_unit
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

    What an engine frees counts as moved away from its start, until an engine that takes it back ends, or the backward.
    Memory that operations of the compute lane take and free, such as a recomputation, was not moved.
    """
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(placement.num_stages)]
    away: dict[tuple[int, int, int], float] = defaultdict(float)
    for span in sorted(timeline.spans, key=lambda span: span.end_s):
        kind, chunk, m = span.task
        if m < 0 or not graph.has_backward(chunk):
            continue
        pair = (span.step, chunk, m)
        if span.is_beside:
            takes, frees = (part / memory_unit(graph) for part in memory_effect(span.task, graph))
            moved = frees - min(takes, away[pair] + frees)
        else:
            moved = -away[pair] if kind is graph.accumulating_kind(chunk) else 0.0
        away[pair] += moved
        if moved:
            changes[span.stage].append((span.start_s if moved > 0 else span.end_s, int(moved > 0), moved))
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
