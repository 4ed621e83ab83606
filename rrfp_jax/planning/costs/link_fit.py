"""Latency and bandwidth of links, from how long messages of several sizes took."""

from collections.abc import Iterable

import numpy as np
from scipy.optimize import nnls

from rrfp_jax.planning.costs.layer_costs import LinkCosts


def fit_links(seen: Iterable[tuple[float, float]], control_ms: float | None = None) -> LinkCosts:
    """From (bytes, milliseconds) of tensors, and what a message without tensors takes, where that is known.

    With a single size and no such message all of the time is latency. A fit in which size does not matter says so.
    """
    points = [(num_bytes / 1e6, ms) for num_bytes, ms in seen]
    if not points:
        return LinkCosts(latency_ms=control_ms or 0.0, control_ms=control_ms or 0.0)
    if control_ms is not None:
        points.append((0.0, control_ms))
    matrix = np.array([[1.0, megabytes] for megabytes, _ in points])
    times = np.array([ms for _, ms in points])
    weights = 1 / np.maximum(times, 1e-6)
    (latency_ms, ms_per_megabyte), _ = nnls(matrix * weights[:, None], times * weights)
    return LinkCosts(
        latency_ms=float(latency_ms),
        gb_per_s=1 / float(ms_per_megabyte) if ms_per_megabyte > 0 else None,
        control_ms=min(control_ms or 0.0, float(latency_ms)),
    )
