"""The memory of stages: forecast from their compiled programs, and measured while they run.

Where the backend counts its own allocations (``Device.memory_stats``) the measured peak is the backend's. Elsewhere it
is the most bytes that the stage is known to hold at any moment: parameters and optimizer state, stashes, residuals for
weight gradients, inboxes, and the temporaries of the running program. Bytes that operations put into host memory are
counted in this way on all backends.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from rrfp_jax.core import Order
from rrfp_jax.costs.forecast import ChunkBytes
from rrfp_jax.programs.compiled import ChunkSizes, CompiledChunk
from rrfp_jax.programs.microbatch_programs import LEAN_FORWARD
from rrfp_jax.programs.shapes import num_bytes
from rrfp_jax.schedules import PipelineGraph, Task, TaskKind

_HOST_KINDS = ("pinned_host", "unpinned_host")
"""JAX's names for memory of the host."""
PROGRAM_OF_KIND = {
    TaskKind.F: "forward",
    TaskKind.B: "backward",
    TaskKind.I: "input_gradient",
    TaskKind.W: "weight_gradient",
    TaskKind.R: "reduce",
    TaskKind.U: "update ",
}
"""First words of the names of the programs of each kind of task."""
CUT, JOIN = "cut", "join"
"""Names of the programs that make pieces of accumulators, and accumulators of sums of pieces."""
ONCE_PER_STEP = ("prepare", CUT, JOIN, PROGRAM_OF_KIND[TaskKind.R], PROGRAM_OF_KIND[TaskKind.U])
"""First words of the names of programs that run once per step, when no microbatch of their chunk is in flight."""


class _StageBytes(NamedTuple):
    """Bytes on the devices of a stage and in host memory."""

    device: int
    host: int


def held_by(stash: Any) -> _StageBytes:
    """Returns the bytes of the arrays of a stash, on one of the devices that hold them, or in the host memory of one; a
    NumPy array is a view of memory of a device."""
    on_device = on_host = 0
    for leaf in jax.tree.leaves(stash):
        if isinstance(leaf, jax.Array) and leaf.sharding.memory_kind in _HOST_KINDS:
            on_host += num_bytes(leaf)
        else:
            on_device += num_bytes(leaf)
    return _StageBytes(on_device, on_host)


def chunk_bytes(sizes: ChunkSizes) -> ChunkBytes:
    """Returns the sizes of a chunk as the forecast takes them."""
    fixed = (
        sizes.params_bytes,
        sizes.accumulators_bytes,
        sizes.optimizer_bytes,
        sizes.derived_bytes,
        sizes.zeros_bytes,
        sizes.leaves_ahead_bytes,
        sizes.pieces_bytes,
    )
    by_program = sizes.temporaries.items()
    step_temporaries = [
        # Accumulators are cut while the last gradients of microbatches wait to be sent.
        size + (sizes.input_grads_bytes if name == CUT else 0)
        for name, size in by_program
        if name.startswith(ONCE_PER_STEP)
    ]
    return ChunkBytes(
        fixed=sum(fixed),
        stash=sizes.stash_bytes + sizes.kept_bytes,
        owed=sizes.owed.total,
        inputs=sizes.inputs_bytes,
        output_grads=sizes.output_grads_bytes,
        outputs=max(sizes.outputs_bytes, sizes.input_grads_bytes),
        temporaries=max((size for name, size in by_program if not name.startswith(ONCE_PER_STEP)), default=0),
        step_temporaries=max(step_temporaries, default=0),
        moves=sizes.stash_bytes + sizes.kept_inputs_bytes,
        stays=sizes.kept_others_bytes,
        on_host=sizes.optimizer_host_bytes,
    )


def bytes_beside(sizes: ChunkSizes) -> ChunkBytes:
    """Returns the sizes of a chunk in evaluations in idle time: what lasts is a copy of the parameters, and of the
    values derived from them."""
    copied = sizes.params_bytes + sizes.derived_bytes
    return replace(chunk_bytes(sizes), fixed=copied, step_temporaries=0)


class MicrobatchWeights:
    """Weights of microbatches on the units hosted here, for a window in bytes.

    A microbatch weighs the bytes that it holds in flight on a unit, nothing where it skips all chunks of the unit.

    Args:
        order: the order of all replicas; without capacities nothing is weighed.
        programs: the programs of the hosted chunks, by number in the pipeline of all replicas.
    """

    def __init__(self, order: Order, programs: Mapping[int, CompiledChunk], units: Sequence[int]) -> None:
        self._of_bucket: dict[int, list[int]] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}
        for unit in units if order.capacities is not None else ():
            chunks = order.placement.chunks_of_stage[unit]
            columns = []
            for chunk in chunks:
                held = [chunk_bytes(sizes).per_microbatch for sizes in programs[chunk].sizes_of_variants]
                columns.append([0 if variant is None else held[variant] for variant in programs[chunk].variant_of])
            self._of_bucket[unit] = [sum(of_chunks) for of_chunks in zip(*columns, strict=True)]
            self._chunks[unit] = chunks

    def of(self, buckets: Sequence[int], graph: PipelineGraph) -> dict[int, tuple[int, ...]]:
        """Returns the weights by unit; ``buckets`` are the buckets of all microbatches of the step, which has this
        graph of all replicas."""
        weights = {}
        for unit, of_bucket in self._of_bucket.items():
            ranges = [own for chunk in self._chunks[unit] if (own := graph.range_of(chunk))]
            first, stop = min((r.start for r in ranges), default=0), max((r.stop for r in ranges), default=0)
            weights[unit] = tuple([of_bucket[bucket] for bucket in buckets[first:stop]])
        return weights


class MemoryMeter:
    """Counts the bytes that a stage holds; ``reset`` returns the peak since its last call. For the threads of all
    lanes.

    Args:
        remaking: the kinds of tasks that make the stash of a microbatch again, of which F keeps its inputs alone.
    """

    def __init__(self, programs: Mapping[int, CompiledChunk], device: Any, remaking: Iterable[TaskKind] = ()) -> None:
        self._device, self._remaking = device, tuple(remaking)
        self._lock = threading.Lock()
        self._on_host = self._host_peak = sum(each.sizes.optimizer_host_bytes for each in programs.values())
        self._temporaries = 0
        # Pieces are counted as they come.
        fixed = (chunk_bytes(each.sizes).fixed - each.sizes.pieces_bytes for each in programs.values())
        self._held = self._peak = sum(fixed)
        self._variant_of = {chunk: each.variant_of for chunk, each in programs.items()}
        # Looked up once: the bytes that each kind of task takes for good, and while it runs.
        self._taken: dict[tuple[TaskKind, int, int, bool], int] = {}
        self._running: dict[tuple[TaskKind, int, int, bool], int] = {}
        for chunk, each in programs.items():
            for variant, sizes in enumerate(each.sizes_of_variants):
                for is_remade in (False, True):
                    self._add_variant(chunk, variant, sizes, is_remade=is_remade)

    def _add_variant(self, chunk: int, variant: int, sizes: ChunkSizes, *, is_remade: bool) -> None:
        found, which = chunk_bytes(sizes), (chunk, variant, is_remade)
        for kind, program in PROGRAM_OF_KIND.items():
            sizes_of_kind = (size for name, size in sizes.temporaries.items() if name.startswith(program))
            self._running[kind, *which] = max(sizes_of_kind, default=0)
        kept = found.inputs if is_remade else found.stash
        self._taken |= {
            (TaskKind.F, *which): kept,
            (TaskKind.B, *which): -found.stash,
            (TaskKind.I, *which): found.owed - found.stash,
            (TaskKind.W, *which): -found.owed,
        }
        for kind in self._remaking if is_remade else ():
            self._taken[kind, *which] = found.stash - kept
            self._running[kind, *which] = self._running[TaskKind.F, *which] + found.outputs
        if is_remade and LEAN_FORWARD in sizes.temporaries:
            self._running[TaskKind.F, *which] = sizes.temporaries[LEAN_FORWARD]
        elif is_remade:  # F makes the stash all the same, and drops it.
            self._running[TaskKind.F, *which] += sizes.stash_bytes

    def ran(self, task: Task, bucket: int, inbox_bytes: int, *, is_remade: bool = False) -> None:
        """Counts the bytes that a task took and freed, once it has run or was launched.

        Args:
            bucket: the bucket of the task's microbatch; R and U are the same in all buckets.
            inbox_bytes: the bytes that lay in the inbox and were on their way.
            is_remade: whether the microbatch's stash is made again.
        """
        variant = 0 if task.microbatch < 0 else self._variant_of[task.chunk][bucket]
        assert variant is not None
        which = task.kind, task.chunk, variant, is_remade
        self.count(self._running[which], self._taken.get(which, 0), inbox_bytes)

    def ran_pair(self, tasks: Iterable[tuple[Task, int]], temporaries: int, inbox_bytes: int) -> None:
        """Counts two tasks that one program with these temporaries runs, each with its bucket."""
        taken = []
        for task, bucket in tasks:
            variant = self._variant_of[task.chunk][bucket]
            assert variant is not None
            taken.append(self._taken.get((task.kind, task.chunk, variant, False), 0))
        # While it runs, the bytes that one task takes lie beside those that the other one is about to free.
        beside = sum(max(0, each) for each in taken) - max(0, sum(taken))
        self.count(temporaries + beside, sum(taken), inbox_bytes)

    def count(self, temporaries: int, taken: int, inbox_bytes: int) -> None:
        """Counts a program that needs so many bytes while it runs, and takes so many for good, or frees them."""
        with self._lock:
            before, self._temporaries = self._held, temporaries
            self._held += taken
            self._peak = max(self._peak, max(before, self._held) + temporaries + inbox_bytes)

    def keep(self, num_bytes: int) -> None:
        """Counts bytes that the stage keeps from now on, or, where they are less than 0, frees."""
        with self._lock:
            self._held += num_bytes
            self._peak = max(self._peak, self._held + self._temporaries)

    def begins(self, before: _StageBytes, after: _StageBytes, inbox_bytes: int) -> None:
        """Counts an operation that turns bytes of a microbatch into others: both are there until it has ended."""
        with self._lock:
            self._held += max(0, after.device - before.device)
            self._on_host += max(0, after.host - before.host)
            self._peak = max(self._peak, self._held + self._temporaries + inbox_bytes)
            self._host_peak = max(self._host_peak, self._on_host)

    def ended(self, before: _StageBytes, after: _StageBytes) -> None:
        """Counts the end of an operation, which frees the bytes that it made superfluous."""
        with self._lock:
            self._held += min(0, after.device - before.device)
            self._on_host += min(0, after.host - before.host)

    def reset(self) -> _StageBytes:
        """Returns the peaks since the last call."""
        stats = self._device.memory_stats()
        with self._lock:
            peak, self._peak = self._peak, self._held
            host_peak, self._host_peak = self._host_peak, self._on_host
        is_counted = bool(stats) and "peak_bytes_in_use" in stats
        return _StageBytes(int(stats["peak_bytes_in_use"]) if is_counted else peak, host_peak)
