"""The names of this package and where they live; see :mod:`rrfp_jax.first_use`."""

from rrfp_jax.network.cluster_config import ClusterConfig as ClusterConfig
from rrfp_jax.network.keys import KEY_FILE_VARIABLE as KEY_FILE_VARIABLE
from rrfp_jax.network.keys import KEY_VARIABLE as KEY_VARIABLE
from rrfp_jax.network.keys import RunKey as RunKey
from rrfp_jax.network.loop_thread import LoopThread as LoopThread
from rrfp_jax.network.membership import Membership as Membership
from rrfp_jax.network.peers import PeerNetwork as PeerNetwork
from rrfp_jax.network.plain import MalformedMessage as MalformedMessage
from rrfp_jax.network.rendezvous import LauncherLink as LauncherLink
from rrfp_jax.network.rendezvous import meet as meet
from rrfp_jax.network.rendezvous_server import RendezvousFailed as RendezvousFailed
from rrfp_jax.network.rendezvous_server import RendezvousServer as RendezvousServer
from rrfp_jax.network.roll_call import Bulletin as Bulletin
from rrfp_jax.network.roll_call import Hello as Hello
from rrfp_jax.network.roll_call import Member as Member
from rrfp_jax.network.settings import NetworkSettings as NetworkSettings
from rrfp_jax.network.settings import PeerAddress as PeerAddress
from rrfp_jax.network.settings import Traffic as Traffic
from rrfp_jax.network.topics import Handler as Handler
