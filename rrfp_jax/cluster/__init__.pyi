"""The names of this package and where they live; see :mod:`rrfp_jax.first_use`."""

from rrfp_jax.cluster._channel import Handler as Handler
from rrfp_jax.cluster._channel import PackedHandler as PackedHandler
from rrfp_jax.cluster._head_link import HeadLink as HeadLink
from rrfp_jax.cluster._rendezvous_client import LauncherLink as LauncherLink
from rrfp_jax.cluster._rendezvous_client import meet as meet
from rrfp_jax.cluster._rendezvous_server import RendezvousFailed as RendezvousFailed
from rrfp_jax.cluster._rendezvous_server import RendezvousServer as RendezvousServer
from rrfp_jax.cluster.config import ClusterConfig as ClusterConfig
from rrfp_jax.cluster.config import Membership as Membership
from rrfp_jax.cluster.config import PeerAddress as PeerAddress
from rrfp_jax.cluster.keys import KEY_FILE_VARIABLE as KEY_FILE_VARIABLE
from rrfp_jax.cluster.keys import KEY_VARIABLE as KEY_VARIABLE
from rrfp_jax.cluster.keys import RunKey as RunKey
from rrfp_jax.cluster.loop_thread import LoopThread as LoopThread
from rrfp_jax.cluster.peer_network import PeerNetwork as PeerNetwork
from rrfp_jax.cluster.rendezvous import JoinRequest as JoinRequest
from rrfp_jax.cluster.rendezvous import Member as Member
from rrfp_jax.cluster.rendezvous import RunStatus as RunStatus
from rrfp_jax.cluster.wire import MalformedMessage as MalformedMessage
