"""What a model has to compute for a step: the numerator of model FLOPs utilisation.

::

    model FLOPs = sum over layers of  forward + input gradient + parameters' gradient     (rrfp_jax.planning.flops)
    MFU         = model FLOPs / (step time x sum of the devices' bfloat16 peaks)           (Chowdhery et al. 2022, B)

For a decoder that trains, this is 6 for each token and parameter of a product, the head's included, plus 12 times the
width of all heads for each layer and each pair of tokens that may look at each other. Counted is what the model asks
for and not what is executed:

* what is computed again (rematerialisation, recomputing) counts once;
* padding counts nothing, and packed sequences are pairs only within themselves; whole squares, no triangles;
* the embedding is a look-up and counts nothing, and so do norms, activations and the optimizer;
* of experts those count that compute a token, and the router;
* a frozen layer has no gradient of parameters, and before everything that trains no backward;
* an encoder counts for the patches that there are, and not at all in microbatches without.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rrfp_jax.planning.flops import Flops


class Amounts(NamedTuple):
    """What a step's batch holds, over all microbatches, padding left out."""

    tokens: float
    pairs: float
    """Of tokens that may look at each other, see :func:`rrfp_jax.planning.flops.pairs`."""
    patches: float = 0.0
    patch_pairs: float = 0.0


class CountedLayer(NamedTuple):
    """A layer as it counts."""

    forward: Callable[[Amounts], Flops]
    trains: bool = True
    returns_gradient: bool = True
    """Whether anything before it could use a gradient of its input."""


def step_flops(layers: Sequence[CountedLayer], amounts: Amounts) -> float:
    """Forward and backward of all layers, in the order in which a microbatch meets them; multiply-adds are two."""
    total, has_backward = 0.0, False
    for layer in layers:
        has_backward |= layer.trains
        tasks = layer.forward(amounts).tasks(trains=layer.trains, has_backward=has_backward)
        total += tasks.forward + tasks.input_gradient * layer.returns_gradient + tasks.weight_gradient
    return total
