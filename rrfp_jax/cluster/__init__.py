"""The processes of a run: they are started together, and find, recognise, watch and talk to each other. No JAX.

:func:`~rrfp_jax.cluster.launcher.launch` starts the ranks of a host, watches them and ends them together. It makes the
:class:`RunKey`, and hosts the :class:`RendezvousServer` and JAX's coordination service. Each rank opens a
:class:`PeerNetwork`, joins the rendezvous (:func:`meet`) with its address and configuration, and starts the network
with the addresses of all others. Modules with an underscore are used in this package only.

The names load on first use, so that a program that reads a configuration (:mod:`rrfp_jax.cluster.config`) loads no
ZeroMQ.
"""

from rrfp_jax.first_use import load_on_first_use

__getattr__, __all__ = load_on_first_use(__name__, __file__)
