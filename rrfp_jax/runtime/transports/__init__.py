"""How arrays and plain data travel between units: within a process, through sockets, or through transfer servers.

:class:`PipelineTransport` is all that the runtime needs. From the shardings at both ends of an *edge* it works out
which rank sends which slices to which rank (:mod:`.routes`), so units may span processes and differ in tensor degree.
Messages may arrive in any order; what is sent is owned until the receiver has confirmed it.
"""

from rrfp_jax.runtime.transports.edges import Edge
from rrfp_jax.runtime.transports.interface import Deliver, Failed, Transport, TransportFailed
from rrfp_jax.runtime.transports.router import PipelineTransport, Selection, check_selection
from rrfp_jax.runtime.transports.ways import EdgeOf

__all__ = [
    "Deliver",
    "Edge",
    "EdgeOf",
    "Failed",
    "PipelineTransport",
    "Selection",
    "Transport",
    "TransportFailed",
    "check_selection",
]
