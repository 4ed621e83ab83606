"""What studies share that run tables by the arbiters: the rules of their steps, durations, and what was held."""

from collections.abc import Sequence

import numpy as np

from rrfp_jax.arbitration import Agreement, StepRules
from rrfp_jax.commands.studies.durations import Durations, Profile
from rrfp_jax.schedules import ScheduleTable, Task, TaskKind
from rrfp_jax.schedules.slots import SlotLengths, per_stage
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import peak_memory

RULES = StepRules(updates=False, agreement=Agreement.ALL)
"""As in emulate: a step ends for all stages when all have reported the end of their tasks."""


def chunk_durations(table: ScheduleTable, durations_ms: Profile, parts: Sequence[float] = ()) -> Durations:
    """F, I and W of a whole stage cut for its chunks, equally or by their parts; [1, chunks, microbatches, 3]."""
    length = per_stage(table, SlotLengths(*durations_ms), parts)
    kinds = (TaskKind.F, TaskKind.I, TaskKind.W)
    by_chunk = [[length(Task(kind, chunk, 0)) for kind in kinds] for chunk in range(table.graph.num_chunks)]
    return np.repeat(np.array([by_chunk], np.float64)[:, :, None], table.graph.num_microbatches, axis=2)


def peak_of(table: ScheduleTable, step: Timeline, parts: Sequence[float] = ()) -> float:
    """Activations of the fullest stage in a step that ran, counted as for a table; where operations move some away,
    those on the device."""
    return round(max(peak_memory(step, table.graph, table.placement, chunk_parts=parts)), 9)
