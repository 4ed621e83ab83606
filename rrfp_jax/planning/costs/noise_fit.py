"""How durations vary, fitted to repeated runs: the sigma of a log-normal body for each kind, and a common tail.

Runs of one task are taken relative to their median. The body's sigma comes from the middle half of the logarithms,
which no tail reaches. What lies further out than a normal distribution of that sigma would come in a thousand runs, and
by at least a fifth of the median, is the tail: its share, and how many times the median it takes.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rrfp_jax.planning.costs.fitting import ChunkTimes
from rrfp_jax.planning.costs.noise import Noise

_QUARTILES_APART = 1.34898
"""Of a standard normal distribution."""
_FAR = 3.2905
"""Sigmas within which a normal distribution has 999 of 1000 draws."""
_LEAST_FACTOR = 1.2
_LEAST_RUNS = 8
"""Of a task, for its median to mean much."""
_SHORT_MS = 0.2
"""Shorter tasks vary by what the clock and the host do, and are left out where there are longer ones."""
_SLOTS = {"F": "F", "I": "I", "W": "W", "B": "I"}
"""As which kind of :class:`Noise` each counts: a whole backward like an input gradient, and like a weight gradient."""


def fit_noise(chunks: Sequence[ChunkTimes]) -> Noise:
    """The noise of these runs; none where too few were made."""
    logs: dict[str, list[float]] = defaultdict(list)
    for least_ms in (_SHORT_MS, 0.0):
        for chunk in chunks:
            for kind, slot in _SLOTS.items():
                runs = np.array(chunk.runs_ms.get(kind, ()))
                if len(runs) >= _LEAST_RUNS and (middle := float(np.median(runs))) > least_ms:
                    logs[slot] += np.log(np.maximum(runs, 1e-6) / middle).tolist()
        if logs:
            break
    if "W" not in logs and "I" in logs:
        logs["W"] = logs["I"]
    sigma = {slot: _body(np.array(each)) for slot, each in sorted(logs.items())}
    far = [float(log) for slot, each in logs.items() for log in each if log > max(_FAR * sigma[slot], _least_log())]
    total = sum(map(len, logs.values()))
    if not far:
        return Noise(sigma=sigma)
    return Noise(sigma=sigma, tail=len(far) / total, tail_factor=float(np.mean(np.exp(far))))


def _body(logs: np.ndarray) -> float:
    low, high = np.quantile(logs, [0.25, 0.75])
    return round(float(high - low) / _QUARTILES_APART, 4)


def _least_log() -> float:
    return float(np.log(_LEAST_FACTOR))
