"""Trackers: others that get the rows of ``metrics.jsonl``, such as TensorBoard.

Rules
-----
* What a tracker holds equals ``metrics.jsonl`` row by row, under the names of :mod:`rrfp_jax.observe.trackers.columns`.
  Where a run goes on and trains steps again, their first rows are gone, in each tracker by its own means; and rows that
  a killed run had not handed over are made up for from the file.
* A tracker never ends a run, and never slows its loop: each works on a thread of its own. What fails is named in one
  warning, and left out from then on.
* All rows are handed over before the process ends, whatever it ends with; how long that may take is bounded.
"""

from rrfp_jax.observe.trackers.config import TRACKERS as TRACKERS
from rrfp_jax.observe.trackers.config import TrackingConfig as TrackingConfig
from rrfp_jax.observe.trackers.tracked_metrics import TRACKER_FILES as TRACKER_FILES
from rrfp_jax.observe.trackers.tracked_metrics import TrackedMetrics as TrackedMetrics
