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
from rrfp_jax.programs.compiled import CompiledChunk
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


def chunk_bytes(programs: CompiledChunk) -> ChunkBytes:
    """The sizes of a chunk as the forecast takes them."""
    sizes = programs.sizes
    return ChunkBytes(
        fixed=sizes.params_bytes + sizes.accumulators_bytes + sizes.optimizer_bytes + sizes.derived_bytes,
        stash=sizes.stash_bytes + sizes.kept_bytes,
        owed=sizes.owed.total,
        inputs=sizes.inputs_bytes,
        output_grads=sizes.output_grads_bytes,
        outputs=max(sizes.outputs_bytes, sizes.input_grads_bytes),
        temporaries=max(sizes.temporaries.values(), default=0),
    )


def forecast_memory(order: Order, sizes: Mapping[int, ChunkBytes], num_microbatches: int) -> list[StageForecast]:
    """The predicted peak of every stage; ``num_microbatches`` is a replica's share."""
    footprints = order.footprints or (None,) * len(order.windows)
    return [
        forecast_stage([sizes[c] for c in chunks], order.windows[stage], num_microbatches, footprints[stage])
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
        self._held = self._peak = 0
        self._taken: dict[tuple[TaskKind, int], int] = {}
        self._running: dict[tuple[TaskKind, int], int] = {}
        for chunk, each in programs.items():
            self._add_chunk(chunk, chunk_bytes(each), each.sizes.temporaries)

    def _add_chunk(self, chunk: int, sizes: ChunkBytes, temporaries: Mapping[str, int]) -> None:
        """Look up once what every kind of task takes for good and while it runs."""
        self._held += sizes.fixed
        self._peak = self._held
        for kind, program in _PROGRAM_OF_KIND.items():
            sizes_of_kind = (size for name, size in temporaries.items() if name.startswith(program))
            self._running[kind, chunk] = max(sizes_of_kind, default=0)
        self._taken |= {
            (TaskKind.F, chunk): sizes.stash,
            (TaskKind.B, chunk): -sizes.stash,
            (TaskKind.I, chunk): sizes.owed - sizes.stash,
            (TaskKind.W, chunk): -sizes.owed,
        }

    def ran(self, task: Task, inbox_bytes: int) -> None:
        """A task has run or was launched: count what it took and freed, and what lay in inbox and was on its way."""
        which = task.kind, task.chunk
        before = self._held
        self._held += self._taken.get(which, 0)
        self._peak = max(self._peak, max(before, self._held) + self._running[which] + inbox_bytes)

    def reset(self) -> int:
        """The peak since the last call, in bytes."""
        stats = self._device.memory_stats()
        peak, self._peak = self._peak, self._held
        return int(stats["peak_bytes_in_use"]) if stats and "peak_bytes_in_use" in stats else peak
