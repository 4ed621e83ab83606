"""Operations that come with the library, built with its language as a user's own would be: offload and recompute.

A schedule with operations can be made and simulated without JAX.

Offload
-------
Activations that wait long for their backward wait in host memory, and come back in time::

    table = build_schedule("1f1b", ScheduleRequest(num_stages=8, num_microbatches=32))
    ordering = Ordering(schedule=offload(table, 4), window=device_slots(table, 4))

Which activations move
----------------------
Activations move only on stages whose own peak is above the slots, and there as few as it takes: along the stage's row,
wherever it would hold too many, the one that is needed last. One slot is left for an activation that is being copied,
where the row can do with that. An activation whose wait for its backward, as the table runs with tasks of the given
lengths, is under three round trips of the copy stays: it would be on its way for most of the time.

When they come back
-------------------
They come back a task ahead of their backward, and no sooner than the last copy
out is done that the forward before them needs: an activation that came back into the only free slot would keep it until
its backward, and forwards would wait for each copy. All these waits go forward in the row, so it can run as before.
Where stages run any ready task, and all forwards stand before all ways back, as in GPipe, nothing waits: a stage whose
forwards wait for copies then runs backwards.

Another order
-------------
The order of a table was made without copies. Where it holds too much of what may not move by these rules, or another
order of tasks and copies together takes less time (:func:`rrfp_jax.simulation.better_order`), the stages follow that:
on the same graph and placement, no stage holding more than the table's own peak there, and microbatches in their order.
One slot suffices for every table.

Which arrays move
-----------------
Two operations of the schedule's language move arrays on one copy engine of the stage: ``O`` behind a forward, ``L`` a
task ahead of its backward. They move arrays that the stash alone holds: values that the forward made for the backward,
and the array that the chunk's only predecessor sent from another stage. Parameters and values derived from them are no
part of a stash. Batch leaves, outputs that others still read, and inputs that a chunk of the same stage keeps as well
stay where they are: moving them would free nothing. Nobody else refers to the arrays that move, so the devices' memory
is free once the copy has ended.

Recompute
---------
A chunk's forward runs once more before its backward, as a task of its own that can fill a gap::

    table = build_schedule("1f1b", ScheduleRequest(num_stages=8, num_microbatches=32))
    ordering = Ordering(schedule=recomputed(table, 0.9))

With ``remat="full"`` a backward computes everything again within itself, while the stage before waits for it. Here F
keeps only its inputs, and ``C`` makes the rest of the stash while the gradient is still on its way: the same work,
off the path along which the gradient travels. Until its backward runs, such a stash takes memory; how many do at a
time the lead decides.

In deterministic mode all bits are those of a run without: one program runs F and C. Otherwise F has a program of its
own, that makes nothing for the stash; its output may be rounded in another way.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache, partial
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from rrfp_jax.core.groups import GroupProtocol, check_engines
from rrfp_jax.core.ordering import STRICT, Ordering
from rrfp_jax.core.plan import StepRules
from rrfp_jax.field_rules import typed
from rrfp_jax.schedules import COMPUTE, Op, PipelineGraph, ScheduleTable, Task, TaskKind, with_operations
from rrfp_jax.schedules.operations import COPY, COPY_BACK, COPY_OUT, copy_ops
from rrfp_jax.schedules.slots import EQUAL, SlotLengths, execute
from rrfp_jax.simulation import Costs, better_order, constant, simulate

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

    from rrfp_jax.programs.batches import Bucket
    from rrfp_jax.programs.chunk import Chunk
    from rrfp_jax.programs.microbatch_programs import MicrobatchPrograms
    from rrfp_jax.programs.remat import Remat
    from rrfp_jax.programs.state import ChunkState
    from rrfp_jax.runtime.process import Process

HOST = "pinned_host"
"""JAX's name for host memory that devices copy from and to by themselves."""
_AGAIN = "C"
_Pair = tuple[int, int]
"""A chunk and a microbatch."""
_ROUND_TRIPS = 3
"""Round trips of the copy that must fit into an activation's wait for its backward."""


@dataclass(kw_only=True)
class OperationContext:
    """One task of an operation (:mod:`rrfp_jax.schedules.operations`), and the state of its chunk at that moment.

    ``Op.run`` is called with it on the thread of its lane: the stage's compute thread, or a thread that the engine has
    to itself. It launches its work and returns the arrays that are complete when that is done, or None. A method
    ``check(devices)`` of it, if there is one, is called before anything is compiled, with the devices that it will run
    on, and raises ValueError where it cannot.
    """

    step: int
    task: Task
    state: "ChunkState"
    """Parameters, optimizer state and accumulators of the chunk."""
    stashes: dict[tuple[int, int], Any]
    """By chunk and microbatch, the arrays kept for the backward."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Values that operations keep for the chunk from task to task and from step to step."""
    programs: "MicrobatchPrograms | None" = None
    """The compiled programs of the microbatch; None for a task that runs once per step."""
    owns_inputs: bool = False
    """Whether the array that the chunk's predecessor sent is held by the stash alone, if it is a part of that."""
    forward: Callable[[], tuple[Any, Any]] | None = None
    """Runs the chunk's forward once more on the inputs that were kept, and returns its output, by which it can be
    waited for, and the stash; None where they were not (:attr:`rrfp_jax.schedules.Op.keeps_inputs`)."""

    @property
    def stash(self) -> Any:
        """The tree of arrays that the chunk keeps of the microbatch for its backward; None before it is there, and
        once the backward has it."""
        return self.stashes.get((self.task.chunk, self.task.microbatch))

    @stash.setter
    def stash(self, stash: Any) -> None:
        self.stashes[self.task.chunk, self.task.microbatch] = stash


def operations_of(graph: PipelineGraph) -> Mapping[str, Op]:
    """Returns the operations of a graph by their letters. Raises ValueError for one that cannot run for real."""
    for op in graph.ops:
        if op.run is None:
            raise ValueError(f"operation {op.letter!r} has no function to run: give it one, or only simulate")
    return {op.letter: op for op in graph.ops}


def check_operations(graph: PipelineGraph, process: "Process", protocol: GroupProtocol | str) -> None:
    """Raises ValueError where an operation cannot run, here or on the units that this process hosts."""
    operations = operations_of(graph)
    for unit in process.units:
        stage, num_ranks = process.layout.stage_of(unit), len(process.layout.ranks_of(unit))
        check_engines(graph, stage, num_ranks, protocol)
        for op in operations.values():
            # Another one might run a program of all processes, in no order with those of the stage's own thread.
            if num_ranks > 1 and op.is_beside and op.run not in (_stash_to_host, _stash_to_device):
                raise ValueError(
                    f"operation {op.letter} runs beside compute on stage {stage}, which spans {num_ranks} processes, "
                    "where copies to the host and back alone can: give it the lane compute"
                )
            check = getattr(op.run, "check", None)
            if check is not None:
                check(process.devices_of(unit))


# -- offload ----------------------------------------------------------------------------------------------------------


@typed
def offload(
    table: ScheduleTable,
    slots: int,
    *,
    copy_ms: float | None = None,
    lengths: SlotLengths = EQUAL,
    lead: int = 1,
    lanes: tuple[str, str] = (COPY, COPY),
    consume: str = STRICT,
) -> ScheduleTable:
    """Returns the table with operations by which no stage holds more than ``slots`` microbatches' activations on
    devices.

    Args:
        slots: the number of activations, counted as in :meth:`rrfp_jax.schedules.ScheduleTable.peak_activations`.
        copy_ms: how long one activation takes, one way; None: half as long as its forward and backward together.
        lengths: the lengths of the other tasks of one chunk, in milliseconds, or relative to each other where
            ``copy_ms`` is None.
        lead: how many tasks ahead of its backward an activation is asked back.
        lanes: the engines for the way out and the way back.
        consume: how stages follow the table, in the words of :class:`rrfp_jax.core.Ordering`.

    Raises ValueError for less than one slot, and, with a number that would do, for too few of a table with operations.
    """
    if slots < 1:
        raise ValueError(f"offload has {slots} slots: give at least 1 for what a stage holds on its devices")
    copies = host_copies(copy_ms, lengths=lengths, lead=lead, lanes=lanes)
    own = _in_its_own_order(table, slots, copies, lengths=lengths, consume=consume)
    if table.graph.ops and own is None:
        raise ValueError(
            f"offload {slots} is too little for {table.name!r}, whose own operations keep it to its order: give "
            f"{ceil(max(table.peak_activations()))}, or leave these operations out"
        )
    if own is not None and (own is table or table.graph.ops):
        return own
    windows, durations_ms = device_slots(table, slots), constant(astuple(lengths), table.graph)

    def makespan_ms(moved: ScheduleTable) -> float:
        window = windows if moved.graph.ops else None
        order = Ordering(schedule=moved, consume=consume, window=window).resolve(table.placement, table.graph)
        timeline = simulate(order.arbiters(StepRules(updates=False)), Costs(durations_ms=durations_ms)).timeline
        return timeline.makespan_s() * 1e3

    own_ms = inf if own is None else makespan_ms(own)
    found = better_order(
        table.graph,
        table.placement,
        durations_ms[0],
        slots=windows,
        copies=copies,
        tables=(table,) if table.hint is None else (table, table.hint),
        than_ms=own_ms,
    )
    # Its time is that of strict consumption; stages that run what is ready may take another.
    if found is None or (own is not None and makespan_ms(found.table) >= own_ms):
        assert own is not None
        return own
    return replace(found.table, name=table.name)


def _in_its_own_order(
    table: ScheduleTable, slots: int, copies: tuple[Op, Op], *, lengths: SlotLengths, consume: str
) -> ScheduleTable | None:
    """Returns the table with copies among its tasks; the table itself where it needs none, None where it holds too
    much of what waits for a weight gradient alone, or for less than three round trips."""
    pairs = frozenset[tuple[int, int]]()
    for rows in filter(None, (table, table.hint)):
        moved = _pairs_to_move(rows, slots, copies[1].ms, lengths, copies[1].lead)
        if moved is None:
            return None
        pairs |= moved
    if not pairs:
        return table
    out, back = (replace(op, pairs=pairs) for op in copies)
    waits = _after_copies_out(with_operations(table, (out, back)), consume)
    return with_operations(table, (out, replace(back, waits=waits)))


@typed
def host_copies(
    copy_ms: float | None = None,
    *,
    lengths: SlotLengths = EQUAL,
    lead: int = 1,
    lanes: tuple[str, str] = (COPY, COPY),
) -> tuple[Op, Op]:
    """Returns the operations that move all activations to the host and back; the arguments are those of
    :func:`offload`.

    It chooses, along a table's order, which ones they move; :func:`rrfp_jax.simulation.find_optimum` chooses the order
    as well.
    """
    one_way = copy_ms
    if one_way is None:
        one_way = (lengths.forward + lengths.input_gradient + lengths.weight_gradient) / 2
    if not 0 <= one_way < inf:
        raise ValueError(f"copy_ms is {one_way}: give 0 or more milliseconds")
    out, back = copy_ops(one_way, lead=lead, lanes=lanes)
    return replace(out, run=_stash_to_host), replace(back, run=_stash_to_device)


@typed
def device_slots(table: ScheduleTable, slots: int) -> tuple[int, ...]:
    """Returns the microbatches that each stage of an offloaded table may hold on its devices: the window to give with
    it.

    ``table`` is the one without operations.
    """
    rows = [table.peak_activations()] + ([] if table.hint is None else [table.hint.peak_activations()])
    return tuple(min(slots, ceil(max(peaks))) for peaks in zip(*rows, strict=True))


def moves_activations(graph: PipelineGraph) -> bool:
    """Returns whether an offloaded table's graph moves any activation: none moves where all stages hold few enough."""
    return any(isinstance(op.run, _StashToHost) for op in graph.ops)


class _StashToHost:
    """Moves a stash to host memory, as ``Op.run`` of the way out."""

    def __call__(self, context: OperationContext) -> Any:
        return _moved(context, to_host=True)

    def check(self, devices: "Iterable[jax.Device]") -> None:
        """Raises ValueError where a device has no pinned host memory."""
        for device in devices:
            if HOST not in {memory.kind for memory in device.addressable_memories()}:
                raise ValueError(
                    f"offload needs memory of kind {HOST}, which JAX does not have for {device.device_kind}: leave "
                    "offload out, or rematerialise more"
                )


def _moved(context: OperationContext, *, to_host: bool) -> Any:
    """Replaces the arrays of a stash by copies on the other side; returns the copies."""
    from rrfp_jax.programs.chunk_plan import Residuals

    assert context.programs is not None
    plan, stash = context.programs.plan, context.stash
    arrays, specs = (
        [array for part in stash for array in part],
        [spec for part in plan.residuals.specs for spec in part],
    )
    num_made = len(stash.donated) + len(stash.saved)
    inputs = plan.aliased_inputs if context.owns_inputs else ()
    moving = [*range(num_made), *(num_made + place for place, is_input in enumerate(inputs) if is_input)]
    shardings = [_on_host(specs[place].sharding) if to_host else specs[place].sharding for place in moving]
    copies = _copied([arrays[place] for place in moving], shardings)
    for place, copy in zip(moving, copies, strict=True):
        arrays[place] = copy
    num_donated = len(stash.donated)
    context.stash = Residuals(
        tuple(arrays[:num_donated]), tuple(arrays[num_donated:num_made]), tuple(arrays[num_made:])
    )
    return copies


def _copied(arrays: "list[Any]", shardings: "list[Sharding]") -> "list[jax.Array]":
    """Returns copies of arrays, which lie on the devices of these shardings, perhaps in other memory."""
    import jax  # here, since schedules are also simulated without JAX
    from jax.sharding import SingleDeviceSharding

    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(arrays, shardings)
    # Each process copies its own shards: for whole arrays JAX would run a program of all processes, in which these
    # would meet on the engine's thread, in no order with the programs of the stage.
    shards = [_shards(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]
    places = [
        [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in own]
        for own, sharding in zip(shards, shardings, strict=True)
    ]
    copies = jax.device_put([[*own.values()] for own in shards], places)
    return [
        jax.make_array_from_single_device_arrays(array.shape, sharding, own)
        for array, sharding, own in zip(arrays, shardings, copies, strict=True)
    ]


def _shards(array: Any, sharding: "Sharding") -> "dict[jax.Device, Any]":
    """Returns the shard of each device of this process; an input may be a NumPy array, of which each process has
    all."""
    import jax

    if isinstance(array, jax.Array):
        return {shard.device: shard.data for shard in array.addressable_shards}
    return {device: array[place] for device, place in sharding.addressable_devices_indices_map(array.shape).items()}


_stash_to_host = _StashToHost()
_stash_to_device = partial(_moved, to_host=False)
"""Brings a stash back to where the backward's program wants it, as ``Op.run`` of the way back."""


@lru_cache(maxsize=1024)
def _on_host(sharding: "Sharding") -> "Sharding":
    return sharding.with_memory_kind(HOST)


# -- when they come back -----------------------------------------------------------------------------------------------


def _after_copies_out(table: ScheduleTable, consume: str) -> frozenset[tuple[Task, Task]]:
    """Returns, for each way back, the last way out that the forward before it needs, where that precedes it in all
    rows."""
    hint = table.hint or table
    waits = set[tuple[Task, Task]]()
    for row, other in zip(table.orders, hint.orders, strict=True):
        if consume == STRICT or not (_is_in_phases(row) and _is_in_phases(other)):
            waits.update(_waits(row, other), _waits(other, row))
    return frozenset(waits)


def _is_in_phases(row: Sequence[Task]) -> bool:
    kinds = [task.kind for task in row if task.kind in (TaskKind.F, COPY_BACK)]
    return TaskKind.F not in kinds[kinds.index(TaskKind(COPY_BACK)) :] if COPY_BACK in kinds else True


def _waits(row: Sequence[Task], other: Sequence[Task]) -> Iterator[tuple[Task, Task]]:
    (outs, needed), (others, allowed) = _ways_out(row), _ways_out(other)
    place = {out: n for n, out in enumerate(others)}
    for back, number in needed.items():
        last = next((out for out in reversed(outs[:number]) if place[out] < allowed[back]), None)
        if last is not None:
            yield back, last


def _ways_out(row: Iterable[Task]) -> tuple[list[Task], dict[Task, int]]:
    """Returns the ways out of a row, and for each way back how many of them stand before the last forward before it."""
    outs, needed, before_forward = list[Task](), dict[Task, int](), 0
    for task in row:
        if task.kind == COPY_OUT:
            outs.append(task)
        elif task.kind is TaskKind.F:
            before_forward = len(outs)
        elif task.kind == COPY_BACK:
            needed[task] = before_forward
    return outs, needed


# -- which activations move --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stay:
    """The stay of one activation in a stage's row, by the places of tasks there."""

    pair: tuple[int, int]
    forward: int
    back: int
    """Place from which on it is on the device again if it moves."""
    end: int
    waits_long: bool


def _pairs_to_move(
    table: ScheduleTable, slots: int, one_way: float, lengths: SlotLengths, lead: int
) -> frozenset[tuple[int, int]] | None:
    spans = execute(table, lengths).spans
    pairs: set[tuple[int, int]] = set()
    for stage, row in enumerate(table.orders):
        most = slots * table.graph.passes_per_microbatch(table.placement.chunks_of_stage[stage])
        stays = _stays(table, row, spans, 2 * _ROUND_TRIPS * one_way, lead)
        held = _held(len(row), stays)
        if max(held) > most:
            moved, left = _fewest(held, stays, max(1, most - 1))
            if left > most:
                return None
            pairs |= moved
    return frozenset(pairs)


def _stays(
    table: ScheduleTable, row: Sequence[Task], spans: dict[Task, tuple[float, float]], least: float, lead: int
) -> list[_Stay]:
    graph, place = table.graph, {task: n for n, task in enumerate(row)}
    stays = []
    for task in row:
        kind, chunk, m = task
        if kind is not TaskKind.F or not graph.has_backward(chunk):
            continue
        first, last = (Task(k, chunk, m) for k in (graph.input_gradient_kind(chunk), graph.accumulating_kind(chunk)))
        wait = spans[first][0] - spans[task][1]
        stays.append(_Stay((chunk, m), place[task], place[first] - lead, place[last], wait >= least * (1 - 1e-9)))
    return stays


def _held(num_places: int, stays: Iterable[_Stay]) -> list[int]:
    held = [0] * num_places
    for stay in stays:
        for place in range(stay.forward, stay.end + 1):
            held[place] += 1
    return held


def _fewest(held: list[int], stays: Iterable[_Stay], limit: int) -> tuple[set[tuple[int, int]], int]:
    """Returns the fewest activations to move so that no place holds more than the limit, if possible, and the peak
    left."""
    left, here, waiting = held.copy(), set[_Stay](), iter(sorted(stays, key=lambda stay: stay.forward))
    moved: set[tuple[int, int]] = set()
    upcoming = next(waiting, None)
    for place in range(len(left)):
        while upcoming is not None and upcoming.forward < place:
            here.add(upcoming)
            upcoming = next(waiting, None)
        here = {stay for stay in here if stay.back > place and stay.waits_long}
        while left[place] > limit and here:
            last = max(here, key=lambda stay: (stay.back, stay.pair))
            here.remove(last)
            moved.add(last.pair)
            for between in range(last.forward + 1, last.back):
                left[between] -= 1
    return moved, max(left)


# -- recompute --------------------------------------------------------------------------------------------------------


@typed
def recompute(
    part: float = 1.0,
    *,
    lead: int = 0,
    ms: float = 0.0,
    chunks: Collection[int] | None = None,
    pairs: Iterable[_Pair] | None = None,
) -> Op:
    """Returns the operation that makes stashes again, for the ``ops`` of an :class:`rrfp_jax.core.Ordering` whose hint
    ranks ready tasks: it queues with backwards, and is issued once their gradients are here.

    Args:
        part: the part of the bytes that a chunk keeps of a microbatch which is made again; the rest are the inputs of F
            (:func:`part_made` computes it). A smaller part is safe: F then counts as keeping more than it does.
        lead: how many tasks ahead of its backward it stands in a table.
        ms: how long it takes, for simulation.
        chunks, pairs: the chunks and the (chunk, microbatch) pairs that have it; None: all. They must have a backward.
    """
    return Op(
        _AGAIN,
        after=("F",),
        before=("B",),
        holds=part,
        lead=lead,
        ms=ms,
        chunks=None if chunks is None else frozenset(chunks),
        pairs=None if pairs is None else frozenset(pairs),
        remakes_stash=True,
        run=_remake,
    )


@typed
def recomputed(
    table: ScheduleTable,
    part: float = 1.0,
    *,
    lead: int = 0,
    ms: float = 0.0,
    pairs: Iterable[_Pair] | None = None,
) -> ScheduleTable:
    """Returns the table with :func:`recompute`, by default for all pairs whose backward comes more than ``lead`` tasks
    behind their forward: the others would only take longer.

    Raises ValueError where there is no such pair.
    """
    chosen = frozenset(_pairs_that_wait(table, lead) if pairs is None else pairs)
    if not chosen:
        raise ValueError(
            f"no backward of schedule {table.name!r} comes more than {lead} tasks behind its forward: recompute would "
            "save nothing; give a smaller lead, or leave it out"
        )
    return with_operations(table, [recompute(part, lead=lead, ms=ms, pairs=chosen)])


def part_made(
    chunks: "Iterable[Chunk]", graph: PipelineGraph, bucket: "Bucket", *, remat: "Remat | Iterable[Remat]" = "none"
) -> float:
    """Returns the part of the bytes that the chunks keep of a microbatch which :func:`recompute` makes again.

    It is computed from the shapes of a microbatch's leaves, and nothing is compiled: the smallest part of any chunk
    with a backward, rounded down to whole percent.
    """
    import jax  # Here, since schedules are also simulated without JAX.

    from rrfp_jax.programs.chunk_plan import plan_chunk
    from rrfp_jax.programs.remat import remat_of_chunks
    from rrfp_jax.programs.shapes import derive_shapes, num_bytes

    own = tuple(chunks)
    policies = remat_of_chunks(remat if isinstance(remat, str) or callable(remat) else tuple(remat), len(own))
    shapes = derive_shapes(own, graph, bucket)
    parts = []
    for index, policy in enumerate(policies):
        if graph.has_backward(index):
            stash = plan_chunk(index, own, graph, shapes, remat=policy).residuals.specs
            total = num_bytes(jax.tree.leaves(stash))
            parts.append(max(0, total - num_bytes(shapes[index].inputs)) / max(1, total))
    return int(100 * min(parts)) / 100


def _remake(context: OperationContext) -> Any:
    """Runs the forward once more, and keeps the stash that it makes; returns its output, to wait for."""
    assert context.forward is not None
    output, context.stash = context.forward()
    return output


def _pairs_that_wait(table: ScheduleTable, lead: int) -> set[_Pair]:
    graph, found = table.graph, set[_Pair]()
    for rows in (table, table.hint):
        for order in () if rows is None else rows.orders:
            computed = [task for task in order if graph.lane(task.kind) == COMPUTE]
            forwards = {(t.chunk, t.microbatch): place for place, t in enumerate(computed) if t.kind is TaskKind.F}
            for place, (kind, *pair) in enumerate(computed):
                chunk, microbatch = pair
                is_backward = graph.has_backward(chunk) and kind is graph.input_gradient_kind(chunk)
                if is_backward and place - forwards[chunk, microbatch] > lead + 1:
                    found.add((chunk, microbatch))
    return found
