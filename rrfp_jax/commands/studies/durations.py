"""Sources of task durations: constants, a file, or the trace of a recorded run; shared by emulate and simulate.

A file also tells which pairs of chunk and microbatch do not exist in a step, for example without images.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core.replicas import Replication, microbatches_per_replica
from rrfp_jax.record_files import parse_json, read_record
from rrfp_jax.schedules import Absences, PipelineGraph, Task, TaskKind, absences, bits
from rrfp_jax.schedules.timeline import Span, Timeline
from rrfp_jax.simulation import check_durations, constant, for_graph, recorded

_MOST_NUMBERS = 1 << 25
"""Largest number of durations in a file: 256 MB of them."""
Durations = NDArray[np.float64]
Profile = tuple[float, float, float]


class DurationSource(Protocol):
    """Gives every task its duration in milliseconds, as [steps, chunks, microbatches, 3]."""

    num_steps: int
    absent: Sequence[Absences]
    """The pairs that each step lacks, one entry per step; empty: none."""

    def for_graph(self, graph: PipelineGraph) -> Durations:
        """Returns the durations of this pipeline; raises ValueError where they do not fit it."""

    def profile_ms(self) -> Profile:
        """Returns the mean F, input gradient and weight gradient of one chunk, in milliseconds."""


class ConstantDurations:
    """The same three numbers for every chunk and microbatch."""

    num_steps = 1
    absent: Sequence[Absences] = ()

    def __init__(self, durations_ms: Profile) -> None:
        self.durations_ms = durations_ms

    def for_graph(self, graph: PipelineGraph) -> Durations:
        return constant(self.durations_ms, graph)

    def profile_ms(self) -> Profile:
        return self.durations_ms


class GivenDurations:
    """An array [steps, chunks, microbatches, 3] of milliseconds, in which pairs that do not exist take none."""

    def __init__(self, durations_ms: Durations, absent: Sequence[Absences] = ()) -> None:
        self.durations_ms, self.absent = durations_ms, absent
        self.num_steps: int = durations_ms.shape[0]

    def for_graph(self, graph: PipelineGraph) -> Durations:
        return for_graph(self.durations_ms, graph)

    def on_replicas(self, num_replicas: int) -> "GivenDurations":
        """The same for so many replicas of the pipeline, each of which runs its share of the microbatches."""
        _, num_chunks, num_microbatches, _ = self.durations_ms.shape
        copies = Replication(
            num_chunks=num_chunks,
            num_microbatches=microbatches_per_replica(num_microbatches, num_replicas),
            num_replicas=num_replicas,
        )
        absent = [copies.pairs((chunk, m) for chunk, mask in pairs for m in bits(mask)) for pairs in self.absent]
        return GivenDurations(np.tile(self.durations_ms, (1, num_replicas, 1, 1)), absent)

    def profile_ms(self) -> Profile:
        forward, input_gradient, weight_gradient = self.durations_ms.mean(axis=(0, 1, 2)).tolist()
        return forward, input_gradient, weight_gradient


class RecordedDurations:
    """The tasks of a recorded run: means per chunk and kind, or every task by itself.

    Task by task, a pair without a forward in a step was not there in that step, where its chunk may be skipped.
    """

    def __init__(self, timeline: Timeline, *, per_task: bool) -> None:
        self.timeline, self.per_task = timeline, per_task
        self.num_steps = len(timeline.steps()) if per_task else 1
        self.absent: Sequence[Absences] = _without_forward(timeline) if per_task else ()

    def for_graph(self, graph: PipelineGraph) -> Durations:
        may_lack = _skippable(graph) | dict(graph.absent).keys()
        if not self.absent or any(chunk not in may_lack for pairs in self.absent for chunk, _ in pairs):
            return recorded(self.timeline, graph, per_task=self.per_task)  # which names a task that is missing
        steps = zip(self.timeline.by_step(), self.absent, strict=True)
        return np.concatenate([recorded(step, graph.skipping(pairs), per_task=True) for step, pairs in steps])

    def profile_ms(self) -> Profile:
        by_kind: dict[TaskKind, list[float]] = defaultdict(list)
        for span in self.timeline.spans:
            by_kind[span.task.kind].append((span.end_s - span.start_s) * 1e3)
        forward, fused, input_gradient, weight_gradient = (
            fmean(by_kind[kind]) if by_kind[kind] else 0.0 for kind in (TaskKind.F, TaskKind.B, TaskKind.I, TaskKind.W)
        )
        return forward, input_gradient or fused, weight_gradient


def _without_forward(timeline: Timeline) -> Sequence[Absences]:
    """For each step the pairs of a recorded chunk and microbatch without a forward; empty: there are none."""
    steps = [
        {(s.task.chunk, s.task.microbatch) for s in step.spans if s.task.kind is TaskKind.F}
        for step in timeline.by_step()
    ]
    chunks, microbatches = (range(1 + max(numbers)) for numbers in zip(*set().union(*steps), strict=True))
    every = {(chunk, m) for chunk in chunks for m in microbatches}
    missing = [absences(every - present) for present in steps]
    return missing if any(missing) else ()


def _skippable(graph: PipelineGraph) -> set[int]:
    """The chunks that only lead to optional edges, as encoders of images do."""
    found: set[int] = set()
    for chunk in reversed(range(graph.num_chunks)):
        readers = [s for s in graph.successors(chunk) if chunk not in graph.optional_predecessors(s)]
        if graph.successors(chunk) and found.issuperset(readers):
            found.add(chunk)
    return found


def parse_durations_ms(text: str, flag: str = "durations-ms") -> Profile:
    """``10,10,10``: F, input gradient and weight gradient in milliseconds (or another unit, for another flag)."""
    numbers = parse_numbers(text, flag, example="10,10,10")
    if len(numbers) != 3 or min(numbers) < 0:
        raise ValueError(
            f"{flag} {text} must be three numbers, 0 or more, for F, input gradient and weight gradient: write 10,10,10"
        )
    forward, input_gradient, weight_gradient = numbers
    return forward, input_gradient, weight_gradient


def parse_numbers(text: str, flag: str, *, example: str) -> Sequence[float]:
    """Numbers between commas; raises ValueError naming the flag and an example."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not np.isfinite(numbers).all():
        raise ValueError(f"{flag} {text!r} is not made of numbers: write for example {example}")
    return numbers


def load_durations(path: str) -> GivenDurations:
    """An ``.npy`` file of milliseconds, float64 [steps, chunks, microbatches, 3].

    A pair of chunk and microbatch that does not exist in a step is NaN there. Raises ValueError where the file is
    missing, is not one array of real numbers, or holds no such durations.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # a map checks the file's size against its head
    except OSError as error:
        raise ValueError(f"cannot read durations {path}: {error.strerror or 'it is not an .npy file'}") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"durations {path} are not a whole .npy file of numbers: write it with numpy.save") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise ValueError(f"durations {path} do not hold one array of real numbers: write it with numpy.save")
    if array.size > _MOST_NUMBERS:
        raise ValueError(f"durations {path} hold more than {_MOST_NUMBERS} numbers: give fewer steps")
    try:
        return from_array(array.astype(np.float64))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_array(durations_ms: Durations) -> GivenDurations:
    """Durations in which pairs that do not exist are NaN; raises ValueError for others that no task can have."""
    missing = np.isnan(durations_ms)
    if durations_ms.ndim == 4 and (missing.any(axis=-1) != missing.all(axis=-1)).any():
        raise ValueError("durations are NaN for some tasks of a pair only: a pair that does not exist has no task")
    for step in range(len(durations_ms)):
        if missing[step].all():
            raise ValueError(f"durations of step {step} are non-finite everywhere: give milliseconds for what exists")
    present_ms = np.where(missing, 0.0, durations_ms)
    check_durations(present_ms)
    pairs = [
        absences((chunk, m) for chunk, m in np.argwhere(missing[step].all(axis=-1)).tolist())
        for step in range(len(missing))
    ]
    return GivenDurations(present_ms, pairs if any(pairs) else ())


def load_trace(path: str) -> Timeline:
    """The tasks in a trace file that a run has written; raises ValueError for anything else."""
    try:
        events = parse_json(read_record(Path(path))[0])["traceEvents"]
        spans = [_span(event) for event in events if event["ph"] == "X" and event["cat"].startswith("task,")]
    except OSError as error:
        raise ValueError(f"cannot read trace {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace of a run: give the trace.json of a run directory") from error
    if not spans:
        raise ValueError(f"trace {path} holds no task: record at least one step")
    return Timeline(1 + max(span.stage for span in spans), spans)


def _span(event: dict) -> Span:
    start_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    return Span(event["args"]["step"], event["pid"] - 1, Task.parse(event["name"]), start_s, end_s)
