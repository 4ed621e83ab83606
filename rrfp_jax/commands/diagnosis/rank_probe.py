"""One of two ranks that ``rrfp doctor`` starts: they meet, run two steps of tasks that sleep, and end."""

from rrfp_jax.commands.common.errors import run_command
from rrfp_jax.commands.common.process import enter
from rrfp_jax.network import ClusterConfig


def main() -> int:
    """Run this rank's stage and return the exit code."""
    process = enter(num_stages=2, configuration={}, cluster=ClusterConfig(), platform="cpu")

    import numpy as np

    from rrfp_jax.arbitration import Agreement, Ordering, StepRules
    from rrfp_jax.tasks import chain, linear
    from rrfp_jax.testing import emulate

    graph = chain(2, 4)
    order = Ordering(hint="bf").resolve(linear(2), graph)
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.ALL), members=process.members())
    emulate(arbiters, np.ones((2, graph.num_chunks, graph.num_microbatches, 3)), 2, process=process)
    process.finish()
    return 0


if __name__ == "__main__":
    run_command(main)
