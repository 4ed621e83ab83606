"""A rank without JAX: joins the run, connects, says so, and then waits to be ended."""

import argparse
import logging
import os
import signal
import sys
import threading
import time

from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.runtime.cluster import StartFailed, join, membership_from

FOREVER_S = 600.0


def first_warning() -> threading.Event:
    """Set once anything is logged, as the loss of a rank is."""
    logged, handler = threading.Event(), logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.set()  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    return logged


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--silence-deadline-s", type=float, default=2.0)
    parser.add_argument("--start-deadline-s", type=float, default=60.0)
    parser.add_argument("--other-configuration", type=int, metavar="RANK")
    parser.add_argument("--absent", type=int, metavar="RANK", help="never come to the rendezvous")
    parser.add_argument("--run-s", type=float, default=FOREVER_S)
    parser.add_argument("--take-over", choices=("soon", "late"), help="at once, or just when a rank has been lost")
    parser.add_argument("--dies", type=int, metavar="RANK", help="while the others are in a collective, which breaks")
    arguments = parser.parse_args()
    membership = membership_from(os.environ)
    assert membership is not None
    if arguments.absent == membership.rank:
        time.sleep(FOREVER_S)
    learning_rate = 0.2 if arguments.other_configuration == membership.rank else 0.1
    config = ClusterConfig(silence_deadline_s=arguments.silence_deadline_s, start_deadline_s=arguments.start_deadline_s)
    try:
        cluster = join(membership, {"optimizer": {"learning_rate": learning_rate}}, config)
        cluster.connect()
    except StartFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 6
    with cluster:
        loss = first_warning()
        print(f"ready {os.getpid()} {','.join(cluster.hosts)}", flush=True)
        if arguments.take_over:
            if arguments.take_over == "late":
                loss.wait()
            cluster.watch(lambda rank, reason: os._exit(3))
        if arguments.dies is not None:
            with cluster.losses_first():
                if arguments.dies == membership.rank:
                    time.sleep(0.5)  # the others may notice their error first
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("connection reset by peer")
        time.sleep(arguments.run_s)
        cluster.watch(lambda rank, reason: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
