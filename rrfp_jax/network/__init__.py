"""How the processes of a run find, recognise, watch and talk to each other; knows nothing of JAX.

The launcher makes a :class:`RunKey` and hosts a :class:`RendezvousServer`. Each rank opens a :class:`PeerNetwork`,
goes to the rendezvous (:func:`meet`) with its address and configuration, and starts the network with the addresses of
all others.

The names load on first use, so that whoever reads a configuration (:mod:`rrfp_jax.network.cluster_config`) loads no
ZeroMQ.
"""

from rrfp_jax.first_use import load_on_first_use

__getattr__, __all__ = load_on_first_use(__name__, __file__)
