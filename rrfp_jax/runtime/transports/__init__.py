"""How arrays and plain data travel between units: within a process, through sockets, or through transfer servers.

:class:`PipelineTransport` is all that the runtime needs. From the shardings at both ends of an *edge* it works out
which rank sends which slices to which rank (:mod:`.edges`), so units may span processes and differ in tensor degree.
Messages may arrive in any order; what is sent is owned until the receiver has confirmed it.
"""

from rrfp_jax.runtime.transports.edges import ArrayEdge as ArrayEdge
from rrfp_jax.runtime.transports.edges import EdgeOf as EdgeOf
from rrfp_jax.runtime.transports.edges import partners as partners
from rrfp_jax.runtime.transports.messages import Deliver as Deliver
from rrfp_jax.runtime.transports.messages import Failed as Failed
from rrfp_jax.runtime.transports.transport import PipelineTransport as PipelineTransport
