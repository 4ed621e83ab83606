"""A rank with JAX: a sum over the devices of all ranks, and then a wait."""

import argparse
import json
import os
import sys
import time

from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.runtime.cluster import join, membership_from

DEVICES = 2


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait-s", type=float, default=0.0)
    parser.add_argument("--last-lingers-s", type=float, default=0.0, help="after the run")
    parser.add_argument("--die-before-devices", type=int, metavar="RANK")
    parser.add_argument("--devices-of-last", type=int, default=DEVICES)
    arguments = parser.parse_args()
    membership = membership_from(os.environ)
    assert membership is not None
    with join(membership, {}, ClusterConfig(silence_deadline_s=3.0)) as cluster:
        cluster.connect()
        if arguments.die_before_devices == cluster.rank:
            time.sleep(1.0)  # until all have connected
            os.abort()
        is_last = cluster.rank == cluster.num_ranks - 1
        try:
            devices = cluster.initialize_jax("cpu", arguments.devices_of_last if is_last else DEVICES)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if is_last and len(devices) < DEVICES:
            time.sleep(600)  # the others find out
        total = sum_over_all(cluster.num_ranks)
        proxies = {name: value for name, value in os.environ.items() if "proxy" in name.lower()}
        seen = {"devices": len(devices), "sum": total, "pid": os.getpid(), "proxies": proxies}
        print(json.dumps({"rank": cluster.rank, **seen}), flush=True)
        time.sleep(arguments.wait_s)
        cluster.watch(lambda rank, reason: None)
    if is_last:
        time.sleep(arguments.last_lingers_s)
    return 0


def sum_over_all(num_ranks: int) -> float:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("all",))
    ones = np.arange(num_ranks * DEVICES, dtype=np.float32)
    spread = NamedSharding(mesh, PartitionSpec("all"))
    array = jax.make_array_from_callback(ones.shape, spread, lambda index: ones[index])
    return float(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(array))


if __name__ == "__main__":
    sys.exit(main())
