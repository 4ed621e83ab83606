"""Saving the state of a run, and restoring it."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rrfp_jax.checkpoint import Checkpoints, ChunkLayers, StoredStep, layer_owners
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.programs.chunk import param_specs

_AGAIN_S = 60.0
"""Seconds after a failed save until it is time for the next one."""


class RunSaver:
    """Saves a pipeline's state at step boundaries, and restores it. All processes call the same methods alike.

    The caller looks in ``checkpoints`` for a state to restore, and closes them at the end.

    Args:
        directory: the directory of the run's checkpoints, shared by all processes.
        pipeline: the pipeline, which may have run steps already.
        every: number of steps from one save to the next; None: steps do not count.
        minutes: minutes after which a save is due since the last one; None: time does not count.
        keep: how many committed steps stay.
        before_commit: called on rank 0 before a step is committed; an error that it raises keeps it from being so.
    """

    def __init__(
        self,
        directory: Path,
        pipeline: Pipeline,
        *,
        every: int | None,
        minutes: float | None,
        keep: int,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._pipeline, self._every, self._minutes = pipeline, every, minutes
        process, chunks = pipeline.process, pipeline.chunks
        self._layers = {
            index: ChunkLayers(chunk, pipeline.optimizer, trains=pipeline.trains(index))
            for index, chunk in enumerate(chunks)
        }
        owners = layer_owners(
            [param_specs(chunk) for chunk in chunks],
            pipeline.placement.stage_of_chunk,
            process.layout,
            process.devices,
            shard_optimizer=pipeline.updates.shard_optimizer,
        )
        self.checkpoints = Checkpoints(
            directory,
            owners,
            keep=keep,
            coordinator=process.peers,
            before_commit=before_commit,
            layout={"describe": process.layout.describe(), "stage_of_chunk": list(pipeline.placement.stage_of_chunk)},
        )
        self._last_s = time.monotonic()
        self._last_step: int | None = None

    def restore(self, found: StoredStep) -> PipelineState:
        """Returns the pipeline's state as it was saved; raises ValueError if model or optimizer differ."""
        specs = [(self._layers[chunk], target) for chunk, target in self._pipeline.state_specs()]
        states = self.checkpoints.restore(found, specs)
        self._last_step = found.step
        return self._pipeline.restore(states, found.step)

    def start_from(self, checkpoints: Path) -> PipelineState:
        """Returns a state before the first step, with the parameters of the newest checkpoint in another directory."""
        specs = [(self._layers[chunk], target) for chunk, target in self._pipeline.state_specs()]
        return self._pipeline.restore(self.checkpoints.start_from(checkpoints, specs), 0)

    def is_time(self) -> bool:
        """Returns whether enough minutes have passed by the clock of this process."""
        if self._minutes is None:
            return False
        # a save that failed is tried again soon, but not at every step
        wait_s = min(60 * self._minutes, _AGAIN_S) if self.checkpoints.has_failed else 60 * self._minutes
        return time.monotonic() - self._last_s >= wait_s

    def is_due(self, step: int) -> bool:
        """Returns whether the state after ``step`` steps is to be saved whatever the time."""
        return self._every is not None and step % self._every == 0

    def save(self, state: PipelineState, host: Mapping[str, Any], *, keep_also: Iterable[int] = ()) -> None:
        """Saves in the background, with plain data; the pipeline may go on once this returns.

        Committed steps of ``keep_also`` stay beside the newest ones.
        """
        if state.step == self._last_step:
            last = self.checkpoints.wait()
            if last is None or last.failure is None:  # the state was restored from there, or is saved
                return
        states = [(self._layers[chunk], each) for chunk, each in self._pipeline.chunk_states(state)]
        self.checkpoints.save(state.step, states, host, keep_also=keep_also)
        self._last_s, self._last_step = time.monotonic(), state.step
