"""How arrays and plain data travel between units: within a process, through sockets, or through transfer servers.

:class:`PipelineTransport` is all that the runtime needs. From the shardings at both ends of an *edge* it works out
which rank sends which slices to which rank (:mod:`.edges`), so units may span processes and differ in tensor degree.
Messages may arrive in any order; what is sent is owned until the receiver has confirmed it.
"""

from rrfp_jax.runtime.transports.edges import ArrayEdge as ArrayEdge
from rrfp_jax.runtime.transports.interface import Deliver as Deliver
from rrfp_jax.runtime.transports.interface import Failed as Failed
from rrfp_jax.runtime.transports.interface import Transport as Transport
from rrfp_jax.runtime.transports.interface import TransportFailed as TransportFailed
from rrfp_jax.runtime.transports.router import PipelineTransport as PipelineTransport
from rrfp_jax.runtime.transports.router import Selection as Selection
from rrfp_jax.runtime.transports.router import check_selection as check_selection
from rrfp_jax.runtime.transports.routing import EdgeOf as EdgeOf
from rrfp_jax.runtime.transports.routing import partners as partners
