"""How the processes of a run find, recognise, watch and talk to each other; knows nothing of JAX.

The launcher makes a :class:`RunKey` and hosts a :class:`RendezvousServer`. Each rank opens a :class:`PeerNetwork`,
goes to the rendezvous (:func:`meet`) with its address and configuration, and starts the network with the addresses of
all others.
"""

from rrfp_jax.network.cluster_config import ClusterConfig
from rrfp_jax.network.keys import KEY_FILE_VARIABLE, KEY_VARIABLE, RunKey
from rrfp_jax.network.loop import LoopThread
from rrfp_jax.network.membership import Membership
from rrfp_jax.network.peers import NetworkSettings, PeerAddress, PeerNetwork, Traffic
from rrfp_jax.network.plain import MalformedMessage
from rrfp_jax.network.rendezvous import LauncherLink, meet
from rrfp_jax.network.rendezvous_server import RendezvousFailed, RendezvousServer
from rrfp_jax.network.roll_call import Bulletin, Hello, Member
from rrfp_jax.network.topics import Handler

__all__ = [
    "KEY_FILE_VARIABLE",
    "KEY_VARIABLE",
    "Bulletin",
    "ClusterConfig",
    "Handler",
    "Hello",
    "LauncherLink",
    "LoopThread",
    "MalformedMessage",
    "Member",
    "Membership",
    "NetworkSettings",
    "PeerAddress",
    "PeerNetwork",
    "RendezvousFailed",
    "RendezvousServer",
    "RunKey",
    "Traffic",
    "meet",
]
