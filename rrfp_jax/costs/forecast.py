"""The memory that a stage will need, from the sizes of its programs and its window; plain arithmetic.

A stage's peak is the sum of

* its lasting bytes: parameters, gradient accumulators, optimizer state, values derived from parameters; * the bytes of
each microbatch in flight, ``window`` of them at most: per chunk the stash from F to the backward or, where the backward
is split, the residuals that I hands to W, whichever is larger. A microbatch is reserved whole, with all its chunks;
Where a footprint counts, it is that many activations of one chunk and microbatch, of the largest chunks, as far as
these may be held without others (:func:`rrfp_jax.costs.order_memory.paths`). Where microbatches differ in size and the
window is given in bytes, it is that many bytes;
* where operations move activations, the bytes that each of those that are away leaves on the device: the gradient that
  may wait for it, and the arrays to which its stash refers beside inputs;
* its inboxes: activations that wait for their F, and gradients that wait for their backward, at most one of the latter
  per microbatch in flight. How many microbatches may reach the stage, in flight or waiting, the senders bound
  (:func:`rrfp_jax.costs.order_memory.reaches`), where a footprint counts of several chunks together. A chunk that
  runs F only holds nothing in flight, but all microbatches may wait for it;
* the temporaries of its largest program, and one output on its way out.

All of it is an upper bound: not everything peaks at once. Host memory is a sum of its own.

How many activations a stage has under way at most, and how many of them may lie in host memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.schedules import PipelineGraph, Task, TaskKind


@dataclass(frozen=True, kw_only=True)
class ChunkBytes:
    """The bytes of one chunk."""

    fixed: int
    """Parameters, accumulators, optimizer state, values derived from parameters, and zeros for skipped gradients."""
    stash: int
    """Per microbatch, from F to B or I; inputs that the stash keeps alive included."""
    owed: int
    """Per microbatch, from I to W; 0 with a full backward."""
    inputs: int
    """Bytes per microbatch that arrive from other stages for F."""
    output_grads: int
    """Bytes per microbatch that arrive from other stages for B or I."""
    outputs: int
    """Per microbatch: the larger of the output and the input gradients."""
    temporaries: int
    """Memory that the largest program of a microbatch needs while it runs."""
    step_temporaries: int = 0
    """Memory that the largest program of a whole step (R, U) needs while it runs."""
    moves: int = 0
    """Bytes of the stash of a microbatch that an operation can bring elsewhere."""
    stays: int = 0
    """Bytes of the stash of a microbatch that stay on the device, but for inputs."""

    @classmethod
    def from_tuple(cls, values: Sequence[int]) -> "ChunkBytes":
        """Returns the record from which ``dataclasses.astuple`` made these values."""
        return cls(**dict(zip((field.name for field in fields(cls)), values, strict=True)))

    @property
    def per_microbatch(self) -> int:
        """The most bytes of a microbatch in flight here."""
        return max(self.stash, self.owed) + self.output_grads

    @property
    def more_than_waiting(self) -> int:
        """How much more a microbatch takes in flight than before its F; 0 where it takes no more."""
        return max(0, self.per_microbatch - self.inputs)

    @property
    def less_than_waiting(self) -> int:
        """How much more a microbatch takes before its F than in flight, as where a chunk runs F only; else 0."""
        return max(0, self.inputs - self.per_microbatch)


@dataclass(frozen=True, kw_only=True)
class MovedActivations:
    """Activations of one stage whose operations move memory, each of a chunk and microbatch."""

    under_way: int
    """Between the start of F and the end of the backward at most, wherever they lie."""
    on_host: int
    """In host memory at most."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How many activations may be at some chunks of a stage at a time, waiting for their F or held."""

    chunks: tuple[int, ...]
    """Their places among the stage's chunks."""
    number: int
    """Activations of all these chunks together; of each one no more than there are microbatches."""


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """The predicted peak of one stage, in bytes, with its parts."""

    window: int
    """Microbatches in flight at most: the stage's window, or all microbatches if they are fewer."""
    reached: int
    """Microbatches that may be at a chunk at a time, in flight or waiting."""
    fixed: int
    per_microbatch: int
    """Bytes of each microbatch in flight."""
    per_waiting: int
    """Bytes of each microbatch that is not in flight here yet: its activations may wait in the inbox."""
    temporaries: int
    footprint: int | None = None
    """Activations of one chunk and microbatch at most, where these are bounded instead of microbatches."""
    in_footprint: int = 0
    """The most bytes of that many activations, with all that waits beside them."""
    in_row: int | None = None
    """The most bytes of microbatches, in flight and waiting, in the very row that the stage keeps to."""
    capacity: int | None = None
    """Bytes that all microbatches in flight take at most, where these are bounded instead of their number."""
    less_than_waiting: int = 0
    """How much more a microbatch in flight may take while it waits in the inbox of some chunk of the stage."""
    step_temporaries: int = 0
    """Memory that R or U need while they run, on a stage of one chunk, where no microbatch is in flight meanwhile."""
    host_peak: int = 0
    """Bytes that operations put into host memory."""

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment, between microbatches or at the end of a step."""
        if self.in_row is not None:
            return max(self.fixed + self.in_row + self.temporaries, self._step_end)
        if self.footprint is not None:
            return max(self.fixed + self.in_footprint + self.temporaries, self._step_end)
        return self._peak(self.window)

    @property
    def _step_end(self) -> int:
        """Bytes while R or U run on a stage of one chunk; 0 where these programs need nothing."""
        if self.step_temporaries == 0:
            return 0
        # The stage before may have begun the next step: its outputs wait here meanwhile.
        return self.fixed + self.reached * self.per_waiting + self.step_temporaries

    @property
    def held(self) -> str:
        """The bound of the activations that the stage holds, in words."""
        if self.footprint is not None:
            return f"{self.footprint} activations of a chunk"
        if self.capacity is not None:
            return f"{format_bytes(self.capacity)} of microbatches in flight"
        return f"{self.window} microbatches in flight"

    def _peak(self, window: int) -> int:
        waiting, in_flight = self.reached - window, window * self.per_microbatch
        if self.capacity is not None and window == self.window:  # small ones may take what is left beside large ones
            in_flight = min(self.capacity, self.reached * self.per_microbatch)
        in_inbox = waiting * self.per_waiting + window * self.less_than_waiting
        return max(self.fixed + in_flight + in_inbox + self.temporaries, self._step_end)

    def largest_window(self, limit: int) -> int:
        """The most microbatches in flight, up to the present window, that fit into ``limit`` bytes; 0 if none does."""
        return next((window for window in range(self.window, 0, -1) if self._peak(window) <= limit), 0)


def forecast_stage(
    chunks: Sequence[ChunkBytes],
    window: int,
    num_microbatches: int,
    *,
    reaches: Sequence[Reach] = (),
    paths: Sequence[Sequence[int]] = (),
    footprint: int | None = None,
    in_row: int | None = None,
    capacity: int | None = None,
    moved: MovedActivations | None = None,
) -> StageForecast:
    """Returns the peak of a stage with these chunks; ``footprint`` or ``capacity``, where given, count in place of the
    window.

    ``footprint`` is in activations, those on the device where operations move some (``moved``); ``in_row``, where it is
    known, is the most bytes of them and of all that waits in the very row that the stage keeps to. Activations may wait
    for every microbatch that is not in flight here yet, of those that may be here (``reaches``, which name each chunk
    once; empty: all). ``paths`` names each chunk once too: an activation is held with those of the chunks before it in
    its path (empty: alone).
    """
    reaches = reaches or [Reach(chunks=(place,), number=num_microbatches) for place in range(len(chunks))]
    reached = min(num_microbatches, max(reach.number for reach in reaches))
    paths = paths or [(place,) for place in range(len(chunks))]
    in_footprint = 0
    if footprint is not None:
        in_footprint = _in_footprint(chunks, footprint, num_microbatches, paths)
        in_footprint += _beside_footprint(chunks, footprint, num_microbatches, reaches, moved)
    temporaries = max(chunk.temporaries + chunk.outputs for chunk in chunks)
    step_temporaries = max(chunk.step_temporaries for chunk in chunks)
    if len(chunks) > 1:  # another chunk may have microbatches in flight while one reduces and updates
        temporaries, step_temporaries = max(temporaries, step_temporaries), 0
    return StageForecast(
        window=min(window, reached),
        reached=reached,
        fixed=sum(chunk.fixed for chunk in chunks),
        per_microbatch=sum(chunk.per_microbatch for chunk in chunks),
        per_waiting=sum(chunk.inputs for chunk in chunks),
        temporaries=temporaries,
        step_temporaries=step_temporaries,
        footprint=footprint,
        in_footprint=in_footprint,
        in_row=in_row,
        capacity=capacity,
        less_than_waiting=sum(chunk.less_than_waiting for chunk in chunks),
        host_peak=0 if moved is None else _largest([c.moves for c in chunks], moved.on_host, num_microbatches),
    )


def _in_footprint(
    chunks: Sequence[ChunkBytes], footprint: int, num_microbatches: int, paths: Sequence[Sequence[int]]
) -> int:
    """Returns the most bytes of ``footprint`` activations beyond their inputs."""
    more = [chunk.more_than_waiting for chunk in chunks]
    return min(_largest(more, footprint, num_microbatches), _along(more, footprint, paths))


def _beside_footprint(
    chunks: Sequence[ChunkBytes],
    footprint: int,
    num_microbatches: int,
    reaches: Sequence[Reach],
    moved: MovedActivations | None,
) -> int:
    """Returns the bytes of all that may be here, as if it waited, and of the parts that moved activations leave
    here."""
    waiting = sum(
        _largest([chunks[place].inputs for place in reach.chunks], reach.number, num_microbatches) for reach in reaches
    )
    away = 0 if moved is None else max(0, moved.under_way - footprint)
    return waiting + _largest([chunk.stays + chunk.output_grads for chunk in chunks], away, num_microbatches)


def _largest(sizes: Sequence[int], number: int, num_microbatches: int) -> int:
    """Returns the most bytes of ``number`` activations: those of the largest chunks first, of each one for every
    microbatch."""
    num_bytes, room = 0, number
    for size in sorted(sizes, reverse=True):
        num_bytes += size * min(room, num_microbatches)
        room -= min(room, num_microbatches)
    return num_bytes


def _along(sizes: Sequence[int], number: int, paths: Sequence[Sequence[int]]) -> int:
    """Returns the most bytes of ``number`` activations, where each has those of the chunks before it in its path beside
    it."""
    starts = [total for path in paths for total in enumerate(accumulate(sizes[place] for place in path), start=1)]
    best = [0]
    for room in range(1, number + 1):
        best.append(max(best[room - length] + size for length, size in starts if length <= room))
    return best[number]


def window_of_bytes(num_bytes: int, chunks: Sequence[ChunkBytes], stage: int, num_microbatches: int) -> int:
    """Returns how many whole microbatches ``num_bytes`` reserves, at most all; raises ValueError if not even one fits.

    ``chunks`` are those that a microbatch passes through.
    """
    per_microbatch = sum(chunk.per_microbatch for chunk in chunks)
    if num_bytes < per_microbatch:
        raise ValueError(
            f"window of {format_bytes(num_bytes)} holds no microbatch on stage {stage}, where one takes "
            f"{format_bytes(per_microbatch)}: give at least that, or make microbatches smaller"
        )
    return min(num_microbatches, num_bytes // max(1, per_microbatch))


def check_stages_fit(
    forecasts: Sequence[StageForecast], limits: Sequence[int | None], *, is_strict: bool = False
) -> None:
    """Raise ValueError if some stage is predicted to need more than its limit, with the largest windows that fit.

    Under strict consumption the table decides which microbatches are in flight, and the remedy is another table; so it
    is with a footprint, which can also be switched off."""
    over = [
        (stage, forecast, limit)
        for stage, (forecast, limit) in enumerate(zip(forecasts, limits, strict=True))
        if limit is not None and forecast.peak > limit
    ]
    if not over:
        return
    stage, forecast, limit = over[0]
    windows = [
        forecast.window if limit is None else forecast.largest_window(limit)
        for forecast, limit in zip(forecasts, limits, strict=True)
    ]
    if min(windows) < 1:
        remedy = "not even one microbatch fits: use more stages, smaller microbatches or more rematerialisation"
    elif is_strict:
        remedy = "take a schedule that holds fewer microbatches, or consume it ready with a window"
    elif forecast.footprint is not None:
        remedy = (
            "take a schedule that holds less, give a smaller window if you gave one, or switch footprint off with "
            f"window {','.join(map(str, windows))} at most"
        )
    else:
        remedy = f"the largest windows that fit are {','.join(map(str, windows))}"
    raise ValueError(
        f"stage {stage} is predicted to need {format_bytes(forecast.peak)} with {forecast.held}, and has "
        f"{format_bytes(limit)}: {remedy}"
    )


def moved_activations(
    graph: PipelineGraph, chunks: Iterable[int], row: Sequence[Task] | None
) -> MovedActivations | None:
    """Returns the activations of a stage with these chunks; None where no operation frees any of them.

    ``row`` holds the stage's tasks in the very order in which it computes them; None: it keeps to none, and may have
    everything under way."""
    moving = [op for op in graph.ops if op.frees]
    pairs = [(c, m) for c in chunks if graph.has_backward(c) for m in graph.microbatches(c)]
    if not any(op.exists(*pair) for op in moving for pair in pairs):
        return None
    on_host = {pair for pair in pairs if any(op.keeps_on_host and op.exists(*pair) for op in moving)}
    if row is None:
        return MovedActivations(under_way=len(pairs), on_host=len(on_host))
    return MovedActivations(under_way=_peak(graph, row, set(pairs)), on_host=_peak(graph, row, on_host))


def _peak(graph: PipelineGraph, row: Sequence[Task], pairs: set[tuple[int, int]]) -> int:
    held = peak = 0
    for kind, chunk, m in row:
        if (chunk, m) in pairs:
            held += kind is TaskKind.F
            peak = max(peak, held)
            held -= kind is graph.accumulating_kind(chunk)
    return peak
