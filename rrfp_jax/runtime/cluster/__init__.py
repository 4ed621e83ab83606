"""How the processes of a run are started, brought together and ended; imports no JAX until a rank asks for it.

The launcher's side is :func:`rrfp_jax.runtime.cluster.launcher.launch`: it starts ranks, hosts rendezvous and
coordination service, and ends everything together. A rank's side: :func:`membership_from` its environment,
:func:`join`, and the :class:`Cluster` that it gives.

The names load on first use, so that a configuration can be checked before the network and JAX are loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrfp_jax.runtime.cluster.cluster import Cluster, StartFailed, join
    from rrfp_jax.runtime.cluster.config import ClusterConfig
    from rrfp_jax.runtime.cluster.loop import LoopThread
    from rrfp_jax.runtime.cluster.membership import Membership, membership_from

_MODULE_OF_NAME = {
    "Cluster": "cluster",
    "ClusterConfig": "config",
    "LoopThread": "loop",
    "Membership": "membership",
    "StartFailed": "cluster",
    "join": "cluster",
    "membership_from": "membership",
}

__all__ = [
    "Cluster",
    "ClusterConfig",
    "LoopThread",
    "Membership",
    "StartFailed",
    "join",
    "membership_from",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'rrfp_jax.runtime.cluster' has no attribute {name!r}")
    return getattr(import_module(f"rrfp_jax.runtime.cluster.{_MODULE_OF_NAME[name]}"), name)
