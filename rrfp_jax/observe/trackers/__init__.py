"""Trackers: services that get the rows of ``metrics.jsonl``, such as TensorBoard."""

from rrfp_jax.observe.trackers.config import TRACKERS as TRACKERS
from rrfp_jax.observe.trackers.config import TrackerConfig as TrackerConfig
from rrfp_jax.observe.trackers.services import TRACKER_FILES as TRACKER_FILES
from rrfp_jax.observe.trackers.services import TrackedRun as TrackedRun
from rrfp_jax.observe.trackers.tracked_metrics import TrackedMetrics as TrackedMetrics
