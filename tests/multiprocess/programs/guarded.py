"""Two ranks with a secret in JAX's coordination service, and a barrier there.

Rank 1 joins JAX once a file ``join`` exists, and goes to the barrier once there is ``pass``.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.runtime.cluster import join, membership_from

PATIENCE_MS = 60_000


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--signs", type=Path, help="the folder of these files")
    arguments = parser.parse_args()

    def await_sign(name: str) -> None:
        while cluster.rank and not (arguments.signs / name).exists():
            time.sleep(0.02)

    membership = membership_from(os.environ)
    assert membership is not None
    with join(membership, {}, ClusterConfig()) as cluster:
        cluster.connect()
        if cluster.rank == 0:
            print(f"guarded at {membership.coordinator}", flush=True)
        await_sign("join")
        cluster.initialize_jax("cpu", 1)
        from rrfp_jax.private.jax_names import global_state

        client = global_state.client
        if cluster.rank == 0:
            client.key_value_set("secret", "known to holders of the key")
        await_sign("pass")
        print(f"{cluster.rank} at the gate", flush=True)
        client.wait_at_barrier("gate", PATIENCE_MS)
        print(f"{cluster.rank} is through", flush=True)
        cluster.watch(lambda rank, reason: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
