"""How the processes of a run are started, brought together and ended; imports no JAX until a rank asks for it.

The launcher's side is :func:`rrfp_jax.runtime.cluster.supervisor.launch`: it starts ranks, hosts rendezvous and
coordination service, and ends everything together. A rank's side: :func:`membership_from` its environment,
:func:`join`, and the :class:`Cluster` that it gives.
"""

from rrfp_jax.runtime.cluster.cluster import Cluster, StartFailed, join
from rrfp_jax.runtime.cluster.config import ClusterConfig
from rrfp_jax.runtime.cluster.loop import LoopThread
from rrfp_jax.runtime.cluster.membership import Membership, membership_from

__all__ = [
    "Cluster",
    "ClusterConfig",
    "LoopThread",
    "Membership",
    "StartFailed",
    "join",
    "membership_from",
]
