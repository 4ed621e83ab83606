"""What the training loop asks of a data set."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Batch = dict[str, NDArray[Any]]
"""One step's data: leaf name -> NumPy array ``[num_microbatches, microbatch_size, ...]``."""


class Dataset(Protocol):
    """Any object that can make the batch of a given step.

    There is no iterator state: the step number is the position, so to resume is to ask for the next step.
    """

    def batch(self, step: int) -> Batch:
        """The batch of ``step`` (0, 1, ...), the same at every call; safe to call from any thread."""
        ...


def token_leaves(windows: NDArray[np.uint8], num_microbatches: int) -> Batch:
    """Next-token prediction on ``windows``, uint8 ``[sequences, length + 1]``.

    Returns ``tokens`` and ``targets``, int32, and ``weights``, float32 ones, each ``[num_microbatches, sequences /
    num_microbatches, length]``; the target of a position is the token after it.
    """
    sequences, length = windows.shape[0], windows.shape[1] - 1
    shape = (num_microbatches, sequences // num_microbatches, length)
    return {
        "tokens": windows[:, :-1].astype(np.int32).reshape(shape),
        "targets": windows[:, 1:].astype(np.int32).reshape(shape),
        "weights": np.ones(shape, np.float32),
    }
