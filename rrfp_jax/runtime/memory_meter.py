"""The memory of stages: forecast from their compiled programs, and measured while they run.

Where the backend counts its own allocations (``Device.memory_stats``) the measured peak is the backend's. Elsewhere it
is the bytes of what the stage is known to hold, at the moment when that is most: parameters and the like, stashes, what
is owed to weight gradients, inboxes, and the temporaries of the running program.
What operations put into host memory is counted so on all backends.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from rrfp_jax.planning.forecast import ChunkBytes
from rrfp_jax.programs.compiled import ChunkSizes, CompiledChunk
from rrfp_jax.programs.gradients import LEAN_FORWARD
from rrfp_jax.programs.target import memory_bytes_of
from rrfp_jax.runtime.held_bytes import Held
from rrfp_jax.schedules import Task, TaskKind

_PROGRAM_OF_KIND = {
    TaskKind.F: "forward",
    TaskKind.B: "backward",
    TaskKind.I: "input_gradient",
    TaskKind.W: "weight_gradient",
    TaskKind.R: "reduce",
    TaskKind.U: "update ",
}
"""How the names of the programs of each kind of task begin."""
_OF_A_STEP = ("prepare", _PROGRAM_OF_KIND[TaskKind.R], _PROGRAM_OF_KIND[TaskKind.U])
"""How the names of programs begin that run once in a step, when no microbatch of their chunk is in flight."""


def chunk_bytes(sizes: ChunkSizes) -> ChunkBytes:
    """The sizes of a chunk as the forecast takes them."""
    once = (
        sizes.params_bytes,
        sizes.accumulators_bytes,
        sizes.optimizer_bytes,
        sizes.derived_bytes,
        sizes.zeros_bytes,
        sizes.leaves_ahead_bytes,
    )
    by_program = sizes.temporaries.items()
    return ChunkBytes(
        fixed=sum(once),
        stash=sizes.stash_bytes + sizes.kept_bytes,
        owed=sizes.owed.total,
        inputs=sizes.inputs_bytes,
        output_grads=sizes.output_grads_bytes,
        outputs=max(sizes.outputs_bytes, sizes.input_grads_bytes),
        temporaries=max((size for name, size in by_program if not name.startswith(_OF_A_STEP)), default=0),
        step_temporaries=max((size for name, size in by_program if name.startswith(_OF_A_STEP)), default=0),
        moves=sizes.stash_bytes + sizes.kept_inputs_bytes,
        stays=sizes.kept_others_bytes,
    )


def device_limits(devices: Sequence[jax.Device]) -> list[int | None]:
    """The memory of every stage's device in bytes, an equal part where stages share one; None where it is unknown."""
    limits: list[int | None] = []
    for device in devices:
        limit = memory_bytes_of(device)
        limits.append(None if limit is None else limit // list(devices).count(device))
    return limits


class MemoryMeter:
    """Counts what a stage holds; ``reset`` tells the most since its last call. Used by the threads of all its lanes.

    Args:
        remaking: the kinds of tasks that make the stash of a microbatch again, of which F keeps its inputs alone.
    """

    def __init__(self, programs: Mapping[int, CompiledChunk], device: Any, remaking: Iterable[TaskKind] = ()) -> None:
        self._device, self._remaking = device, tuple(remaking)
        self._lock = threading.Lock()
        self._on_host = self._host_peak = self._temporaries = 0
        self._held = self._peak = sum(chunk_bytes(each.sizes).fixed for each in programs.values())
        self._variant_of = {chunk: each.variant_of for chunk, each in programs.items()}
        self._taken: dict[tuple[TaskKind, int, int, bool], int] = {}
        self._running: dict[tuple[TaskKind, int, int, bool], int] = {}
        for chunk, each in programs.items():
            for variant, sizes in enumerate(each.sizes_of_variants):
                for is_remade in (False, True):
                    self._add_variant(chunk, variant, sizes, is_remade=is_remade)

    def _add_variant(self, chunk: int, variant: int, sizes: ChunkSizes, *, is_remade: bool) -> None:
        """Look up once what every kind of task takes for good and while it runs."""
        found, which = chunk_bytes(sizes), (chunk, variant, is_remade)
        for kind, program in _PROGRAM_OF_KIND.items():
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
        elif is_remade:
            self._running[TaskKind.F, *which] += sizes.stash_bytes  # which is dropped

    def ran(self, task: Task, bucket: int, inbox_bytes: int, *, is_remade: bool = False) -> None:
        """A task of a microbatch of this bucket has run or was launched: count what it took and freed, and what lay in
        inbox and was on its way. R and U are the same in all buckets. ``is_remade``: the microbatch's stash is made
        again."""
        variant = 0 if task.microbatch < 0 else self._variant_of[task.chunk][bucket]
        assert variant is not None
        which = task.kind, task.chunk, variant, is_remade
        with self._lock:
            before, self._temporaries = self._held, self._running[which]
            self._held += self._taken.get(which, 0)
            self._peak = max(self._peak, max(before, self._held) + self._temporaries + inbox_bytes)

    def begins(self, before: Held, after: Held, inbox_bytes: int) -> None:
        """An operation begins to make this of what a microbatch holds: both are there until it has ended."""
        with self._lock:
            self._held += max(0, after.device - before.device)
            self._on_host += max(0, after.host - before.host)
            self._peak = max(self._peak, self._held + self._temporaries + inbox_bytes)
            self._host_peak = max(self._host_peak, self._on_host)

    def ended(self, before: Held, after: Held) -> None:
        """It has ended: what it made superfluous is gone."""
        with self._lock:
            self._held += min(0, after.device - before.device)
            self._on_host += min(0, after.host - before.host)

    def reset(self) -> Held:
        """The peaks since the last call, in bytes."""
        stats = self._device.memory_stats()
        with self._lock:
            peak, self._peak = self._peak, self._held
            host_peak, self._host_peak = self._host_peak, self._on_host
        is_counted = bool(stats) and "peak_bytes_in_use" in stats
        return Held(int(stats["peak_bytes_in_use"]) if is_counted else peak, host_peak)
