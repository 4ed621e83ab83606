"""The order of a data set that is gone through again and again, each time in another order, by the step's number alone.

Items are counted over the whole run: item ``n`` of the run is item ``order(n // num)[n % num]`` of the data set, and
step ``s`` takes ``batch_size`` of them from ``s * batch_size`` on. A step may therefore span two epochs, and nothing is
left out.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def items_of(step: int, *, batch_size: int, num: int, seed: int) -> NDArray[np.int64]:
    """Which of ``num`` items step ``step`` takes, ``[batch_size]``; ``batch_size`` must not be above ``num``."""
    if step < 0:
        raise ValueError(f"step is {step}: give 0 or more")
    epoch, offset = divmod(step * batch_size, num)
    order = _order(seed, epoch, num)[offset : offset + batch_size]
    rest = batch_size - len(order)
    if not rest:
        return order
    # A step takes at most num items, so it reaches at most into the next epoch.
    return np.concatenate([order, _order(seed, epoch + 1, num)[:rest]])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num: int) -> NDArray[np.int64]:
    # NumPy guarantees the stream of raw bits over its versions, but not that of Generator.permutation: a run that
    # resumes with another NumPy must see the same order.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num)
    return np.argsort(bits, kind="stable")
