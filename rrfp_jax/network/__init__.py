"""The network of a run's processes: they find, recognise, watch and talk to each other. It knows nothing of JAX.

The launcher makes a :class:`RunKey` and hosts a :class:`RendezvousServer`. Each rank opens a :class:`PeerNetwork`,
joins the rendezvous (:func:`meet`) with its address and configuration, and starts the network with the addresses of
all others.

The names load on first use, so that a program that reads a configuration (:mod:`rrfp_jax.network.config`) loads no
ZeroMQ.
"""

from rrfp_jax.first_use import load_on_first_use

__getattr__, __all__ = load_on_first_use(__name__, __file__)
