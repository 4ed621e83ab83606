"""Starts the processes of a run, watches them and ends them together: :func:`rrfp_jax.launch.launcher.launch`.

Hosts the rendezvous and JAX's coordination service, and loads no JAX itself.
"""
