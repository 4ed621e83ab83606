"""Rows of boxes that are thinner than a pixel, as an image.

Drawn one over another, such boxes show whichever was drawn last, in misleading bands. Here every pixel column of a row
is divided among the colours by their share of the time around it, stacked from the bottom, so that nothing is lost and
no colour appears that the legend does not explain.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.observe.panels import Boxes, Panel
from rrfp_jax.observe.style import IDLE_LOOKS, rgb

_WINDOW = 10
"""Pixels over which shares are taken: enough boxes that neighbouring columns look alike."""


def share_images(panel: Panel, *, end_ms: float, num_columns: int, num_levels: int) -> list[NDArray[np.uint8]]:
    """One image per row, [levels, num_columns, 4] in RGBA, of the time from 0 to ``end_ms``; a stage's row has
    ``num_levels``.

    Transparent where no task ran, so that the hatching of long idle times behind it stays visible.
    """
    colours = [panel.colour(group) for group in panel.tasks] + [IDLE_LOOKS[reason].fill for reason in panel.waits]
    palette = np.array([(*rgb(colour), 255) for colour in colours] + [(255, 255, 255, 0)], dtype=np.uint8)
    middles = (np.arange(num_columns) + 0.5) * end_ms / num_columns
    reach = _WINDOW / 2 * end_ms / num_columns
    begins, ends = np.maximum(middles - reach, 0), np.minimum(middles + reach, end_ms)
    images = []
    for number, row in enumerate(panel.rows):
        height = max(1, round(num_levels * row.height))
        # The lowest level comes last in an image.
        levels = (np.arange(height)[::-1] + 0.5) / height
        boxes = (*panel.tasks.values(), *panel.waits.values())
        stacked = np.cumsum([_shares(one, number, begins, ends) for one in boxes], axis=0)
        index = (stacked[:, None, :] < levels[None, :, None]).sum(axis=0)
        idle = stacked[len(panel.tasks) - 1] < 1e-9
        images.append(palette[np.where(idle, len(boxes), index)])
    return images


def are_thin(widths_ms: Sequence[NDArray[np.float64]], pixels_per_ms: float) -> bool:
    """Whether a quarter of the boxes is thinner than two pixels; those that take no time are not to be seen anyway."""
    widths = np.concatenate(widths_ms)
    widths = widths[widths > 0]
    return bool(widths.size) and float(np.quantile(widths, 0.25)) * pixels_per_ms < 2


def _shares(boxes: Boxes, row: int, begins: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.float64]:
    """Which part of each interval the boxes of a row cover, [intervals]."""
    mine = boxes.row == row
    starts, stops = np.sort(boxes.start_ms[mine]), np.sort(boxes.end_ms[mine])
    covered = [_ramp(starts, edges) - _ramp(stops, edges) for edges in (begins, ends)]
    return (covered[1] - covered[0]) / (ends - begins)


def _ramp(ordered: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each edge, the sum of (edge - time) over the ordered times before it."""
    before = np.searchsorted(ordered, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    return edges * before - sums[before]
