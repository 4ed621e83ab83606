"""A finished run's model, evaluated on the sets of a configuration: its newest checkpoint, in any layout."""

from pathlib import Path

import optax

from rrfp_jax.checkpoint import last_committed
from rrfp_jax.commands.training.assembly import chunks_of, enter_run, make_evaluator, runtime_options
from rrfp_jax.commands.training.planned import PlannedRun
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.runtime.compile_cache import use_compile_cache
from rrfp_jax.training.evaluation import EvaluationRow
from rrfp_jax.training.run_directory import RunDirectory
from rrfp_jax.training.saving import RunSaver


def evaluate_run(planned: PlannedRun, run: Path) -> tuple[int, list[EvaluationRow], bool]:
    """Returns the number of steps of the checkpoint, the results of each set, and whether this process is the first.

    Nothing is written. All processes call it alike. Raises ValueError where there is no checkpoint, or it is of another
    model.
    """
    config = planned.config
    use_compile_cache()
    process = enter_run(planned)
    checkpoints = RunDirectory(run.absolute()).checkpoints
    with Pipeline(
        chunks_of(planned.config, planned.ordered),
        placement=planned.order.placement,
        edges=None if planned.cut is None else planned.cut.edges,
        process=process,
        optimizer=optax.identity(),
        seed=config.run.seed,
        options=runtime_options(config),
        trains=False,
    ) as pipeline:
        # its own directory is never made: nothing is saved
        saver = RunSaver(checkpoints.with_name("not-saved"), pipeline, every=None, minutes=None, keep=1)
        step = process.gather("step", last_committed(checkpoints))[0]
        state = saver.start_from(checkpoints)
        evaluator = make_evaluator(planned, pipeline)
        shapes = evaluator.shapes()
        first = planned.dataset.batch(0, pipeline.reads(config.data.num_microbatches))
        pipeline.prepare(first, buckets=planned.dataset.buckets, evaluation=shapes)
        rows = evaluator.run(state) or []
        saver.checkpoints.close()
    is_first = not process.rank
    process.finish()
    return step, rows, is_first
