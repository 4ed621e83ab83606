"""Ranks of which two share each stage, held up at random and each in its own way, for so many runs; what each ran."""

import argparse
import json
import os
from pathlib import Path

import numpy as np

from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.core import GroupProtocol, Ordering, StepRules
from rrfp_jax.layout import Layout
from rrfp_jax.runtime.cluster import join, membership_from
from rrfp_jax.schedules import chain, looped

PATIENCE_S = 60.0
STAGES, MICROBATCHES = 2, 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("protocol", choices=[*GroupProtocol])
    parser.add_argument("runs", type=int)
    arguments = parser.parse_args()
    place = membership_from(os.environ)
    assert place is not None
    cluster = join(place, {}, ClusterConfig(silence_deadline_s=PATIENCE_S, start_deadline_s=PATIENCE_S))
    from rrfp_jax.runtime.process import Process
    from rrfp_jax.testing import emulate

    layout = Layout(num_stages=STAGES, mesh={"fsdp": 2}, num_ranks=4)
    process = Process(layout, cluster, patience_s=PATIENCE_S)
    process.connect()
    process.start_jax("cpu")
    chunks = 2 * STAGES
    order = Ordering(hint="bfw", window=4).resolve(looped(STAGES, 2), chain(chunks, MICROBATCHES))
    ran = []
    for seed in range(arguments.runs):
        rng = np.random.default_rng((seed, place.rank))
        slow = rng.random((1, chunks, MICROBATCHES, 3)) < 0.2
        durations_ms = np.where(slow, rng.uniform(2, 8, slow.shape), 0.5)
        arbiters = order.arbiters(StepRules(updates=False), members=process.members(), protocol=arguments.protocol)
        emulation = emulate(arbiters, durations_ms, 1, process=process, progress_deadline_s=PATIENCE_S)
        ran.append([str(task) for task in emulation.timeline.order()[process.units[0]]])
    (arguments.folder / f"{place.rank}.json").write_text(json.dumps(ran))
    process.finish()


if __name__ == "__main__":
    main()
