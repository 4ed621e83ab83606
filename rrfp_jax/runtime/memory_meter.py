"""The memory of stages: forecast from their compiled programs, and measured while they run.

Where the backend counts its own allocations (``Device.memory_stats``) the measured peak is the backend's. Elsewhere it
is the bytes of what the stage is known to hold, at the moment when that is most: parameters and the like, stashes, what
is owed to weight gradients, inboxes, and the temporaries of the running program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rrfp_jax.arbitration import Order
from rrfp_jax.planning.forecast import ChunkBytes, StageForecast, forecast_stage
from rrfp_jax.programs.compiled import ChunkSizes, CompiledChunk
from rrfp_jax.tasks import Task, TaskKind

_PROGRAM_OF_KIND = {
    TaskKind.F: "forward",
    TaskKind.B: "backward",
    TaskKind.I: "input_gradient",
    TaskKind.W: "weight_gradient",
    TaskKind.R: "reduce",
    TaskKind.U: "update ",
}
"""How the names of the programs of each kind of task begin."""


def chunk_bytes(sizes: ChunkSizes) -> ChunkBytes:
    """The sizes of a chunk as the forecast takes them."""
    once = (sizes.params_bytes, sizes.accumulators_bytes, sizes.optimizer_bytes, sizes.derived_bytes, sizes.zeros_bytes)
    return ChunkBytes(
        fixed=sum(once),
        stash=sizes.stash_bytes + sizes.kept_bytes,
        owed=sizes.owed.total,
        inputs=sizes.inputs_bytes,
        output_grads=sizes.output_grads_bytes,
        outputs=max(sizes.outputs_bytes, sizes.input_grads_bytes),
        temporaries=max(sizes.temporaries.values(), default=0),
    )


def forecast_memory(order: Order, sizes: Mapping[int, ChunkBytes], num_microbatches: int) -> list[StageForecast]:
    """The predicted peak of every stage; ``num_microbatches`` is a replica's share."""
    none = (None,) * len(order.windows)
    footprints, capacities = order.footprints or none, order.capacities or none
    return [
        forecast_stage(
            [sizes[c] for c in chunks],
            order.windows[stage],
            num_microbatches,
            footprint=footprints[stage],
            capacity=capacities[stage],
        )
        for stage, chunks in enumerate(order.placement.chunks_of_stage)
    ]


def device_limits(devices: Sequence[jax.Device]) -> list[int | None]:
    """The memory of every stage's device in bytes, an equal part where stages share one; None where it is unknown."""
    limits: list[int | None] = []
    for device in devices:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        limits.append(None if limit is None else int(limit) // list(devices).count(device))
    return limits


class MemoryMeter:
    """Counts what a stage holds; ``peak`` is the most it held since the last ``reset``. Used by one thread."""

    def __init__(self, programs: Mapping[int, CompiledChunk], device: Any) -> None:
        self._device = device
        self._held = self._peak = sum(chunk_bytes(each.sizes).fixed for each in programs.values())
        self._variant_of = {chunk: each.variant_of for chunk, each in programs.items()}
        self._taken: dict[tuple[TaskKind, int, int], int] = {}
        self._running: dict[tuple[TaskKind, int, int], int] = {}
        for chunk, each in programs.items():
            for variant, sizes in enumerate(each.sizes_of_variants):
                self._add_variant(chunk, variant, chunk_bytes(sizes), sizes.temporaries)

    def _add_variant(self, chunk: int, variant: int, sizes: ChunkBytes, temporaries: Mapping[str, int]) -> None:
        """Look up once what every kind of task takes for good and while it runs."""
        for kind, program in _PROGRAM_OF_KIND.items():
            sizes_of_kind = (size for name, size in temporaries.items() if name.startswith(program))
            self._running[kind, chunk, variant] = max(sizes_of_kind, default=0)
        self._taken |= {
            (TaskKind.F, chunk, variant): sizes.stash,
            (TaskKind.B, chunk, variant): -sizes.stash,
            (TaskKind.I, chunk, variant): sizes.owed - sizes.stash,
            (TaskKind.W, chunk, variant): -sizes.owed,
        }

    def ran(self, task: Task, bucket: int, inbox_bytes: int) -> None:
        """A task of a microbatch of this bucket has run or was launched: count what it took and freed, and what lay in
        inbox and was on its way. R and U are the same in all buckets."""
        variant = 0 if task.microbatch < 0 else self._variant_of[task.chunk][bucket]
        assert variant is not None
        which = task.kind, task.chunk, variant
        before = self._held
        self._held += self._taken.get(which, 0)
        self._peak = max(self._peak, max(before, self._held) + self._running[which] + inbox_bytes)

    def reset(self) -> int:
        """The peak since the last call, in bytes."""
        stats = self._device.memory_stats()
        peak, self._peak = self._peak, self._held
        return int(stats["peak_bytes_in_use"]) if stats and "peak_bytes_in_use" in stats else peak
