"""Exact split of a function's backward into input gradient and weight gradients; `rrfp_jax.programs.split` is its face.

The way of a function through this package:

`tracing`    the function and its pullback become two jaxprs with shared residuals
`lowering`   both become one list of nodes (`ir`, `operations`), calls inlined; what is fixed is known
`merging`    what is derived from parameters is written once
`stash`      which values the forward hands on
`light`      which weight gradients are too light to defer
`partition`  the rules: what I needs, what is left for W; `nested` applies them inside loops and shard maps
`cut`        which values cross from I to W: fewest bytes, by `mincut`
`derived`    which values of parameters alone are worth one copy per update
`report`     bytes

`rules` says which primitives are free and which are heavy, `versions` keeps what JAX does not document.
"""
