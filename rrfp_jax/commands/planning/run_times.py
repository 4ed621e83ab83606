"""The times of a training run's own last steps, as it has left them in its directory."""

from dataclasses import replace
from pathlib import Path

from rrfp_jax.commands.planning.measuring import Measured, chunk_times, host_ms
from rrfp_jax.commands.planning.small_cut import cut_of_run
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.observe.chrome_trace import read_trace
from rrfp_jax.planning.costs.fitting import ChunkTimes
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.training.run_directory import TRACE


def with_times_of(run: str, config: TrainConfig, measured: Measured) -> Measured:
    """What was measured, with the times of a run in place of its own.

    Raises ValueError where the run left no trace, or one of other chunks than its configuration says.
    """
    path = Path(run) / TRACE
    timeline = read_trace(path)
    chunks = sorted({span.task.chunk for span in timeline.spans})
    share = config.pipeline.data
    layers = cut_of_run(config, len(chunks) // share)
    if chunks != list(range(len(layers) * share)):
        raise ValueError(f"{path} has tasks of chunks {chunks}, and the run's configuration cuts {len(layers)}")
    return replace(measured, times=_times(timeline, layers, share), host_ms=host_ms(timeline))


def _times(timeline: Timeline, layers: tuple[tuple[str, ...], ...], num_replicas: int) -> list[ChunkTimes]:
    """Of every chunk of every replica."""
    times = chunk_times(timeline, layers * num_replicas)
    return [replace(each, returns_gradient=number % len(layers) > 0) for number, each in enumerate(times)]
