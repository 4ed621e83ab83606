"""Peak memory of activations on each stage, from what ran when."""

from dataclasses import dataclass

from rrfp_jax.tasks import PipelineGraph, Placement, Task, TaskKind
from rrfp_jax.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class MemoryWeights:
    """What the tasks of one microbatch hold and free on a stage.

    The unit is what a stage keeps of one microbatch over all its chunks (of one direction, if the pipeline is
    bidirectional); every chunk has an equal part. Raises ValueError unless everything held is freed.
    """

    forward: float = 1.0
    """Held from the start of F."""
    input_gradient: float = 0.0
    """Freed at the end of I; negative if I leaves more behind than it takes."""
    weight_gradient: float = 1.0
    """Freed at the end of W. A fused backward frees everything at its end."""

    def __post_init__(self) -> None:
        if abs(self.forward - self.input_gradient - self.weight_gradient) > 1e-9:
            raise ValueError(
                f"memory weights: F holds {self.forward}, but I and W free {self.input_gradient} and "
                f"{self.weight_gradient}: make F the sum of the other two"
            )

    def freed_by(self, kind: TaskKind) -> float:
        """What a backward task of this kind frees."""
        return {TaskKind.I: self.input_gradient, TaskKind.W: self.weight_gradient}.get(kind, self.forward)


DEFAULT_WEIGHTS = MemoryWeights()


def peak_memory(
    timeline: Timeline, graph: PipelineGraph, placement: Placement, weights: MemoryWeights = DEFAULT_WEIGHTS
) -> list[float]:
    """The largest memory that each stage held at once, over all steps recorded, in microbatches.

    What ends at a time is freed before what starts then is held. A chunk without a backward keeps nothing.
    """
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(placement.num_stages)]
    for span in timeline.spans:
        if _counts(span.task, graph):
            if span.task.kind is TaskKind.F:
                changes[span.stage].append((span.start_s, 1, weights.forward))
            else:
                changes[span.stage].append((span.end_s, 0, -weights.freed_by(span.task.kind)))
    return [_peak(changes[stage]) / _chunks_per_unit(graph, placement, stage) for stage in range(placement.num_stages)]


def _counts(task: Task, graph: PipelineGraph) -> bool:
    return task.microbatch >= 0 and graph.has_backward(task.chunk)


def _peak(changes: list[tuple[float, int, float]]) -> float:
    peak = held = 0.0
    for _, _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak


def _chunks_per_unit(graph: PipelineGraph, placement: Placement, stage: int) -> int:
    """The largest number of the stage's chunks that one microbatch passes."""
    chunks = placement.chunks_of_stage[stage]
    return max(1, *(sum(graph.exists(c, m) for c in chunks) for m in range(graph.num_microbatches)))
