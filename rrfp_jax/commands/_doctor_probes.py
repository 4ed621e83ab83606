"""The programs that ``rrfp doctor`` starts in processes of their own, since each may fail or hang.

``python -m rrfp_jax.commands._doctor_probes`` is one of two ranks: they meet, run two steps of tasks that sleep, and
end. With the argument ``jax`` it starts JAX instead, and prints the devices as one line of JSON.
"""

import json
import sys

from rrfp_jax.commands.common.errors import run_command


def _start_jax() -> int:
    """Start JAX and print its platform, devices and versions."""
    from importlib.metadata import version

    import jax

    devices = jax.devices()
    kinds = list(dict.fromkeys(device.device_kind for device in devices))
    seen = {"platform": devices[0].platform, "num_devices": len(devices), "kinds": kinds}
    print(json.dumps({**seen, "jax": jax.__version__, "jaxlib": version("jaxlib")}))
    return 0


def _run_rank() -> int:
    """Run this rank's stage of a small emulated pipeline."""
    from rrfp_jax.cluster import ClusterConfig
    from rrfp_jax.commands.common.process import enter

    process = enter(num_stages=2, configuration={}, cluster=ClusterConfig(), platform="cpu")

    import numpy as np

    from rrfp_jax.core import Agreement, Ordering, StepRules
    from rrfp_jax.schedules import chain, linear
    from rrfp_jax.testing import emulate

    graph = chain(2, 4)
    order = Ordering(hint="bf").resolve(linear(2), graph)
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.ALL), members=process.members())
    emulate(arbiters, np.ones((2, graph.num_chunks, graph.num_microbatches, 3)), 2, process=process)
    process.finish()
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["jax"]:
        sys.exit(_start_jax())  # unguarded: its errors are read from the last line of its traceback
    run_command(_run_rank)
