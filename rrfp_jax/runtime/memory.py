"""The memory of stages: forecast from their compiled programs, and measured while they run.

Where the backend counts its own allocations (``Device.memory_stats``) the measured peak is the backend's. Elsewhere it
is the bytes of what the stage is known to hold, at the moment when that is most: parameters and the like, stashes, what
is owed to weight gradients, inboxes, and the temporaries of the running program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rrfp_jax.arbitration import Order
from rrfp_jax.planning.memory import ChunkBytes, StageForecast, forecast_stage
from rrfp_jax.programs.chunk_programs import ChunkPrograms
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


def chunk_bytes(programs: ChunkPrograms) -> ChunkBytes:
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


def forecast_memory(order: Order, sizes: Mapping[int, ChunkBytes]) -> list[StageForecast]:
    """The predicted peak of every stage."""
    return [
        forecast_stage([sizes[c] for c in chunks], order.windows[stage], order.graph.num_microbatches)
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
    """Counts what a stage holds; ``peak`` is the most it held since the last ``reset``. Used by its compute thread."""

    def __init__(self, programs: Mapping[int, ChunkPrograms], device: Any) -> None:
        self._sizes = {chunk: chunk_bytes(each) for chunk, each in programs.items()}
        self._temporaries = {chunk: each.sizes.temporaries for chunk, each in programs.items()}
        self._device = device
        self._held = self._peak = sum(sizes.fixed for sizes in self._sizes.values())

    def ran(self, task: Task, inbox_bytes: int) -> None:
        """A task has run: count what it took and freed, with what lay in the inbox meanwhile."""
        kind, chunk, _ = task
        sizes = self._sizes[chunk]
        names = _PROGRAM_OF_KIND[kind]
        running = max((size for name, size in self._temporaries[chunk].items() if name.startswith(names)), default=0)
        before = self._held
        if kind is TaskKind.F:
            self._held += sizes.stash
        elif kind is TaskKind.B:
            self._held -= sizes.stash
        elif kind is TaskKind.I:
            self._held += sizes.owed - sizes.stash
        elif kind is TaskKind.W:
            self._held -= sizes.owed
        self._peak = max(self._peak, max(before, self._held) + running + inbox_bytes)

    def reset(self) -> int:
        """The peak since the last call, in bytes."""
        stats = self._device.memory_stats()
        peak, self._peak = self._peak, self._held
        return int(stats["peak_bytes_in_use"]) if stats and "peak_bytes_in_use" in stats else peak
