"""Exact split of a function's backward into input gradient and weight gradients; `rrfp_jax.programs.split` is its face.

A function passes through this package in this order:

`lowering`   traces the function and its pullback, and turns both jaxprs into lists of nodes (`ir`), calls inlined
`joined`     joins the two: which values forward and backward share, which of them are stored, which are made of
             parameters alone and computed once per update
`widening`   takes the rounding out of weight gradients that are added up in a wider dtype
`partition`  cuts the backward in two, inside loops and shard maps too, so that the fewest bytes cross

`liveness` drops nodes whose outputs nobody reads, and `rules` says which operations are free, heavy or light.
"""
