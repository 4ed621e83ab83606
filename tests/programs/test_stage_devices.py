"""Arrays that pass between the units of a stage and the stage as a whole."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from rrfp_jax.programs.stage_devices import StageDevices


def test_threads_that_take_one_array_apart_at_the_same_time_get_all_of_it() -> None:
    """JAX takes an array apart when its shards are first asked for, and has no lock around that."""
    stage = StageDevices([jax.devices()[:4], jax.devices()[4:8]])
    many = jax.jit(lambda x: [x + number for number in range(50)], out_shardings=stage.sharding())
    counts: set[int] = set()
    interval, barrier = sys.getswitchinterval(), threading.Barrier(4)

    def take_apart(arrays: list[jax.Array]) -> None:
        barrier.wait(60)
        for array in arrays:
            counts.update(len(own.addressable_shards) for own in stage.per_replica(array).values())

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            arrays = jax.block_until_ready(many(np.zeros(8, np.float32)))
            with ThreadPoolExecutor(4) as pool:
                for one in [pool.submit(take_apart, arrays) for _ in range(4)]:
                    one.result(60)
    finally:
        sys.setswitchinterval(interval)
    assert counts == {4}
