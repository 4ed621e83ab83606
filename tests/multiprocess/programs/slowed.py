"""A rank of 2 stages in 2 replicas, whose tasks take 20 ms more than their programs, on one rank twice as much.

``slowed FOLDER STEPS SLOW``: rank SLOW is slow from the first step on.
"""

import pickle
import sys
from pathlib import Path

import jax

from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.commands.common.process import enter
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.schedules import Task
from rrfp_jax.testing.comparing import DelayedStage
from tests.multiprocess.programs.survivor import make_batch, make_pipeline

HELD_UP_S = 0.02


def main() -> None:
    folder, num_steps, slow = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    process = enter(
        num_stages=2, data=2, configuration={}, cluster=ClusterConfig(), platform="cpu", sums_by_messages=True
    )
    held_up_s = HELD_UP_S * (2 if process.rank == slow else 1)

    def delay(_: int, task: Task) -> float:
        return held_up_s if task.microbatch >= 0 else 0.0

    options = RuntimeOptions(wrap_stage=lambda stage: DelayedStage(stage, delay))
    pipeline = make_pipeline(process=process, updates=UpdateRules(reduce="messages"), options=options)
    state, found = pipeline.init(jax.random.key(0)), []
    for step in range(num_steps):
        state, metrics = pipeline.step(state, make_batch(step))
        result = metrics.result()
        found.append((result.loss, dict(result.slow_units)))
    (folder / f"rank{process.rank}").write_bytes(pickle.dumps(found))
    process.finish()


if __name__ == "__main__":
    main()
