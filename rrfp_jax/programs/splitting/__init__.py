"""Exact split of a function's backward into input gradient and weight gradients; `rrfp_jax.programs.split` is its face.

The way of a function through this package:

`tracing`    the function and its pullback become two jaxprs with shared residuals
`lowering`   both become one list of nodes (`ir`, `operations`), calls inlined; what is fixed is known
`fixed`      what is derived from parameters is written once, and computed once per update where that pays
`widening`   gradients of parameters are not rounded before they are added up
`stash`      which values the forward hands on
`partition`  the rules: what I needs, what is left for W, inside loops and shard maps too
`cut`        which values cross from I to W: fewest bytes
`report`     bytes

`liveness` drops what nobody reads, `rules` says which operations are free, heavy or light, `versions` keeps what JAX
does not document.
"""
