"""Small model in numbers, which torch and JAX build alike: layers of ``x + tanh(x W)`` on each stage, a mean square.

No framework is loaded here.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
STAGES, LAYERS, WIDTH, ROWS = 2, 4, 512, 64
"""Stages, layers of each, their width, and rows of a microbatch."""
LEARNING_RATE = 0.1
"""Learning rate of plain gradient descent on the mean over the whole batch."""


def weights(stage: int) -> Array:
    """Returns the weights at the start, [layers, width, width]."""
    drawn = np.random.default_rng([7, stage]).standard_normal((LAYERS, WIDTH, WIDTH))
    return (drawn / WIDTH).astype(np.float32)


def batch(num_microbatches: int, seed: int) -> tuple[Array, Array]:
    """Returns inputs and targets, [microbatches, rows, width] each."""
    rng = np.random.default_rng(seed)
    inputs, targets = rng.standard_normal((2, num_microbatches, ROWS, WIDTH)).astype(np.float32)
    return inputs, targets
