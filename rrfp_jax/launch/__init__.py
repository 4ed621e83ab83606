"""The launcher of a run's processes: :func:`rrfp_jax.launch.launcher.launch` starts, watches and ends them together.

It hosts the rendezvous and JAX's coordination service, and loads no JAX itself.
"""
