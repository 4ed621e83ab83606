"""The memory that the stages of an order will need, from the bytes of their chunks; plain arithmetic.

A stage's peak is the sum of

* its lasting bytes: parameters, gradient accumulators, optimizer state, values derived from parameters, and room for
  pieces of gradients where replicas add up by messages;
* the bytes of each microbatch in flight, ``window`` of them at most: per chunk the stash from F to the backward or,
  where the backward is split, the residuals that I hands to W, whichever is larger. A microbatch is reserved whole,
  with all its chunks. Where a footprint counts, it is that many activations of one chunk and microbatch, of the largest
  chunks, as far as these may be held without others (:func:`paths`). Where microbatches differ in size and the window
  is given in bytes, it is that many bytes;
* where operations move activations, the bytes that each of those that are away leaves on the device: the gradient that
  may wait for it, and the arrays to which its stash refers beside inputs;
* its inboxes: activations that wait for their F, and gradients that wait for their backward, at most one of the latter
  per microbatch in flight. The senders bound how many microbatches may reach the stage, in flight or waiting
  (:func:`reaches`). A chunk that runs F only holds nothing in flight, but all microbatches may wait for it;
* the temporaries of its largest program, and one output on its way out.

All of it is an upper bound: not everything peaks at once. Host memory is a sum of its own.

How many microbatches reach a stage
-----------------------------------
Let chunk p feed chunk c and get a gradient back from it. Until c has run the B or I of a microbatch, p cannot run its
own, so that p's stage holds the microbatch all the while that it waits at c for its F, and on to that B or I. The
window of p's stage, or its footprint, bounds how many microbatches there are of these. Where the backward of c is one
task, c holds no others. Where it is split, c also holds those between I and W, as many as its own stage may hold. A
chunk without predecessors has nothing waiting.

Where p is all that feeds c and feeds no other chunk, a microbatch that waits at c, or lies there between F and B or I,
is an activation of p that p's stage holds, and of no other chunk's. So where a footprint bounds the activations of p's
stage, it bounds those at all the chunks that the stage feeds in this way together; those that they hold between I and
W, the footprint of their own stage bounds together. A window, in whole microbatches, bounds those at each chunk alone.

For the same reason an activation of c that lies between F and B has one of p's beside it, and so on: where chunks of
one stage feed each other in this way, through others, a footprint has no room for the last of them alone. Between I and
W that does not hold.

This says nothing where p and c pass no gradient, where bytes are bounded in place of microbatches, and where operations
move the activations of stages or make them again: all microbatches may then be at c. A step's first activations may
come while the step before still ends here; of that one nothing is held any more.

Rows that stages keep to
------------------------
The bytes of microbatches on a stage that keeps to a row come from an exact walk over the row.

Chunks differ in size, and so the largest ones need not be at their peaks together. Each activation takes its stash, and
room for the gradient that may wait for it, from the start of its F to the end of its B or I; and its residuals for W
from there to the end of its W. While an I runs both may be there in part, of which the larger counts: the program's
results take the place of its inputs.

Beside these, inputs wait for their F. A microbatch that waits at chunk c, or lies there between F and backward, lies
between F and backward at the chunk p before as well, since the gradient comes back through c. The row of p's stage says
how many microbatches that can be at a time, and the own row how many of these are past their F at each of its places.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from rrfp_jax.core import Order
from rrfp_jax.core.memory import memory_changes
from rrfp_jax.readable import format_bytes
from rrfp_jax.schedules import PipelineGraph, ScheduleTable, Task, TaskKind


@dataclass(frozen=True, kw_only=True)
class ChunkBytes:
    """The bytes of one chunk."""

    fixed: int
    """Parameters, accumulators, optimizer state, values derived from parameters, zeros for skipped gradients, and room
    for pieces of gradients that other replicas send."""
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
    on_host: int = 0
    """Bytes of optimizer state in host memory."""

    @classmethod
    def from_tuple(cls, values: Sequence[int]) -> "ChunkBytes":
        """Returns the record from which ``dataclasses.astuple`` made these values."""
        return cls(**dict(zip((field.name for field in fields(cls)), values, strict=True)))

    @property
    def per_microbatch(self) -> int:
        """The most bytes of a microbatch in flight here."""
        return max(self.stash, self.owed) + self.output_grads


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
    """Bytes of optimizer state and of what operations move in host memory."""

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment, between microbatches or at the end of a step."""
        if self.in_row is None and self.footprint is None:
            return self._peak(self.window)
        held = self.in_footprint if self.in_row is None else self.in_row
        return max(self.fixed + held + self.temporaries, self._step_end)

    @property
    def _step_end(self) -> int:
        if self.step_temporaries == 0:
            return 0
        # The stage before may have begun the next step: its outputs wait here while R and U run.
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
        """Returns the most microbatches in flight, up to the present window, that fit into ``limit`` bytes."""
        return next((window for window in range(self.window, 0, -1) if self._peak(window) <= limit), 0)


# -- one stage -----------------------------------------------------------------------------------------------------


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
    moved: tuple[int, int] | None = None,
    weights: Sequence[int] = (),
) -> StageForecast:
    """Returns the peak of a stage with these chunks; ``footprint`` or ``capacity``, where given, count in place of the
    window.

    Args:
        chunks: bytes of each chunk of the stage.
        window: microbatches in flight at most.
        num_microbatches: of a step.
        reaches: activations that may be here, each chunk named once; empty: those of all microbatches.
        paths: chunks whose activations are held together, see :func:`paths`; empty: each alone.
        footprint: activations held at most, those on the device where operations move some; in the unit of the weights.
        in_row: the most bytes of microbatches in the row that the stage keeps to, where it keeps to one.
        capacity: bytes of all microbatches in flight at most.
        moved: where operations move activations, how many are under way at most wherever they lie, and how many in
            host memory.
        weights: the units that an activation of each chunk counts, and behind them those of a whole one; empty: 1 each.
    """
    *of_chunks, unit = weights or (1,) * (len(chunks) + 1)
    reaches = reaches or [Reach(chunks=(place,), number=num_microbatches) for place in range(len(chunks))]
    reached = min(num_microbatches, max(reach.number for reach in reaches))
    in_footprint = 0
    if footprint is not None:
        more = [max(0, chunk.per_microbatch - chunk.inputs) for chunk in chunks]
        most = [num_microbatches] * len(chunks)
        for place, number in ((place, reach.number) for reach in reaches for place in reach.chunks):
            most[place] = min(num_microbatches, number)
        along = _along(more, footprint, paths or [(place,) for place in range(len(chunks))], of_chunks)
        in_footprint = min(_largest(more, footprint, most, of_chunks), along)
        # Beside them lies all that may be here, as if it waited, and the parts that moved activations leave here.
        for reach in reaches:
            inputs = [chunks[place].inputs for place in reach.chunks]
            in_footprint += _largest(inputs, reach.number, [num_microbatches] * len(inputs))
        away = 0 if moved is None else max(0, moved[0] - footprint)
        of_all = [num_microbatches] * len(chunks)
        in_footprint += _largest([chunk.stays + chunk.output_grads for chunk in chunks], away, of_all)
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
        footprint=None if footprint is None else -(-footprint // unit),
        in_footprint=in_footprint,
        in_row=in_row,
        capacity=capacity,
        less_than_waiting=sum(max(0, chunk.inputs - chunk.per_microbatch) for chunk in chunks),
        host_peak=sum(chunk.on_host for chunk in chunks)
        + (0 if moved is None else _largest([c.moves for c in chunks], moved[1], [num_microbatches] * len(chunks))),
    )


def _largest(sizes: Sequence[int], number: int, most: Sequence[int], weights: Sequence[int] = ()) -> int:
    """Returns the most bytes of activations that weigh ``number``: those of the chunks with the most bytes for their
    weight first, of each chunk ``most`` activations."""
    num_bytes, of_chunks = 0, zip(sizes, weights or (1,) * len(sizes), most, strict=True)
    for size, weight, few in sorted(of_chunks, key=lambda chunk: -chunk[0] / chunk[1]):
        taken = min(-(-number // weight), few)
        num_bytes += size * taken
        number = max(0, number - taken * weight)
    return num_bytes


def _along(sizes: Sequence[int], number: int, paths: Sequence[Sequence[int]], weights: Sequence[int]) -> int:
    """Returns the most bytes of activations that weigh ``number``, where each has those of the chunks before it in its
    path beside it."""
    starts = list[tuple[int, int]]()
    for path in paths:
        heavy, large = accumulate(weights[place] for place in path), accumulate(sizes[place] for place in path)
        starts += zip(heavy, large, strict=True)
    best = [0]
    for left in range(1, number + 1):
        best.append(max((best[left - w] + size for w, size in starts if w <= left), default=0))
    return best[number]


def window_of_bytes(num_bytes: int, per_microbatch: int, stage: int, num_microbatches: int) -> int:
    """Returns how many whole microbatches ``num_bytes`` reserves, at most all; raises ValueError if not even one
    fits."""
    if num_bytes < per_microbatch:
        raise ValueError(
            f"window of {format_bytes(num_bytes)} holds no microbatch on stage {stage}, where one takes "
            f"{format_bytes(per_microbatch)}: give at least that, or make microbatches smaller"
        )
    return min(num_microbatches, num_bytes // max(1, per_microbatch))


# -- an order --------------------------------------------------------------------------------------------------------


def forecast_memory(order: Order, sizes: Mapping[int, ChunkBytes], num_microbatches: int) -> list[StageForecast]:
    """Returns the predicted peak of every stage; ``num_microbatches`` is a replica's share."""
    graph, table, found = order.graph, order.table, []
    if order.delay:  # Two steps are under way: R and U of one run beside the activations of the other.
        num_microbatches *= 2
        sizes = {
            chunk: replace(each, temporaries=max(each.temporaries, each.step_temporaries))
            for chunk, each in sizes.items()
        }
    moving = graph.operations.unit if graph.ops else 1  # Parts of an activation that move are counted as whole ones.
    for stage, chunks in enumerate(order.placement.chunks_of_stage):
        # The tasks of the stage in the very order in which it computes them, where it keeps to one.
        row = table.orders[stage] if table is not None and order.consumptions[stage].is_strict else None
        footprint = in_row = None
        if order.footprints is not None:
            footprint = -(-order.footprints[stage] // moving)
        elif row is not None and not graph.ops and len(chunks) > 1:
            # A stage of several chunks has passed on, or not yet got, some chunks of most microbatches in flight.
            footprint = max(accumulate(memory_changes(row, graph)), default=0)
        if table is not None and row is not None and not graph.ops:
            in_row = bytes_in_row(table, stage, sizes)
        found.append(
            forecast_stage(
                [_as_remade(sizes[chunk], graph, chunk) for chunk in chunks],
                order.windows[stage],
                num_microbatches,
                reaches=reaches(order, stage),
                paths=paths(graph, chunks),
                footprint=footprint,
                in_row=in_row,
                capacity=None if order.capacities is None else order.capacities[stage],
                moved=_moved_activations(graph, chunks, row),
                weights=[*(graph.kept_units(c) // moving for c in chunks), graph.memory_unit // moving],
            )
        )
    return found


def _as_remade(sizes: ChunkBytes, graph: PipelineGraph, chunk: int) -> ChunkBytes:
    if not graph.ops or not graph.operations.remakes_stash(chunk):
        return sizes
    # Inputs stay, and gradients may wait, for every microbatch; and a forward may make a stash that is dropped.
    waiting = sizes.inputs + sizes.output_grads
    return replace(sizes, inputs=waiting, temporaries=sizes.temporaries + sizes.stash)


def _moved_activations(
    graph: PipelineGraph, chunks: Iterable[int], row: Sequence[Task] | None
) -> tuple[int, int] | None:
    """Returns how many activations of a stage are under way at most, and how many of these may lie in host memory.

    None: no operation frees any of them. A stage that keeps to no row (None) may have everything under way."""
    moving = [op for op in graph.ops if op.frees]
    pairs = {(c, m) for c in chunks if graph.has_backward(c) for m in graph.microbatches(c)}
    if not any(op.exists(*pair) for op in moving for pair in pairs):
        return None
    on_host = {pair for pair in pairs if any(op.keeps_on_host and op.exists(*pair) for op in moving)}
    if row is None:
        return len(pairs), len(on_host)
    peaks = []
    for counted in (pairs, on_host):
        held = peak = 0
        for kind, chunk, m in row:
            if (chunk, m) in counted:
                held += kind is TaskKind.F
                peak = max(peak, held)
                held -= kind is graph.accumulating_kind(chunk)
        peaks.append(peak)
    return peaks[0], peaks[1]


def forecast_evaluation(order: Order, sizes: Mapping[int, ChunkBytes]) -> list[StageForecast]:
    """Returns the predicted peak of every stage in steps that evaluate: nothing is held for a backward, and read-ahead
    bounds the activations that wait.

    Args:
        order: that of evaluation (:meth:`rrfp_jax.core.Order.evaluating`).
        sizes: of its forwards.
    """
    waiting = max((limit for _, limit in order.read_ahead), default=0)
    return [
        forecast_stage([replace(sizes[c], stash=0, owed=0, output_grads=0) for c in chunks], waiting, waiting)
        for chunks in order.placement.chunks_of_stage
    ]


def with_evaluation(training: Sequence[StageForecast], evaluation: Sequence[StageForecast]) -> list[StageForecast]:
    """Returns the predicted peaks of stages that evaluate in idle time: their programs run one at a time, and
    everything else lies beside what training holds."""
    return [
        replace(
            trained,
            fixed=trained.fixed + evaluated.peak - evaluated.temporaries,
            temporaries=max(trained.temporaries, evaluated.temporaries),
        )
        for trained, evaluated in zip(training, evaluation, strict=True)
    ]


# -- refusals ----------------------------------------------------------------------------------------------------------


def check_evaluation_fits(forecasts: Sequence[StageForecast], limits: Sequence[int | None]) -> None:
    """Raises ValueError where an evaluation is predicted to need more than a stage's limit."""
    for stage, (forecast, limit) in enumerate(zip(forecasts, limits, strict=True)):
        if limit is not None and forecast.peak > limit:
            raise ValueError(
                f"stage {stage} is predicted to need {format_bytes(forecast.peak)} in evaluations, and has "
                f"{format_bytes(limit)}: make the microbatches of evaluation sets smaller"
            )


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


# -- what reaches a stage ----------------------------------------------------------------------------------------------


def reaches(order: Order, stage: int) -> tuple[Reach, ...]:
    """Returns how many activations may be at the chunks of a stage at a time, waiting for their F or held; chunks that
    one footprint bounds are taken together."""
    graph, places, numbers = order.graph, dict[tuple[int, bool], list[int]](), list[int]()
    for place, chunk in enumerate(order.placement.chunks_of_stage[stage]):
        sources, number = graph.predecessors(chunk), graph.num_microbatches * (1 + order.delay)
        together = chunk, False
        # The stages that feed the chunk hold the activations that are there, if they get a gradient back.
        returns = set(sources) <= set(graph.gradient_predecessors(chunk))
        if returns and not graph.ops and order.capacities is None:
            own = _held(order, chunk) if not sources or chunk in graph.split else 0
            # Replicas of a chunk feed it with microbatches of their own, different chunks with parts of the same.
            fed = Counter[int]()
            for source in sources:
                fed[source // graph.num_replicas] += _held(order, source)
            number = own + max(fed.values(), default=0)
            if order.footprints is not None and len(sources) == 1 and len(graph.successors(sources[0])) == 1:
                together = order.placement.stage_of_chunk[sources[0]], True
        numbers.append(number)
        places.setdefault(together, []).append(place)
    return tuple(
        Reach(chunks=tuple(of_feeder), number=max(numbers[place] for place in of_feeder))
        for of_feeder in places.values()
    )


def _held(order: Order, chunk: int) -> int:
    """Returns the microbatches of which the stage of a chunk may hold the chunk's activation."""
    stage = order.placement.stage_of_chunk[chunk]
    if order.footprints is None:
        return order.windows[stage]
    return -(-order.footprints[stage] // order.graph.kept_units(chunk))


def paths(graph: PipelineGraph, chunks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns a stage's chunks by their places: each activation that it holds of one has another beside it, of the same
    microbatch, of the chunk before it in the same path."""
    by_last: dict[int, tuple[int, ...]] = {}
    for place, chunk in enumerate(chunks):
        at, before = chunk, tuple[int, ...]()
        # The backward of a pass comes before those of the passes that it reads.
        if read := [p for p in graph.gradient_predecessors(chunk) if graph.are_passes(p, chunk)]:
            by_last[chunk] = (*(() if graph.ops or chunk in graph.split else by_last.pop(max(read))), place)
            continue
        # Go back along chunks that have one source, to which they return a gradient, to the next one of this stage.
        while not graph.ops and chunk not in graph.split and len(sources := graph.required_predecessors(at)) == 1:
            if not sources == graph.predecessors(at) == graph.gradient_predecessors(at):
                break
            (at,) = sources
            if at in chunks:
                before = by_last.pop(at, ())
                break
        by_last[chunk] = (*before, place)
    return tuple(by_last.values())


def bytes_in_row(table: ScheduleTable, stage: int, sizes: Mapping[int, ChunkBytes]) -> int:
    """The most that microbatches take, in flight or waiting, at any place of the stage's row; for tables without
    operations."""
    graph, chunks = table.graph, table.placement.chunks_of_stage[stage]
    coming = {chunk: _most_coming(table, chunk) for chunk in chunks}
    left = {chunk: len(graph.microbatches(chunk)) for chunk in chunks}
    held, between = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)

    def taken() -> int:
        return sum(
            (sizes[c].stash + sizes[c].output_grads) * between[c]
            + sizes[c].owed * (held[c] - between[c])
            + sizes[c].inputs * max(0, min(left[c], coming[c] - between[c]))
            for c in chunks
        )

    most = taken()
    for kind, chunk, _ in table.orders[stage]:
        if kind is TaskKind.F:
            left[chunk] -= 1
            held[chunk] += graph.has_backward(chunk)
            between[chunk] += graph.has_backward(chunk)
        most = max(most, taken())
        between[chunk] -= kind is graph.input_gradient_kind(chunk)
        held[chunk] -= kind is not TaskKind.F and kind is graph.accumulating_kind(chunk)
        most = max(most, taken())
    return most


def _most_coming(table: ScheduleTable, chunk: int) -> int:
    """Microbatches that may wait at a chunk, or lie there between F and backward."""
    graph, sources = table.graph, table.graph.predecessors(chunk)
    if not set(sources) <= set(graph.gradient_predecessors(chunk)):
        return len(graph.microbatches(chunk))
    rows, stage_of = table.orders, table.placement.stage_of_chunk
    return max((max(_between(graph, source, rows[stage_of[source]]), default=0) for source in sources), default=0)


def _between(graph: PipelineGraph, chunk: int, row: Sequence[Task]) -> Iterator[int]:
    """How many microbatches of a chunk are between F and backward, along the row."""
    number = 0
    for task in row:
        if task.chunk == chunk:
            number += task.kind is TaskKind.F
            yield number
            number -= task.kind is graph.input_gradient_kind(chunk)
